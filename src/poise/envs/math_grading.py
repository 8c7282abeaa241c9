"""Is the mathematical expression that a text gives as its answer the right one?"""

import re
from dataclasses import dataclass

from poise.envs.graders import GraderTimeout, shared_pool
from poise.envs.grading import MATH_VERIFY, last_boxed

_MAX_CHARACTERS = 1000  # of an answer: the longest of MATH-500 has 85
# No part crosses a line, so that no text makes it slow: it runs in the trainer's process.
_ANSWER_LINE = re.compile(
    r"(?im)^[ \t>*_#]*(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?[ \t]*[*_]*[ \t]*[:=]?[*_]*[ \t]*(.+)$"
)
_STRIPPED = re.compile(r"\\(?:left|right|[,;:! ]|quad|qquad)(?![a-zA-Z])|\s|\$|\\[()\[\]]|~")
_ENCLOSED = re.compile(r"^(?:\$\$?(.*?)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MathAnswer:
    """``text``: the expression given as the answer, "" where there is none. ``is_boxed``: it was in ``\\boxed{}``."""

    text: str
    is_boxed: bool


@dataclass(frozen=True, kw_only=True)
class MathGrade:
    """``timed_out``: math-verify was stopped at its limit of time or memory, which is no right answer."""

    is_right: bool
    timed_out: bool = False


def find_answer(text: str) -> MathAnswer:
    """The content of the last ``\\boxed{}``; else what follows the last "Answer:"; else the last line, whole.

    Whatever stands elsewhere does not count, and the one place is compared as a whole: a list of guesses is a list.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return MathAnswer(text=boxed.strip(), is_boxed=True)
    stated = _ANSWER_LINE.findall(text)
    lines = stated or [line for line in text.splitlines() if line.strip()]
    return MathAnswer(text=_bare(lines[-1]) if lines else "", is_boxed=False)


async def grade_math(answer: str, reference: str) -> MathGrade:
    """Whether two LaTeX expressions mean the same: the same text up to spacing, or equal by math-verify.

    math-verify (https://github.com/huggingface/Math-Verify) runs in a process that is killed after 5 s of CPU time.
    """
    if not answer or len(answer) > _MAX_CHARACTERS:
        return MathGrade(is_right=False)
    if _STRIPPED.sub("", answer) == _STRIPPED.sub("", reference) != "":
        return MathGrade(is_right=True)
    try:
        return MathGrade(is_right=bool(await shared_pool(MATH_VERIFY)(reference, answer)))
    except GraderTimeout:
        return MathGrade(is_right=False, timed_out=True)


def _bare(line: str) -> str:
    """The expression of a line: without Markdown's marks, math delimiters and a full stop at the end."""
    line = line.strip().strip("*_").strip().removesuffix(".").strip()
    enclosed = _ENCLOSED.match(line)
    return next((part for part in enclosed.groups() if part is not None), "").strip() if enclosed else line
