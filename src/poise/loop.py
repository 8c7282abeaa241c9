"""The algorithm as one page: roll out, score, pack, update, sync."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from poise.algo.advantages import group_advantages
from poise.config import Config
from poise.engine import EmbeddedEngine
from poise.envs.env import Task
from poise.harmony import Renderer
from poise.interrupt import Interrupt
from poise.model import GptOss
from poise.rollout import Limits, episode_metrics, run_group
from poise.seeding import derive_seed, row_index
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Batch, Policy, Trajectory

Episode = list[Trajectory]
Group = list[Episode]


class RolloutError(RuntimeError):
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
    on_step: Callable[[int, dict[str, float], Rollout], None],
) -> None:
    """One step for each of ``rollouts``, which are drawn one at a time: the next is sampled by the updated policy.

    ``on_step(step, metrics, rollout)`` runs after each step (from 1); what it raises ends the run between two steps.
    The first step's update raises MismatchError, and leaves the weights alone, where trainer and engine disagree by
    more than ``algorithm.max_mismatch``.
    """
    num_updates = config.algorithm.updates_per_batch
    for rollout in rollouts:
        started = time.perf_counter()
        step = trainer.steps_done // num_updates + 1
        updates = [pack_update(groups, config) for groups in split_evenly(rollout.groups, num_updates)]
        if num_updates > 1:
            updates = [trainer.with_old_log_probs(batches) for batches in updates]
        if reference is not None:
            updates = [trainer.with_ref_log_probs(batches, reference) for batches in updates]
        max_mismatch = config.algorithm.max_mismatch if step == 1 else None
        metrics = mean_metrics([trainer.step(batches, max_mismatch=max_mismatch) for batches in updates])
        engine.new_policy_version(trainer.steps_done)
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

    async def group_of(draw: int) -> Group:
        row = rows[row_index(draw, len(rows), config.run.seed)]
        group = await run_group(
            lambda: task.make_env(row),
            policy,
            renderer,
            group_id=draw,
            group_size=settings.group_size,
            seed=derive_seed(config.run.seed, draw),
            limits=limits,
        )
        on_group(group)
        return group

    async def all_groups() -> list[Group]:
        first_draw = (step - 1) * settings.groups_per_step
        return list(await asyncio.gather(*(group_of(first_draw + i) for i in range(settings.groups_per_step))))

    started = time.perf_counter()
    groups = interrupt.run(all_groups())
    return Rollout(groups=groups, seconds=time.perf_counter() - started)


def pack_update(groups: Sequence[Group], config: Config) -> list[Batch]:
    """Advantages against the group's mean, then micro-batches.

    Episodes that may not be trained on neither appear nor shift a baseline; a group that is left with fewer than two
    has no baseline and is dropped. Raises RolloutError where nothing is left.
    """
    groups = [[episode for episode in group if is_trainable(episode)] for group in groups]
    groups = [group for group in groups if len(group) > 1]
    episodes = [episode for group in groups for episode in group]
    if not episodes:
        raise RolloutError(
            "no group has two episodes that can be trained on: see stop_env_error and the warnings above"
        )
    advantages = group_advantages(
        torch.tensor([episode[0].reward for episode in episodes]),
        torch.tensor([episode[0].group_id for episode in episodes]),
        normalize=config.algorithm.normalize_advantages,
    )
    trajectories = [trajectory for episode in episodes for trajectory in episode if trajectory.is_trainable]
    per_trajectory = [
        advantage for episode, advantage in zip(episodes, advantages, strict=True) for t in episode if t.is_trainable
    ]
    return pack(trajectories, torch.stack(per_trajectory), tokens_per_microbatch=config.run.tokens_per_microbatch)


def is_trainable(episode: Episode) -> bool:
    return any(trajectory.is_trainable for trajectory in episode)


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """``equal_groups``: share of groups whose rewards are all the same, which teach nothing."""
    metrics = episode_metrics(rollout.episodes)
    metrics["equal_groups"] = float(
        np.mean([len({episode[0].reward for episode in group}) == 1 for group in rollout.groups])
    )
    num_sampled = metrics["response_tokens_per_episode"] * len(rollout.episodes)
    metrics["rollout_s"] = rollout.seconds
    metrics["rollout_tokens_per_s"] = num_sampled / rollout.seconds
    return metrics


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the updates of one step: means, but extremes for ``*_min`` and ``*_max``."""
    combine: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max}
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
    """Contiguous parts whose sizes differ by at most one."""
    borders = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [groups[start:end] for start, end in itertools.pairwise(borders)]
