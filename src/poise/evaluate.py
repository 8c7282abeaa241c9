"""Held-out reward of a policy on a task."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from poise.envs.env import Task
from poise.harmony import Renderer
from poise.rollout import Limits, episode_metrics, run_episode
from poise.seeding import derive_seed
from poise.types import Policy, Trajectory


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """``metrics`` are means over ``num_problems`` episodes, one per problem (see ``episode_metrics``)."""

    num_problems: int
    metrics: dict[str, float]
    episodes: list[list[Trajectory]]

    @classmethod
    def of(cls, episodes: list[list[Trajectory]]) -> "Evaluation":
        return cls(num_problems=len(episodes), metrics=episode_metrics(episodes), episodes=episodes)


async def evaluate(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    *,
    num_problems: int,
    limits: Limits,
    seed: int,
    max_concurrent: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Evaluation:
    """One episode for each of the first ``num_problems`` held-out rows (0: all), at most ``max_concurrent`` at once.

    Raises ValueError where the task has no held-out rows.
    """
    return Evaluation.of(
        await held_out_episodes(
            policy,
            renderer,
            task,
            num_problems=num_problems,
            limits=limits,
            seed=seed,
            max_concurrent=max_concurrent,
            on_episode=on_episode,
        )
    )


async def held_out_episodes(
    policy: Policy,
    renderer: Renderer,
    task: Task,
    *,
    num_problems: int,
    limits: Limits,
    seed: int,
    max_concurrent: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    share: slice = slice(None),
) -> list[list[Trajectory]]:
    """The episodes of ``evaluate``, or ``share`` of them: what an episode becomes depends on its problem alone.

    ENV_ERROR counts as reward 0: a grader that fails must not flatter the policy. Raises ValueError where the task has
    no held-out rows.
    """
    rows = task.test_rows
    num_problems = min(num_problems or len(rows), len(rows))
    if num_problems == 0:
        raise ValueError("the task has no held-out rows to evaluate on")
    gate = asyncio.Semaphore(max_concurrent)

    async def episode(index: int) -> list[Trajectory]:
        async with gate:
            trajectories = await run_episode(
                lambda: task.make_env(rows[index]),
                policy,
                renderer,
                group_id=index,
                episode_id=f"eval/{index}",
                seed=derive_seed(seed, index),
                limits=limits,
            )
        on_episode(trajectories[0])
        return trajectories

    return list(await asyncio.gather(*(episode(i) for i in range(num_problems)[share])))
