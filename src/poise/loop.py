"""The algorithm as one page: roll out, score, pack, update, sync."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from poise.config import Config, RunError
from poise.envs.env import Task
from poise.harmony import Renderer
from poise.interrupt import Interrupt, Interrupted
from poise.model import GptOss
from poise.parallel import ALONE, Mesh, settled, together
from poise.rollout import Limits, Lockstep, episode_metrics, run_group
from poise.seeding import derive_seed, row_index
from poise.train.credit import credited
from poise.train.packing import pack
from poise.train.scoring import Episode, Group, Scored, is_trainable, screened, trainable_groups, with_penalties
from poise.train.trainer import Trainer
from poise.types import Batch, Policy

T = TypeVar("T")


class Engine(Protocol):
    """What hears of new weights: ``new_policy_version(step)`` after the step that made them."""

    def new_policy_version(self, version: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The groups of one step, the seconds it took to sample them, and the groups that they were sampled to replace."""

    groups: list[Group]
    seconds: float
    replaced: list[Group] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        """All that were sampled."""
        return [episode for group in (*self.groups, *self.replaced) for episode in group]


def train(
    trainer: Trainer,
    reference: GptOss | None,
    engine: Engine,
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
    algorithm = config.algorithm
    needs_old_log_probs = algorithm.updates_per_batch > 1 or algorithm.recompute_old_log_probs != "none"
    for step, rollout in enumerate(rollouts, start=first_step):
        started = time.perf_counter()
        groups, penalties = with_penalties(trainable_groups(rollout.groups, config), config)
        groups, screening = screened(trainer, reference, groups, config)
        scores, credit = credited(trainer, reference, groups, config)
        updates = [pack_update(part, config) for part in split_evenly(scores, algorithm.updates_per_batch)]
        if needs_old_log_probs:
            updates = [trainer.with_old_log_probs(batches) for batches in updates]
        if reference is not None and algorithm.kl_in == "loss":
            updates = [trainer.with_ref_log_probs(batches, reference) for batches in updates]
        # Later steps report the mismatch; only before the very first is nothing lost by stopping.
        bounds = [algorithm.max_mismatch if trainer.steps_done == 0 else None, *[None] * (len(updates) - 1)]
        trains_policy = step > config.critic.pretrain_steps
        metrics = mean_metrics(
            [
                trainer.step(batches, max_mismatch=bound, trains_policy=trains_policy, on_batch=on_batch)
                for batches, bound in zip(updates, bounds, strict=True)
            ]
        )
        engine.new_policy_version(step)
        metrics |= rollout_metrics(rollout) | staleness(rollout, step - 1) | penalties | screening | credit
        metrics |= train_speed(updates, started)
        on_step(step, metrics, rollout)


def roll_out(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    config: Config,
    *,
    step: int,
    interrupt: Interrupt,
    on_group: Callable[[Group], None],
    mesh: Mesh = ALONE,
) -> Rollout:
    """All groups of ``step`` (from 1), concurrently. Problems and seeds depend on the step and on what was sampled in
    it, so a resumed run samples what an uninterrupted one would have. ``on_group`` hears of each group as it ends.
    Each rank of ``mesh`` samples every so many-th group, whole, and all of them get all groups; what one rank fails
    with, all raise.

    Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups whose episodes all earned the same are replaced by
    those of other problems, in at most ``algorithm.max_resamples`` rounds; what is equal after the last stays.
    """
    groups_of = sampler(policy, renderer, task, config, on_group)
    num_rounds = 1 + config.algorithm.max_resamples
    started = time.perf_counter()
    groups, replaced = list[Group](), list[Group]()
    for round_ in range(num_rounds):
        draws = draws_of(step, round_, config)[: config.rollout.groups_per_step - len(groups)]
        mine = interrupt.run(settled(mesh, groups_of(draws[mesh.rank :: mesh.num_ranks])))
        sampled = interleaved(together(mesh, mine))
        is_last = round_ == num_rounds - 1
        groups += [group for group in sampled if is_last or not is_equal(group)]
        replaced += [group for group in sampled if not is_last and is_equal(group)]
        if len(groups) == config.rollout.groups_per_step:
            break
    return Rollout(groups=groups, seconds=time.perf_counter() - started, replaced=replaced)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank sampled of a step, or failed with, and in how many seconds."""

    outcome: list[Group] | RunError | Interrupted
    seconds: float


def roll_out_share(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    config: Config,
    *,
    step: int,
    interrupt: Interrupt,
    on_group: Callable[[Group], None],
    mesh: Mesh,
) -> Share:
    """This rank's part of ``roll_out``, without a word to the others: for a thread beside the trainer.

    ``whole_rollout`` makes a Rollout of the parts of all. There is no dynamic sampling: it needs all groups.
    """
    groups_of = sampler(policy, renderer, task, config, on_group)
    draws, started = draws_of(step, 0, config), time.perf_counter()
    outcome: list[Group] | RunError | Interrupted
    try:
        outcome = interrupt.run(settled(mesh, groups_of(draws[mesh.rank :: mesh.num_ranks])), agrees=False)
    except Interrupted as error:
        outcome = error
    return Share(outcome=outcome, seconds=time.perf_counter() - started)


def whole_rollout(share: Share, *, interrupt: Interrupt, mesh: Mesh) -> Rollout:
    """Of the shares of all ranks, which all call it. Raises what one of them failed with, or Interrupted."""
    interrupt.check()  # raises on all where one share was cut short
    assert not isinstance(share.outcome, Interrupted)
    groups = interleaved(together(mesh, share.outcome))
    return Rollout(groups=groups, seconds=max(mesh.gather_from_all(share.seconds)))


def draws_of(step: int, round_: int, config: Config) -> range:
    """The numbers of the groups that a round of ``step`` may sample: each names a problem and a seed."""
    num_rounds, num_groups = 1 + config.algorithm.max_resamples, config.rollout.groups_per_step
    first = ((step - 1) * num_rounds + round_) * num_groups
    return range(first, first + num_groups)


def sampler(
    policy: Policy, renderer: Renderer, task: Task, config: Config, on_group: Callable[[Group], None]
) -> Callable[[range], Coroutine[Any, Any, list[Group]]]:
    """From the numbers of groups to the groups, all at once."""
    rows, settings = task.train_rows, config.rollout
    limits = Limits.from_config(settings)

    async def group_of(draw: int, lockstep: Lockstep) -> Group:
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

    async def groups_of(draws: range) -> list[Group]:
        lockstep = Lockstep(policy, num_episodes=len(draws) * settings.group_size)
        return list(await asyncio.gather(*(group_of(draw, lockstep) for draw in draws)))

    return groups_of


def interleaved(parts: Sequence[Sequence[T]]) -> list[T]:
    """What was dealt one by one to ``parts``, in its order before."""
    longest = max(map(len, parts))
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def pack_update(groups: Sequence[Scored], config: Config) -> list[Batch]:
    """Micro-batches of one optimizer step."""
    trained = [pair for group in groups for pair in group]
    return pack(
        [trajectory for trajectory, _ in trained],
        [advantage for _, advantage in trained],
        tokens_per_microbatch=config.run.tokens_per_microbatch,
    )


def is_equal(group: Group) -> bool:
    """Whether the trainable episodes all earned the same: against each other, they teach nothing."""
    return len({episode[0].reward for episode in group if is_trainable(episode)}) <= 1


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Of all that was sampled. ``equal_groups``: share of groups whose trainable episodes all earned the same."""
    metrics = episode_metrics(rollout.episodes)
    metrics["equal_groups"] = float(np.mean([is_equal(group) for group in (*rollout.groups, *rollout.replaced)]))
    metrics["replaced_groups"] = float(len(rollout.replaced))
    num_sampled = metrics["response_tokens_per_episode"] * len(rollout.episodes)
    metrics["rollout_s"] = rollout.seconds
    metrics["rollout_tokens_per_s"] = num_sampled / rollout.seconds
    return metrics


def staleness(rollout: Rollout, version: int) -> dict[str, float]:
    """By how many updates ``version``, with which a step begins, is ahead of the policies that sampled its tokens."""
    ages = [version - v for episode in rollout.episodes for trajectory in episode for v in trajectory.policy_versions]
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": float(max(ages))} if ages else {}


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


def split_evenly(groups: Sequence[Scored], num_parts: int) -> list[Sequence[Scored]]:
    """Contiguous parts, none of them empty, whose sizes differ by at most one: ``num_parts``, or one per group."""
    num_parts = min(num_parts, len(groups))
    borders = [len(groups) * i // num_parts for i in range(num_parts + 1)]
    return [groups[start:end] for start, end in itertools.pairwise(borders)]
