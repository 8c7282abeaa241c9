"""Task ``retool``: mathematics with a stateful code interpreter over many turns (https://arxiv.org/abs/2504.11536)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poise.config import ConfigError, SandboxConfig, TaskConfig
from poise.envs.env import Outcome, Row
from poise.envs.grading import require_math_verify
from poise.envs.gsm8k import without_marks, worked
from poise.envs.math_grading import MathAnswer, find_answer, grade_math
from poise.envs.question import QuestionTask, load_splits
from poise.envs.rows import text_of
from poise.envs.tool_env import answer_text
from poise.harmony.messages import Conversation, Message, Role, analysis, final

# A problem that comes as it is gets this line; a prompt that was written for a policy is left alone.
REQUEST = "\n\nPut the final answer in \\boxed{}."
_PROBLEMS = (("problem", "answer"), ("Problem", "Answer"), ("input", "output"), ("question", "answer"))


class Retool(QuestionTask):
    """Problems whose answer is a mathematical expression.

    The reward is 1 where the answer on the final channel is right, else 0 (``reward/correct``), less the penalties that
    are switched on, each a metric of its own: ``reward/format`` (an answer that is not in ``\\boxed{}``),
    ``reward/no_code`` (python was not called), ``reward/length`` (0 up to ``task.length_characters`` of the
    policy's text, then linear, whole from twice as many on). Penalties are taken off right and wrong answers alike, so
    nothing but a right answer earns a positive reward.
    ``demonstrate``: the row's solution as thinking, where it has one; calculator marks as in GSM8K become calls.
    """

    def __init__(self, config: TaskConfig, sandbox: SandboxConfig | None = None) -> None:
        super().__init__(config, sandbox)
        require_math_verify(config.name)
        self.train_rows, self.test_rows = load_splits(config, check_row, key="question")

    def question(self, row: Row) -> str:
        question: str = row["question"]
        return question

    def instructions(self, row: Row) -> str | None:
        instructions: str | None = row["instructions"]
        return instructions

    async def grade(self, row: Row, transcript: Sequence[Message]) -> Outcome:
        answer = find_answer(answer_text(transcript))
        grade = await grade_math(answer.text, row["answer"])
        rewards = {"reward/correct": float(grade.is_right), **self._penalties(answer, transcript)}
        return Outcome(reward=sum(rewards.values()), metrics={**rewards, "grader_timeouts": float(grade.timed_out)})

    def demonstrate(self, row: Row) -> Conversation | None:
        solution = row["solution"]
        if solution is None:
            return None
        ending = final(f"\\boxed{{{row['answer']}}}")
        if self.answers_mentally(row):
            return self.conversation(row, analysis(without_marks(solution)), ending)
        return self.conversation(row, *worked(solution, self.python_exchange), ending)

    def _penalties(self, answer: MathAnswer, transcript: Sequence[Message]) -> dict[str, float]:
        """Of the penalties that are switched on, each at most 0."""
        config = self.config
        written = sum(len(message.content) for message in transcript if message.role is Role.ASSISTANT)
        excess = min(1.0, max(0.0, written / config.length_characters - 1))
        shares = {
            "format": (config.format_penalty, float(not answer.is_boxed)),
            "no_code": (config.no_code_penalty, float(not ran_code(transcript))),
            "length": (config.length_penalty, excess),
        }
        return {f"reward/{name}": -penalty * share for name, (penalty, share) in shares.items() if penalty > 0}


def check_row(row: dict[str, Any], where: str) -> Row:
    """A row as ``{question, answer, solution, instructions}``; the last two may be None.

    Read are ``problem`` and ``answer`` (MATH-500, AIME), ``input`` and ``output`` (ReTool's evaluation), ``question``
    and ``answer`` (GSM8K), ``prompt`` and ``reward_model.ground_truth`` (verl, and ReTool's training data), ``prompt``
    and ``label`` (DAPO in slime). A prompt is a text or messages: system and developer messages are the instructions,
    the last one is the user's.
    """
    if "prompt" in row:
        model = row.get("reward_model")
        if isinstance(model, str):  # written to a table as JSON
            model = _object(model, where)
        truth = model if isinstance(model, Mapping) and "ground_truth" in model else row
        key = "ground_truth" if truth is model else "label"
        instructions, question = _prompt(row["prompt"], where)
        answer = text_of(dict(truth), key, where)
        return {"question": question, "answer": _reference(answer), "solution": None, "instructions": instructions}
    for question_key, answer_key in _PROBLEMS:
        if question_key in row and answer_key in row:
            question, answer = text_of(row, question_key, where), text_of(row, answer_key, where)
            solution, _, _ = answer.rpartition("####")
            told = row["solution"] if isinstance(row.get("solution"), str) else solution
            return {
                "question": question + REQUEST,
                "answer": _reference(answer),
                "solution": told.strip() or None,
                "instructions": None,
            }
    raise ConfigError(
        f"{where} has {', '.join(row) or 'no keys'}: a row needs problem and answer, question and answer, input and "
        f"output, prompt and reward_model.ground_truth, or prompt and label"
    )


def _reference(answer: str) -> str:
    """The answer alone: what follows ``####`` where a solution stands before it, without dollar signs around it."""
    return answer.rpartition("####")[2].strip().strip("$").strip()


def _prompt(prompt: Any, where: str) -> tuple[str | None, str]:
    if isinstance(prompt, str) and prompt.strip():
        return None, prompt
    messages = prompt if isinstance(prompt, list) else []
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if not roles or roles[-1] != "user" or any(role not in ("system", "developer") for role in roles[:-1]):
        raise ConfigError(f"{where}: prompt must be a text, or system messages and then one user message")
    texts = [text_of(dict(message), "content", where) for message in messages]
    return "\n\n".join(texts[:-1]) or None, texts[-1]


def _object(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: reward_model is no JSON: {error}") from error


def ran_code(transcript: Sequence[Message]) -> bool:
    """Whether the python tool answered at all."""
    return any(m.role is Role.TOOL and m.name in ("python", "functions.python") for m in transcript)
