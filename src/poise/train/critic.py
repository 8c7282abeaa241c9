"""The critic of PPO: what the rest of an episode will earn, token by token, and how it learns that."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poise.algo.losses import value_loss
from poise.config import Config
from poise.model import GptOss
from poise.parallel import ALONE, Mesh, empty_linear, local_part, put_away, rows_of_rank, split_copy
from poise.train.forward import at_sampled
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

    ``mesh``: the ranks that its parameters are split over, as the policy's are, in float32. ``hidden`` is then that of
    this rank's rows, and what comes of it is known to all the ranks that share them.
    """

    statistics: Tensor  # steps seen, mean and variance of the returns

    def __init__(self, policy: GptOss, config: Config, *, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self.settings, self.config, self.mesh = config.critic, config, mesh
        self.device = mesh.device or policy.lm_head.weight.device
        # Its head says one number, not a word.
        self.backbone = None if self.is_shared else split_copy(policy, mesh, has_head=False)
        self.head = empty_linear(policy.config.hidden_size, 1, mesh, self.device)
        for parameter in self.head.parameters():
            local_part(parameter.detach()).zero_()
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
    def values(self, hidden: Float[Tensor, "R D"], batch: Batch) -> Float[Tensor, " T"]:
        """V at the sampled tokens, in units of the reward, 0 elsewhere."""
        values = self.mean + self.deviation * self.predictions(hidden, batch)
        return values.masked_fill(~batch.response_mask, 0.0)

    def loss(
        self, hidden: Float[Tensor, "R D"], batch: Batch, weights: Float[Tensor, " T"]
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The weighted sum of ``value_loss`` over the sampled tokens, in units of the deviation, with its graph.

        Numbers about it are sums over the tokens.
        Raises ValueError for a batch without ``values`` and ``returns``.
        """
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic learns from batches with values and returns")
        loss, metrics = value_loss(
            self.predictions(hidden, batch),
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
        put_away(self)
        local_part(self.head.weight).mul_(deviation / self.deviation)
        local_part(self.head.bias).mul_(deviation).add_(mean - self.mean).div_(self.deviation)

    def update(self) -> dict[str, float]:
        """One step of the optimizer along the gradient that is there. Raises GradientError as ``optimizer.update``."""
        limit, owner = self.config.optimizer.max_grad_norm, "the critic's step"
        norm, _ = update(self, self.optimizer, self.schedule, max_grad_norm=limit, owner=owner, mesh=self.mesh)
        return {"critic_grad_norm": norm}

    def predictions(self, hidden: Float[Tensor, "R D"], batch: Batch) -> Float[Tensor, " T"]:
        """(V - mean) / deviation at the sampled tokens, 0 elsewhere, with its graph."""
        mine = rows_of_rank(batch.response_mask, self.mesh)
        return at_sampled(self.head(hidden[mine].float()).squeeze(-1), batch.response_mask, self.mesh)


def make_critic(policy: GptOss, config: Config, *, mesh: Mesh = ALONE) -> Critic | None:
    """A new critic of ``policy`` as it is now; None where the advantages need none."""
    return Critic(policy, config, mesh=mesh) if config.algorithm.normalize_advantages == "gae" else None
