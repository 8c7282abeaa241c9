"""math-verify's verdict on two mathematical expressions; runs in a grader process (``poise.envs.graders``).

https://github.com/huggingface/Math-Verify. Its own time limits are signals and do not interrupt big-number
arithmetic; they are off, the process has a limit instead.
"""

import logging

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)


def is_equal(reference: str, answer: str) -> bool:
    """Whether two LaTeX expressions mean the same: numbers to 6 decimals, sets, intervals, matrices, equations."""
    gold, given = (
        parse(f"\\boxed{{{text}}}", extraction_config=_BOXED, parsing_timeout=None) for text in (reference, answer)
    )
    return bool(verify(gold, given, timeout_seconds=None))


# The first call fills caches that every forked child then has.
is_equal("\\frac{18}{2}", "2^3+1")
