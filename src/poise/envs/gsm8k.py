"""Task ``gsm8k``: grade-school problems ``{question, answer}`` (https://arxiv.org/abs/2110.14168).

The data set's answers end in ``#### NUMBER`` and hold calculator marks such as ``<<48/2=24>>``.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from poise.config import ConfigError, SandboxConfig, TaskConfig
from poise.envs.arithmetic import evaluate
from poise.envs.env import Outcome, Row
from poise.envs.grading import is_right, number_in, require_math_verify
from poise.envs.question import QuestionTask, load_splits
from poise.envs.rows import text_of
from poise.envs.tool_env import answer_text
from poise.harmony.messages import Conversation, Message, analysis, final

_MARK = re.compile(r"<<([^<>]*)>>")


class Gsm8k(QuestionTask):
    """Questions whose answer is a number, with the python tool or (``task.tool`` "none") in a single turn.

    The reward is 1 where the number on the final channel is right, else 0.
    ``demonstrate``: the reference solution as thinking, each calculator mark a python call; a share ``mental_share`` of
    the questions, chosen by their hash, is answered without calls.
    """

    def __init__(self, config: TaskConfig, sandbox: SandboxConfig | None = None) -> None:
        super().__init__(config, sandbox)
        require_math_verify(config.name)
        self.train_rows, self.test_rows = load_splits(config, check_row, key="question")

    def question(self, row: Row) -> str:
        question: str = row["question"]
        return question

    async def grade(self, row: Row, transcript: Sequence[Message]) -> Outcome:
        reference = number_in(row["answer"])
        assert reference is not None  # check_row saw it
        return Outcome(reward=float(await is_right(answer_text(transcript), reference)))

    def demonstrate(self, row: Row) -> Conversation:
        solution, _, answer = row["answer"].rpartition("####")
        ending = final(answer.strip())
        if self.answers_mentally(row):
            thought = without_marks(solution)
            return self.conversation(row, *([analysis(thought)] if thought else []), ending)
        return self.conversation(row, *worked(solution, self.python_exchange), ending)


def check_row(row: dict[str, Any], where: str) -> Row:
    """A row with a question and an answer that ends in a number."""
    question, answer = text_of(row, "question", where), text_of(row, "answer", where)
    if number_in(answer) is None:
        raise ConfigError(f"{where}: the answer must end in '#### NUMBER', got {answer[-40:]!r}")
    return row | {"question": question, "answer": answer}


def without_marks(solution: str) -> str:
    return _MARK.sub("", solution).strip()


def worked(solution: str, exchange: Callable[[str, str], tuple[Message, Message]]) -> Iterator[Message]:
    """Text becomes analysis, each mark a call with its result; a mark that Python does not confirm is dropped."""
    thought, position = "", 0
    for mark in _MARK.finditer(solution):
        thought += solution[position : mark.start()]
        position = mark.end()
        expression, _, stated = mark[1].rpartition("=")
        output = _confirmed(expression.strip(), stated)
        if output is None:
            continue
        if thought.strip():
            yield analysis(thought.strip())
        thought = ""
        yield from exchange(expression.strip(), output)
    thought += solution[position:]
    if thought.strip():
        yield analysis(thought.strip())


def _confirmed(expression: str, stated: str) -> str | None:
    """What python shows for ``expression`` where that is the stated result, else None."""
    value, number = evaluate(expression), number_in(stated)
    if value is None or number is None or not math.isclose(value, number, rel_tol=1e-9, abs_tol=1e-9):
        return None
    return repr(value)
