"""The critic of PPO: what the rest of an episode will earn, token by token, and how it learns that."""

import math
from copy import deepcopy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poise.algo.losses import value_loss
from poise.config import Config, ConfigError
from poise.model import GptOss
from poise.parallel import ALONE, Mesh
from poise.train.optimizer import adamw, update, warmup_schedule
from poise.types import Batch

# A step's returns weigh 1 - this in the running mean and variance, so they remember about twenty steps.
RETURNS_DECAY = 0.95


class Critic(nn.Module):
    """V_t = mean + deviation (w . h_t + b), in units of the reward, and the optimizer of what is the critic's own.

    h_t is the hidden state that predicts target t, so V_t is the value of what stands before it. ``backbone`` "own": of
    a copy of the policy, made when the critic is, which takes its own experts; "shared": of the policy itself. w and b
    begin at 0 (all values at the mean), in float32. mean and deviation are 0 and 1, or with ``normalize_returns``
    "popart" those of the returns so far. All there is to save is this module and its ``optimizer``.
    """

    statistics: Tensor  # steps seen, mean and variance of the returns

    def __init__(self, policy: GptOss, config: Config) -> None:
        super().__init__()
        self.settings, self.config = config.critic, config
        self.device = policy.lm_head.weight.device
        self.backbone: GptOss | None = None
        if not self.is_shared:
            self.backbone = deepcopy(policy)
            del self.backbone.lm_head  # it says one number, not a word
        self.head = nn.Linear(policy.config.hidden_size, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("statistics", torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, device=self.device))
        self.optimizer = adamw(self, config.optimizer, self.device)
        self.schedule = warmup_schedule(config.optimizer, learning_rate=self.settings.learning_rate)

    @property
    def is_shared(self) -> bool:
        """Whether the hidden states are those of the policy."""
        return self.settings.backbone == "shared"

    @property
    def mean(self) -> float:
        return float(self.statistics[1])

    @property
    def deviation(self) -> float:
        return max(1e-4, math.sqrt(float(self.statistics[2])))

    @torch.no_grad()
    def values(self, hidden: Float[Tensor, "T D"], batch: Batch) -> Float[Tensor, " T"]:
        """V at the sampled tokens, in units of the reward, 0 elsewhere."""
        values = self.mean + self.deviation * self._predictions(hidden, batch)
        return values.masked_fill(~batch.response_mask, 0.0)

    def loss(
        self, hidden: Float[Tensor, "T D"], batch: Batch, weights: Float[Tensor, " T"]
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The weighted sum of ``value_loss`` over the sampled tokens, in units of the deviation, with its graph.

        Numbers about it are sums over the tokens.
        Raises ValueError for a batch without ``values`` and ``returns``.
        """
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic learns from batches with values and returns")
        loss, metrics = value_loss(
            self._predictions(hidden, batch),
            (batch.values - self.mean) / self.deviation,
            (batch.returns - self.mean) / self.deviation,
            batch.response_mask,
            clip=self.settings.value_clip,
            weights=weights,
        )
        return loss, {"value_loss": metrics["unweighted"], "value_clip_fraction": metrics["clipped_values"]}

    @torch.no_grad()
    def observe(self, returns: Float[Tensor, " n"]) -> None:
        """Takes the returns of a step into mean and deviation, and changes w and b so that every value stays the same.

        Pop-Art (van Hasselt et al. 2016, "Learning values across many orders of magnitude", section 2), with an
        average over the steps so far that begins at the first one's numbers. Does nothing without
        ``normalize_returns``.
        """
        if self.settings.normalize_returns == "none":
            return
        returns = returns.double()
        mean, deviation = self.mean, self.deviation
        steps = float(self.statistics[0]) + 1
        share = (1 - RETURNS_DECAY) / (1 - RETURNS_DECAY**steps)
        new_mean = mean + share * (float(returns.mean()) - mean)
        # Around the new mean, so that nothing is lost where the mean is large.
        before = float(self.statistics[2]) + (mean - new_mean) ** 2 if steps > 1 else 0.0
        variance = (1 - share) * before + share * float((returns - new_mean).square().mean())
        self.statistics.copy_(torch.tensor([steps, new_mean, variance], dtype=torch.float64))
        self.head.weight.mul_(deviation / self.deviation)
        self.head.bias.mul_(deviation).add_(mean - self.mean).div_(self.deviation)

    def update(self) -> dict[str, float]:
        """One step of the optimizer along the gradient that is there. Raises GradientError as ``optimizer.update``."""
        limit = self.config.optimizer.max_grad_norm
        norm, _ = update(self, self.optimizer, self.schedule, max_grad_norm=limit, owner="the critic's step")
        return {"critic_grad_norm": norm}

    def _predictions(self, hidden: Tensor, batch: Batch) -> Tensor:
        """(V - mean) / deviation at the sampled tokens, 0 elsewhere."""
        mask = batch.response_mask
        predictions = self.head(hidden[mask].float()).squeeze(-1)
        return predictions.new_zeros(len(mask)).masked_scatter(mask, predictions)


def make_critic(policy: GptOss, config: Config, *, mesh: Mesh = ALONE) -> Critic | None:
    """A new critic of ``policy`` as it is now; None where the advantages need none.

    Raises ConfigError on a mesh of several ranks.
    """
    if config.algorithm.normalize_advantages != "gae":
        return None
    if mesh.num_ranks > 1:
        raise ConfigError(
            f'algorithm.normalize_advantages "gae" runs on one rank so far, and this run has {mesh.num_ranks}'
        )
    return Critic(policy, config)
