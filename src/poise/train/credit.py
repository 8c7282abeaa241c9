"""What every sampled token is credited with: its episode's advantage, or its own by a critic."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from poise.algo.advantages import explained_variance, gae, group_advantages
from poise.algo.losses import kl
from poise.config import Config
from poise.model import GptOss
from poise.train.packing import TokenCredit, first_fit_decreasing, pack
from poise.train.scoring import Episode, Group, Scored, scored
from poise.train.trainer import Trainer
from poise.types import Batch, Trajectory


def credited(
    trainer: Trainer, reference: GptOss | None, groups: Sequence[Group], config: Config
) -> tuple[list[Scored], dict[str, float]]:
    """The trained trajectories of each group with their advantages, and numbers about them.

    ``normalize_advantages`` "gae" (PPO, Schulman et al. 2017, section 5): values of all sampled tokens by the critic as
    it is before the updates, then generalized advantage estimation along each episode. An episode's steps are its
    sampled tokens, over turns and over streams; what was observed lies between two steps and is none. See
    ``token_rewards``. Raises ValueError where the trainer has no critic.
    """
    if config.algorithm.normalize_advantages != "gae":
        return scored(groups, config), {}
    if trainer.critic is None:
        raise ValueError('algorithm.normalize_advantages is "gae" but the trainer has no critic')
    episodes = [[stream for stream in episode if stream.is_trainable] for group in groups for episode in group]
    streams = [stream for episode in episodes for stream in episode]
    values, penalties, metrics = _pass_before(trainer, reference, streams, config)
    counts = [len(part) for part in values]
    earned = torch.cat([part for episode in episodes for part in token_rewards(episode, config)])
    borders = _borders([sum(len(turn.action_ids) for s in episode for turn in s.turns) for episode in episodes])
    expected = torch.cat(values)
    advantages, returns = gae(
        earned - torch.cat(penalties),
        expected,
        torch.ones_like(expected, dtype=torch.bool),
        gamma=config.critic.gamma,
        lam=config.critic.lam,
        cu_seqlens=borders,
    )
    metrics |= {
        "explained_variance": explained_variance(expected, returns),
        "value_mean": expected.mean().item(),
        "return_mean": returns.mean().item(),
    }
    # One token alone has nothing to be compared with.
    if config.critic.whiten_advantages and len(advantages) > 1:
        advantages = group_advantages(advantages, torch.zeros(len(advantages), dtype=torch.int64), normalize="std")
    trainer.critic.observe(returns)
    parts = zip(advantages.split(counts), values, returns.split(counts), strict=True)
    credits = (TokenCredit(advantages=a, values=v, returns=r) for a, v, r in parts)
    return _by_group(groups, credits), metrics


def token_rewards(episode: Episode, config: Config) -> list[Tensor]:
    """Of each stream, a reward for each sampled token, float64.

    The episode's at the last of them all, and with ``credit`` "turn" each turn's at the last of the turn.
    """
    rewards = []
    for stream in episode:
        ends = list(itertools.accumulate(len(turn.action_ids) for turn in stream.turns))
        rewards.append(torch.zeros(ends[-1], dtype=torch.float64))
        if config.algorithm.credit == "turn":
            for end, turn in zip(ends, stream.turns, strict=True):
                rewards[-1][max(end - 1, 0)] += turn.reward
    rewards[-1][-1] += episode[-1].reward
    return rewards


def _pass_before(
    trainer: Trainer, reference: GptOss | None, streams: Sequence[Trajectory], config: Config
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Of each stream, at its sampled tokens: values, and what the KL takes off the rewards; float64.

    With ``kl_in`` "reward" every token pays kl_weight (log_probs - ref_log_probs), k1, where it is sampled (Ouyang et
    al. 2022, "Training language models to follow instructions with human feedback", section 3.5).
    """
    algorithm, budget = config.algorithm, config.run.tokens_per_microbatch
    batches = pack(streams, torch.zeros(len(streams)), tokens_per_microbatch=budget)
    members = first_fit_decreasing([len(stream.token_ids) - 1 for stream in streams], budget)
    batches = trainer.with_values(batches)
    values = _by_stream(batches, members, [batch.values for batch in batches if batch.values is not None])
    if reference is None or algorithm.kl_in != "reward":
        return values, [torch.zeros_like(part) for part in values], {}
    estimates = []
    for batch in trainer.with_ref_log_probs(trainer.with_old_log_probs(batches), reference):
        assert batch.old_log_probs is not None
        assert batch.ref_log_probs is not None
        estimates.append(kl(batch.old_log_probs, batch.ref_log_probs, "k1"))
    kls = _by_stream(batches, members, estimates)
    return values, [algorithm.kl_weight * part for part in kls], {"kl": torch.cat(kls).mean().item()}


def _by_stream(batches: Sequence[Batch], members: Sequence[Sequence[int]], numbers: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of micro-batches at the sampled tokens of each stream, in the order of the streams."""
    found: dict[int, Tensor] = {}
    for batch, indices, tokens in zip(batches, members, numbers, strict=True):
        lengths = batch.cu_seqlens.diff().tolist()
        masks = batch.response_mask.split(lengths)
        for index, part, mask in zip(indices, tokens.split(lengths), masks, strict=True):
            found[index] = part[mask].double().cpu()
    return [found[index] for index in range(len(found))]


def _borders(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def _by_group(groups: Sequence[Group], credits: Iterator[TokenCredit]) -> list[Scored]:
    return [
        [(stream, next(credits)) for episode in group for stream in episode if stream.is_trainable] for group in groups
    ]
