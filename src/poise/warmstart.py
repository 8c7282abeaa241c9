"""Supervised warm start: imitate demonstrations, so that reinforcement learning has something to reinforce."""

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
    rows = task.train_rows
    draw, num_useless = 0, 0
    while True:
        row = rows[row_index(draw, len(rows), config.run.seed)]
        demonstration = _demonstration(renderer, task, row, config.rollout.max_context_tokens)
        draw += 1
        if demonstration is None:
            num_useless += 1
            if num_useless == min(len(rows), 1000):
                raise ConfigError(
                    f"task.name {config.task.name} offers no demonstration that fits rollout.max_context_tokens "
                    f"({config.rollout.max_context_tokens}): set warm_start.steps to 0 or raise the limit"
                )
            continue
        num_useless = 0
        if skip:
            skip -= 1
            continue
        yield demonstration


def _demonstration(renderer: Renderer, task: Task, row: Row, max_tokens: int) -> Demonstration | None:
    conversation = task.demonstrate(row)
    if conversation is None:
        return None
    turns = renderer.demonstration(conversation)
    num_tokens = sum(len(observation_ids) + len(action_ids) for observation_ids, action_ids in turns)
    return turns if num_tokens <= max_tokens else None
