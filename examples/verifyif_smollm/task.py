"""Instructions that a model of 135 million parameters follows now and then: something to reinforce."""

import json
from collections.abc import Sequence
from pathlib import Path

from poise.config import TaskConfig
from poise.envs import make_task
from poise.envs.env import Row, Task
from poise.harmony import Conversation, final, user

SEEDS = Path(__file__).with_name("seeds.jsonl")
HELD_OUT_SEEDS = Path(__file__).with_name("held_out_seeds.jsonl")  # other topics
ANSWERS = Path(__file__).with_name("answers.jsonl")
# Matters of form. What every answer follows (words to avoid) or none (capitals throughout) would have equal groups.
INSTRUCTIONS = (
    "change_case:english_lowercase",
    "detectable_content:number_placeholders",
    "detectable_content:postscript",
    "detectable_format:number_bullet_lists",
    "detectable_format:number_highlighted_sections",
    "detectable_format:title",
    "punctuation:no_comma",
    "startend:end_checker",
    "startend:quotation",
)


def task_config() -> TaskConfig:
    return TaskConfig(
        name="verifyif",
        instructions=INSTRUCTIONS,
        max_instructions=1,
        data=str(SEEDS),
        test_data=str(HELD_OUT_SEEDS),
        num_train_rows=4000,
        num_test_rows=192,
        describes_tools=False,
    )


class Instructed:
    """The task of ``task_config``; the demonstrations are the source model's own answers, right or wrong."""

    def __init__(self) -> None:
        self._task = make_task(task_config())
        self.train_rows: Sequence[Row] = self._task.train_rows
        self.test_rows: Sequence[Row] = self._task.test_rows
        self.make_env = self._task.make_env
        lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.exists() else []
        self._answers = {row["prompt"]: row["answer"] for row in map(json.loads, lines)}

    def demonstrate(self, row: Row) -> Conversation | None:
        answer = self._answers.get(row["prompt"])
        if answer is None:
            return None
        return Conversation(messages=(user(row["prompt"]), final(answer)))


def instructed() -> Task:
    return Instructed()
