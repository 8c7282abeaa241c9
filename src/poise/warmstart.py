"""Supervised warm start: imitate demonstrations, so that reinforcement learning has something to reinforce."""

import math
from collections.abc import Callable, Iterator, Mapping

from poise.config import Config, ConfigError
from poise.envs.env import Row, Task
from poise.harmony import Renderer
from poise.seeding import row_index
from poise.train.packing import Demonstration, pack_demonstrations
from poise.train.trainer import Trainer


def warm_start(
    trainer: Trainer,
    renderer: Renderer,
    task: Task,
    config: Config,
    *,
    on_step: Callable[[int, Mapping[str, float]], None],
) -> None:
    """Supervised steps up to ``warm_start.steps``, from where the trainer stands; the loss is on assistant tokens only.

    ``on_step(step, metrics)`` after each, from step 1; what it raises ends the warm start after a whole step. Raises
    ConfigError where the task demonstrates nothing.
    """
    per_step = config.warm_start.demonstrations_per_step
    source = demonstrations(renderer, task, config, skip=trainer.steps_done * per_step)
    while trainer.steps_done < config.warm_start.steps:
        chosen = [next(source) for _ in range(per_step)]
        batches = pack_demonstrations(chosen, tokens_per_microbatch=config.run.tokens_per_microbatch)
        metrics = trainer.supervised_step(batches)
        on_step(trainer.steps_done, metrics)


def demonstrations(renderer: Renderer, task: Task, config: Config, *, skip: int) -> Iterator[Demonstration]:
    """Endless demonstrations in a seeded order, a new order each epoch; the first ``skip`` are passed over.

    Rows without a demonstration, and demonstrations longer than ``rollout.max_context_tokens``, do not take part.
    """
    rows, limit = task.train_rows, config.rollout.max_context_tokens
    draw, num_useless, shortest = 0, 0, math.inf
    while True:
        row = rows[row_index(draw, len(rows), config.run.seed)]
        demonstration = _demonstration(renderer, task, row)
        length = math.inf if demonstration is None else sum(len(seen) + len(said) for seen, said in demonstration)
        draw += 1
        if demonstration is None or length > limit:
            num_useless += 1
            shortest = min(shortest, length)
            # The only useful row may be the first of one epoch and the last of the next.
            if num_useless == min(2 * len(rows), 2000):
                raise ConfigError(_no_demonstration(config, min(len(rows), num_useless), shortest))
            continue
        num_useless, shortest = 0, math.inf
        if skip:
            skip -= 1
            continue
        yield demonstration


def _demonstration(renderer: Renderer, task: Task, row: Row) -> Demonstration | None:
    conversation = task.demonstrate(row)
    return None if conversation is None else renderer.demonstration(conversation)


def _no_demonstration(config: Config, num_rows: int, shortest: float) -> str:
    task, limit = f"task.name {config.task.name}", config.rollout.max_context_tokens
    if math.isinf(shortest):
        return f"{task} offers no demonstration for any of {num_rows} rows: set warm_start.steps to 0"
    return (
        f"{task} offers no demonstration that fits rollout.max_context_tokens ({limit}): the shortest of {num_rows} "
        f"rows takes {shortest:.0f}; raise the limit, or set warm_start.steps to 0"
    )
