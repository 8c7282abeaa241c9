"""From episodes to advantages: which are trained on, what they earned, how much better than others they did."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from poise.algo.advantages import group_advantages, turn_advantages
from poise.algo.correction import rollout_correction
from poise.algo.losses import kl, sequence_sums
from poise.config import Config, RunError
from poise.model import GptOss
from poise.train.packing import TokenCredit, first_fit_decreasing, pack
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory

Episode = list[Trajectory]
Group = list[Episode]
Scored = list[tuple[Trajectory, Tensor | TokenCredit]]
"""Trajectories that are trained on, each with its advantage: one number, one a turn, or one a sampled token."""


class RolloutError(RunError):
    """No episode of a step can be trained on."""


def is_trainable(episode: Episode) -> bool:
    return any(trajectory.is_trainable for trajectory in episode)


def trainable_groups(groups: Sequence[Group], config: Config) -> list[Group]:
    """Without the episodes that may not be trained on, which would shift the baseline of their siblings.

    Those that ended in ENV_ERROR and, with ``overlong`` "filter", those that a limit of tokens cut (DAPO, Yu et al.
    2025, section 3.4). Raises RolloutError where nothing is left.
    """
    filters = config.algorithm.overlong == "filter"

    def is_used(episode: Episode) -> bool:
        return is_trainable(episode) and not (filters and episode[0].stop is Stop.MAX_TOKENS)

    why = _why_none([episode for group in groups for episode in group], config)
    return with_baseline([[episode for episode in group if is_used(episode)] for group in groups], config, why=why)


def _why_none(episodes: Sequence[Episode], config: Config) -> str:
    """Why so few of them can be trained on, in a sentence."""
    few = "no episode" if config.algorithm.normalize_advantages == "gae" else "no group with two episodes"
    num_failed = sum(episode[0].stop is Stop.ENV_ERROR for episode in episodes)
    cut = [episode for episode in episodes if episode[0].stop is Stop.MAX_TOKENS]
    num_unheard = sum(not any(trajectory.turns for trajectory in episode) for episode in cut)
    limit = f"rollout.max_context_tokens ({config.rollout.max_context_tokens})"
    reasons = [
        (num_failed, f"{num_failed} ended as env_error (see the warnings above)"),
        (num_unheard, f"the prompts of {num_unheard} do not fit {limit}"),
    ]
    if config.algorithm.overlong == "filter":
        num_cut = len(cut) - num_unheard
        reasons.append((num_cut, f'algorithm.overlong "filter" drops {num_cut} that a limit of tokens cut'))
    found = ", ".join(reason for number, reason in reasons if number)
    return f"there is {few} that can be trained on: of {len(episodes)}, {found or 'none sampled a token'}"


def with_baseline(groups: Sequence[Group], config: Config, *, why: str) -> list[Group]:
    """Without the groups that are left with too few episodes: one has no siblings to be compared with, and for
    ``global`` and ``gae`` needs none.

    Raises RolloutError with the sentence ``why`` where fewer than two episodes are left (``gae``: none).
    """
    algorithm = config.algorithm
    groups = [group for group in groups if len(group) > (1 if algorithm.has_group_baseline else 0)]
    if sum(len(group) for group in groups) < (1 if algorithm.normalize_advantages == "gae" else 2):
        raise RolloutError(why)
    return groups


def with_penalties(groups: Sequence[Group], config: Config) -> tuple[list[Group], dict[str, float]]:
    """Rewards minus DAPO's soft penalty on length (Yu et al. 2025, equation 13), where ``overlong`` is "penalty".

    penalty = clip((n - (max_context_tokens - buffer)) / buffer, 0, 1), with n the tokens of the longest stream.
    """
    if config.algorithm.overlong != "penalty":
        return list(groups), {}
    buffer, penalties = config.algorithm.overlong_buffer_tokens, list[float]()
    free = config.rollout.max_context_tokens - buffer

    def penalized(episode: Episode) -> Episode:
        num_tokens = max(len(trajectory.token_ids) for trajectory in episode)
        penalties.append(min(1.0, max(0.0, (num_tokens - free) / buffer)))
        return _with_reward(episode, episode[0].reward - penalties[-1])

    penalized_groups = [[penalized(episode) for episode in group] for group in groups]
    return penalized_groups, {"overlong_penalty": sum(penalties) / len(penalties)}


def screened(
    trainer: Trainer, reference: GptOss | None, groups: Sequence[Group], config: Config
) -> tuple[list[Group], dict[str, float]]:
    """What needs the trainer's log-probs before there is a baseline; does nothing where the configuration does not ask.

    Rejection: an episode leaves where rollout correction rejects one of its streams (``reject_by``, ``veto_below``).
    KL in the reward: reward - kl_weight sum_t (log_probs - ref_log_probs) over its tokens, k1, whose expectation is the
    KL of the policy from the reference (Stiennon et al. 2020, section 3.4); with a critic, tokens pay (``credited``).
    Takes one forward pass more. Raises RolloutError, naming the bound, where it rejects too many.
    """
    algorithm = config.algorithm
    has_critic = algorithm.normalize_advantages == "gae"
    reads_reference = algorithm.kl_weight > 0 and algorithm.kl_in == "reward" and not has_critic
    if not algorithm.rejects and not reads_reference:
        return list(groups), {}
    streams = [stream for group in groups for episode in group for stream in episode if stream.is_trainable]
    keeps, kl_sums, num_vetoed = _screen(trainer, reference if reads_reference else None, streams, config)
    numbers = iter(zip(keeps, kl_sums, strict=True))
    kept: list[Group] = []
    for group in groups:
        kept.append([])
        for episode in group:
            mine = [next(numbers) for stream in episode if stream.is_trainable]
            if all(keep for keep, _ in mine):
                penalty = algorithm.kl_weight * sum(kl_sum for _, kl_sum in mine) if reads_reference else 0.0
                kept[-1].append(_with_reward(episode, episode[0].reward - penalty))
    metrics: dict[str, float] = {}
    if reads_reference:
        metrics["kl"] = sum(kl_sums) / sum(sum(stream.response_mask) for stream in streams)
    if algorithm.rejects:
        metrics["rejected_episodes"] = 1 - sum(map(len, kept)) / sum(map(len, groups))
        num_rejected = keeps.count(False)
        num_others = num_rejected - num_vetoed
        why = (
            f"rollout correction rejected {num_rejected} of {len(keeps)} streams and left no group with a baseline: "
            f"{num_vetoed} have a token below algorithm.veto_below ({algorithm.veto_below:g}), {num_others} "
            f"others exceed algorithm.reject_above ({algorithm.reject_above:g})"
        )
        kept = with_baseline(kept, config, why=why)
    return kept, metrics


def scored(groups: Sequence[Group], config: Config) -> list[Scored]:
    """The trained trajectories of each group with their advantages (``normalize_advantages``, ``credit``).

    Raises ValueError for "gae", whose advantages are a critic's.
    """
    algorithm = config.algorithm
    if algorithm.normalize_advantages == "gae":
        raise ValueError('algorithm.normalize_advantages "gae" needs a critic: see credited')
    episodes = [episode for group in groups for episode in group]
    group_ids = torch.tensor([episode[0].group_id for episode in episodes])
    rewards = torch.tensor([episode[0].reward for episode in episodes], dtype=torch.float64)
    advantages = list(group_advantages(rewards, group_ids, normalize=algorithm.normalize_advantages))
    if algorithm.credit == "turn":
        advantages = turn_advantages(
            torch.stack(advantages),
            group_ids,
            [[turn.reward for stream in episode for turn in stream.turns] for episode in episodes],
            discount=algorithm.turn_discount,
            normalize=algorithm.normalize_advantages,
        )
    by_episode = iter(zip(episodes, advantages, strict=True))
    return [[pair for _ in group for pair in _stream_advantages(*next(by_episode))] for group in groups]


def _stream_advantages(episode: Episode, advantage: Tensor) -> Scored:
    """The episode's number for each stream, or its turns' numbers stream by stream."""
    parts = [advantage] * len(episode)
    if advantage.dim():
        parts = list(advantage.split([len(stream.turns) for stream in episode]))
    return [(stream, part) for stream, part in zip(episode, parts, strict=True) if stream.is_trainable]


def _screen(
    trainer: Trainer, reference: GptOss | None, streams: Sequence[Trajectory], config: Config
) -> tuple[list[bool], list[float], int]:
    """Of each stream: whether it is kept, and the sum of k1 to the reference; the number of vetoed ones."""
    algorithm, budget = config.algorithm, config.run.tokens_per_microbatch
    batches = trainer.with_old_log_probs(pack(streams, torch.zeros(len(streams)), tokens_per_microbatch=budget))
    if reference is not None:
        batches = trainer.with_ref_log_probs(batches, reference)
    keeps, kl_sums, num_vetoed = [True] * len(streams), [0.0] * len(streams), 0
    members = first_fit_decreasing([len(stream.token_ids) - 1 for stream in streams], budget)
    for batch, indices in zip(batches, members, strict=True):
        assert batch.old_log_probs is not None
        _, keep, counts = rollout_correction(
            batch.old_log_probs,
            batch.rollout_log_probs,
            batch.response_mask,
            batch.cu_seqlens,
            reject_by=algorithm.reject_by,
            reject_estimator=algorithm.reject_estimator,
            reject_above=algorithm.reject_above,
            veto_below=algorithm.veto_below,
        )
        num_vetoed += int(counts["vetoed_sequences"])
        num_kept = sequence_sums(keep.double(), keep, batch.cu_seqlens)
        estimates = torch.zeros_like(batch.old_log_probs)
        if batch.ref_log_probs is not None:
            estimates = kl(batch.old_log_probs, batch.ref_log_probs, "k1")
        sums = sequence_sums(estimates, batch.response_mask, batch.cu_seqlens)
        for index, count, kl_sum in zip(indices, num_kept.tolist(), sums.tolist(), strict=True):
            keeps[index], kl_sums[index] = count > 0, kl_sum
    return keeps, kl_sums, num_vetoed


def _with_reward(episode: Episode, reward: float) -> Episode:
    return [replace(stream, reward=reward) for stream in episode]
