"""math-verify's verdict on two mathematical expressions; runs in a grader process (``poise.envs.graders``).

https://github.com/huggingface/Math-Verify. Its own time limits are signals and do not interrupt big-number
arithmetic; they are off, the process has a limit instead.
"""

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import And, Eq, false  # type: ignore[import-untyped]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_BASE = re.compile(r"\s*\$?-?[0-9A-Z]+_\{?([0-9]+)\}?\$?\s*")


def is_equal(reference: str, answer: str) -> bool:
    """Whether two LaTeX expressions mean the same: numbers to 6 decimals, sets, intervals, matrices, equations.

    math-verify compares the right side of an equation; an answer such as ``41 = 42``, which is false, is no answer. And
    it leaves out the base of a number: two bases that are given must be the same.
    """
    bases = [_BASE.fullmatch(text) for text in (reference, answer)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False
    gold, given = (
        parse(f"\\boxed{{{text}}}", extraction_config=_BOXED, parsing_timeout=None) for text in (reference, answer)
    )
    return bool(verify(gold, given, timeout_seconds=None)) and not any(map(_is_false, given))


def _is_false(expression: Any) -> bool:
    """Whether an equation, or one of a chain of them, says that a number is another number."""
    equations = expression.args if isinstance(expression, And) else (expression,)
    return any(
        isinstance(one, Eq) and one.lhs.is_number and one.rhs.is_number and Eq(one.lhs, one.rhs) == false
        for one in equations
    )


# The first call fills caches that every forked child then has.
is_equal("\\frac{18}{2}", "2^3+1")
