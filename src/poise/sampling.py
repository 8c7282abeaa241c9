"""The rollouts of a run, step by step: each when its turn comes, or ahead of the trainer."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

from poise.ahead import ahead
from poise.config import Config
from poise.console import Console
from poise.engine import EmbeddedEngine
from poise.envs.env import Task
from poise.harmony import Renderer
from poise.interrupt import Interrupt
from poise.loop import Rollout, roll_out, roll_out_share, whole_rollout
from poise.parallel import Mesh
from poise.session import push_before_sampling
from poise.train.remote import RemoteEngine
from poise.train.scoring import Group
from poise.types import Policy

T = TypeVar("T", covariant=True)


class RollOut(Protocol[T]):
    """``roll_out`` or ``roll_out_share``."""

    def __call__(
        self,
        policy: Policy,
        renderer: Renderer,
        task: Task,
        config: Config,
        *,
        step: int,
        interrupt: Interrupt,
        on_group: Callable[[Group], None],
        mesh: Mesh,
    ) -> T: ...


def rollouts(
    engine: EmbeddedEngine | RemoteEngine,
    renderer: Renderer,
    task: Task,
    config: Config,
    steps: Sequence[int],
    *,
    interrupt: Interrupt,
    console: Console,
    mesh: Mesh,
) -> Generator[Rollout]:
    """Of each of ``steps``, under a bar that shows reward and speed. ``rollout.max_staleness``: how many steps ahead.

    On a mesh, servers get the weights before a step is sampled. Ahead of the trainer, whose ranks are busy with each
    other then, a rank samples its share alone, in threads of its own; shares become rollouts where the trainer asks
    for them.
    """
    lead = config.rollout.max_staleness

    def sampled(how: RollOut[T], step: int) -> T:
        rewards = list[float]()
        started, sampled_before = time.perf_counter(), engine.num_sampled_tokens
        with console.bar(f"step {step} rollout", config.rollout.groups_per_step) as bar:
            if lead == 0:
                push_before_sampling(engine, interrupt)

            def on_group(group: Group) -> None:
                rewards.extend(episode[0].reward for episode in group)
                speed = (engine.num_sampled_tokens - sampled_before) / (time.perf_counter() - started)
                bar.advance(f"reward {sum(rewards) / len(rewards):.3f}  {speed:.0f} tok/s")

            return how(engine, renderer, task, config, step=step, interrupt=interrupt, on_group=on_group, mesh=mesh)

    if lead == 0:
        for step in steps:
            rollout = sampled(roll_out, step)
            if isinstance(engine, EmbeddedEngine):
                engine.rest()  # the trainer needs the memory now
            yield rollout
    elif mesh.shards is None:
        with closing(ahead(partial(sampled, roll_out), steps, lead=lead, cancel=interrupt.cancel)) as whole:
            yield from whole
    else:
        push_before_sampling(engine, interrupt)
        with closing(ahead(partial(sampled, roll_out_share), steps, lead=lead, cancel=interrupt.cancel)) as shares:
            for share in shares:
                yield whole_rollout(share, interrupt=interrupt, mesh=mesh)
