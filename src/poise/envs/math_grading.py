"""Is the mathematical expression that a text gives as its answer the right one?"""

import re
from dataclasses import dataclass

from poise.envs.graders import GraderTimeout, shared_pool
from poise.envs.grading import MATH_VERIFY, last_boxed, with_plain_characters

_MAX_CHARACTERS = 1000  # of an answer: the longest of MATH-500 has 85
# No part crosses a line or gives back what it took, so that no text makes it slow: it runs in the trainer's process.
_ANSWER_LINE = re.compile(
    r"(?im)^[ \t>*_#-]*+(?:(?:so|thus|hence|therefore),? )?(?:the[ \t]++)?(?:final[ \t]++)?answer[ \t]*+[*_]*+[ \t]*+"
    r"(?:is\b[ \t]*+:?|[:=]|(?=$)|(?=[-0-9$\\(]))"
)
# Lines that only enclose others: of a formula, of code, of an answer.
_FRAME = re.compile(r"\s*+(?:\$\$|\\[\[\]]|```\w*+|</?answer>|[*_]++)?+\s*+")
_STRIPPED = re.compile(r"\\(?:left|right|[,;:!])(?![a-zA-Z])|\$|\\[()\[\]]")
_SPACE = re.compile(r"(?:\\(?:q?quad(?![a-zA-Z])| )|\s|~)+")
_IDLE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])| (?=[0-9]{3}(?![0-9]))")  # but not what parts two numbers
_ENCLOSED = re.compile(r"^(?:\$\$?(.*?)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)
_POWER_OF_TEN = re.compile(r"([-+]?[0-9]+(?:\.[0-9]*)?)[eE]([-+]?[0-9]{1,3})")  # as a tool shows it
_LEFT_OUT = re.compile(r"\\[lc]?dots|\.\.|…")


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
        return MathAnswer(text=_without_full_stop(boxed.strip()), is_boxed=True)
    stated = list(_ANSWER_LINE.finditer(text))
    lines = [line for line in text[stated[-1].end() if stated else 0 :].splitlines() if not _FRAME.fullmatch(line)]
    return MathAnswer(text=_bare(lines[0 if stated else -1]) if lines else "", is_boxed=False)


async def grade_math(answer: str, reference: str) -> MathGrade:
    """Whether two LaTeX expressions mean the same: the same text up to spacing, or equal by math-verify.

    math-verify (https://github.com/huggingface/Math-Verify) runs in a process that is killed after 5 s of CPU time. It
    is not asked where it would read a part of the answer as the whole: dots for what is left out, unpaired braces.
    """
    if not answer or len(answer) > _MAX_CHARACTERS:
        return MathGrade(is_right=False)
    answer = with_plain_characters(answer)
    if power := _POWER_OF_TEN.fullmatch(answer):
        answer = f"{power[1]} \\cdot 10^{{{int(power[2])}}}"
    if _spaceless(answer) == _spaceless(reference) != "":
        return MathGrade(is_right=True)
    if not _has_paired_braces(answer) or (_LEFT_OUT.search(answer) and not _LEFT_OUT.search(reference)):
        return MathGrade(is_right=False)
    try:
        return MathGrade(is_right=bool(await shared_pool(MATH_VERIFY)(reference, answer)))
    except GraderTimeout:
        return MathGrade(is_right=False, timed_out=True)


def _spaceless(expression: str) -> str:
    return _IDLE_SPACE.sub("", _SPACE.sub(" ", _STRIPPED.sub("", expression)))


def _has_paired_braces(expression: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", expression):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _without_full_stop(text: str) -> str:
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _bare(line: str) -> str:
    """The expression of a line: without Markdown's marks, math delimiters and a full stop at the end."""
    line = re.sub(r"^[#>\s]+|</?answer>", "", line).strip()
    line = _without_full_stop(line.strip("*_`").strip()).strip()
    enclosed = _ENCLOSED.match(line)
    return next((part for part in enclosed.groups() if part is not None), "").strip() if enclosed else line
