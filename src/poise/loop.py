"""The algorithm as one page: roll out, score, pack, update, sync."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from poise.algo.advantages import group_advantages
from poise.config import Config, RunError
from poise.engine import EmbeddedEngine
from poise.envs.env import Task
from poise.harmony import Renderer
from poise.interrupt import Interrupt
from poise.model import GptOss
from poise.rollout import Limits, Lockstep, episode_metrics, run_group
from poise.seeding import derive_seed, row_index
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Batch, Policy, Trajectory

Episode = list[Trajectory]
Group = list[Episode]


class RolloutError(RunError):
    """No episode of a step can be trained on."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """All groups of one step, and the seconds it took to sample them."""

    groups: list[Group]
    seconds: float

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


def train(
    trainer: Trainer,
    reference: GptOss | None,
    engine: EmbeddedEngine,
    rollouts: Iterable[Rollout],
    config: Config,
    *,
    first_step: int,
    on_step: Callable[[int, dict[str, float], Rollout], None],
    on_batch: Callable[[int], None] = lambda num_tokens: None,
) -> None:
    """One step for each of ``rollouts``, which are drawn one at a time: the next is sampled by the updated policy.

    ``on_step(step, metrics, rollout)`` runs after each step; what it raises ends the run between two steps.
    ``on_batch(num_tokens)`` after each micro-batch. The first update of all raises MismatchError, and leaves the
    weights alone, where trainer and engine disagree by more than ``algorithm.max_mismatch``.
    """
    num_updates = config.algorithm.updates_per_batch
    for step, rollout in enumerate(rollouts, start=first_step):
        started = time.perf_counter()
        updates = [pack_update(groups, config) for groups in split_evenly(trainable_groups(rollout), num_updates)]
        if num_updates > 1:
            updates = [trainer.with_old_log_probs(batches) for batches in updates]
        if reference is not None:
            updates = [trainer.with_ref_log_probs(batches, reference) for batches in updates]
        # Later steps report the mismatch; only before the very first is nothing lost by stopping.
        bounds = [config.algorithm.max_mismatch if trainer.steps_done == 0 else None, *[None] * (len(updates) - 1)]
        metrics = mean_metrics(
            [
                trainer.step(batches, max_mismatch=bound, on_batch=on_batch)
                for batches, bound in zip(updates, bounds, strict=True)
            ]
        )
        engine.new_policy_version(step)
        on_step(step, rollout_metrics(rollout) | metrics | train_speed(updates, started), rollout)


def roll_out(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    config: Config,
    *,
    step: int,
    interrupt: Interrupt,
    on_group: Callable[[Group], None],
) -> Rollout:
    """All groups of ``step`` (from 1), concurrently. Problems and seeds depend on the step alone, so a resumed run
    samples what an uninterrupted one would have. ``on_group`` hears of each group as it completes."""
    rows, settings = task.train_rows, config.rollout
    limits = Limits.from_config(settings)
    lockstep = Lockstep(policy, num_episodes=settings.groups_per_step * settings.group_size)

    async def group_of(draw: int) -> Group:
        row = rows[row_index(draw, len(rows), config.run.seed)]
        group = await run_group(
            lambda: task.make_env(row),
            lockstep if settings.lockstep else policy,
            renderer,
            group_id=draw,
            group_size=settings.group_size,
            seed=derive_seed(config.run.seed, draw),
            limits=limits,
            on_episode=lockstep.leave,
        )
        on_group(group)
        return group

    async def all_groups() -> list[Group]:
        first_draw = (step - 1) * settings.groups_per_step
        return list(await asyncio.gather(*(group_of(first_draw + i) for i in range(settings.groups_per_step))))

    started = time.perf_counter()
    groups = interrupt.run(all_groups())
    return Rollout(groups=groups, seconds=time.perf_counter() - started)


def trainable_groups(rollout: Rollout) -> list[Group]:
    """Without the episodes that may not be trained on, which would shift the baseline of their siblings.

    A group that is left with fewer than two episodes has no baseline and is dropped. Raises RolloutError where nothing
    is left.
    """
    groups = [[episode for episode in group if is_trainable(episode)] for group in rollout.groups]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        raise RolloutError("no group has two episodes that can be trained on: see the warnings about env_error above")
    return groups


def pack_update(groups: Sequence[Group], config: Config) -> list[Batch]:
    """Advantages against each group's mean, then micro-batches."""
    episodes = [episode for group in groups for episode in group]
    advantages = group_advantages(
        torch.tensor([episode[0].reward for episode in episodes]),
        torch.tensor([episode[0].group_id for episode in episodes]),
        normalize=config.algorithm.normalize_advantages,
    )
    trained = [
        (trajectory, advantage)
        for episode, advantage in zip(episodes, advantages, strict=True)
        for trajectory in episode
        if trajectory.is_trainable
    ]
    return pack(
        [trajectory for trajectory, _ in trained],
        torch.stack([advantage for _, advantage in trained]),
        tokens_per_microbatch=config.run.tokens_per_microbatch,
    )


def is_trainable(episode: Episode) -> bool:
    return any(trajectory.is_trainable for trajectory in episode)


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """``equal_groups``: share of groups whose trainable episodes all earned the same, so that they teach nothing."""
    metrics = episode_metrics(rollout.episodes)
    rewards = [{episode[0].reward for episode in group if is_trainable(episode)} for group in rollout.groups]
    metrics["equal_groups"] = float(np.mean([len(distinct) <= 1 for distinct in rewards]))
    num_sampled = metrics["response_tokens_per_episode"] * len(rollout.episodes)
    metrics["rollout_s"] = rollout.seconds
    metrics["rollout_tokens_per_s"] = num_sampled / rollout.seconds
    return metrics


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the updates of one step: means, but extremes for ``*_min`` and ``*_max``, and the sum of ``*_tokens``."""
    combine: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "tokens": sum}
    return {
        name: combine.get(name.rsplit("_", 1)[-1], lambda values: sum(values) / len(values))(
            [update[name] for update in updates]
        )
        for name in updates[0]
        if name != "tokens_per_s"
    }


def train_speed(updates: Sequence[Sequence[Batch]], started: float) -> dict[str, float]:
    seconds = time.perf_counter() - started
    num_tokens = sum(len(batch.input_ids) for batches in updates for batch in batches)
    return {"train_s": seconds, "train_tokens_per_s": num_tokens / seconds}


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Contiguous parts, none of them empty, whose sizes differ by at most one: ``num_parts``, or one per group."""
    num_parts = min(num_parts, len(groups))
    borders = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [groups[start:end] for start, end in itertools.pairwise(borders)]
