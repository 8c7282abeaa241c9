"""Is the number that a text gives as its answer the right one?"""

import importlib.util
import re
from fractions import Fraction

from poise.config import ConfigError
from poise.envs.graders import GraderTimeout, shared_pool

_MAX_DIGITS = 100
_MAX_EXPRESSION = 200  # characters
_MAX_PART = 2000  # characters
_RELATIVE_TOLERANCE = Fraction(1, 10**12)  # what float arithmetic in a tool leaves behind, far below any near miss

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
# Not inside a word or a decimal, nor an exponent or an index; a time or a ratio such as 10:42 is no number.
_NUMBER = re.compile(
    rf"""(?<![^\W_])(?<![\^.])(?<![\^_]\{{)(?<![^\W_]_)(?P<sign>[-+]?)\s?(?:
        (?P<clock>[0-9]+(?::[0-9]+)+)
      |
        (?P<whole>[0-9]+)?\s*\\frac\s*\{{\s*(?P<top>{_DIGITS})\s*\}}\s*\{{\s*(?P<bottom>{_DIGITS})\s*\}}
      | (?:(?P<mixed>[0-9]+)\s+)?(?P<over>{_DIGITS})\s*/\s*(?P<under>{_DIGITS})
      | (?P<plain>(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)
    )""",
    re.VERBOSE,
)
_EXPRESSION = re.compile(r"(?:[0-9\s.,+\-*/^(){}]|\\(?:frac|sqrt|times|cdot|div)(?![a-zA-Z]))+")
_OPERATOR = re.compile(r"[+\-*/^]|\\")
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w(])")
_EMPHASIZED = re.compile(r"\s*(\*|_{1,3})([^*_]+)\1[\s.]*")
_BEFORE_CURRENCY = re.compile(r"(?<=[A-Za-z])(?=\\?[$€£¥₹])")  # US$5
_MINUS_IN_WORDS = re.compile(r"(?i)\b(?:minus|negative)\s+(?=[$€£¥₹]?[0-9.])")
_NEGATED = re.compile(r"(?i)(?:\bnot|n't)[\s$(]{1,3}$")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FROM_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[-+.0-9]))")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_REWRITES = (
    ("!=", " not "),
    ("\\neq", " not "),
    ("\\ne ", " not "),
    ("≠", " not "),
    ("{,}", ","),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("×", "\\times "),
    ("·", "\\cdot "),
    ("÷", "\\div "),
    ("≈", "="),
    ("\\approx", "="),
    ("\\%", "%"),
    *((mark, "") for mark in ("\\left", "\\right", "\\$", "\\,", "\\!", "\\;", "\\(", "\\)", "\\[", "\\]")),
    *((mark, "") for mark in "$€£¥₹"),
)
MATH_VERIFY = "poise.envs.math_check:is_equal"


async def is_right(text: str, reference: Fraction) -> bool:
    """Whether the answer in ``text`` equals ``reference``.

    The answer is the content of the last ``\\boxed{}``, else what follows the last ``####``, else all of the text, and
    of that what follows the last equals sign. There the last number counts: with thousands commas, currency, unit,
    percent sign or a dot after it, a decimal, a fraction or a mixed number. Where that part is an expression instead
    (``3 \\times 4``, ``\\sqrt{81}``), math-verify decides; one that takes too long is wrong.
    """
    part = _answer_part(text)
    if _is_expression(part):
        return await _is_equal_expression(part, reference)
    number = _last_number(part)
    return number is not None and abs(number - reference) <= _RELATIVE_TOLERANCE * abs(reference)


def number_in(text: str) -> Fraction | None:
    """The last number of the answer in ``text``; None where there is none."""
    return _last_number(_answer_part(text))


def _answer_part(text: str) -> str:
    boxed = last_boxed(text)
    # The end is enough for a last number, and what follows is slow on long texts.
    part = with_plain_characters((boxed if boxed is not None else text.rpartition("####")[2])[-_MAX_PART:])
    part = _MINUS_IN_WORDS.sub("-", _BEFORE_CURRENCY.sub(" ", part))
    for old, new in _REWRITES:
        part = part.replace(old, new)
    part = _BOLD.sub(r"\1", _TEXT.sub(r" \1 ", part))
    emphasized = _EMPHASIZED.fullmatch(part)
    part = emphasized[2] if emphasized else part
    before, _, after = part.rpartition("=")
    return (after if any(c.isdigit() for c in after) else before or after).strip().rstrip(".")


def with_plain_characters(text: str) -> str:
    """``text`` with the minus, the exponents and the thousands of typesetters as a keyboard has them."""
    text = re.sub("[\u2010-\u2013](?=[$.0-9])|[\u2212\ufe63\uff0d]", "-", text)
    text = re.sub("(?<=[0-9])[\u00a0\u2009\u202f_'’](?=[0-9]{3}(?![0-9]))", "", text)
    return _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_FROM_SUPERSCRIPT), text)


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` or ``\\fbox{}``, to its closing brace; None where there is none.

    ``\\boxed 42``: the rest of the formula or line.
    """
    starts = list(_BOXED.finditer(text))
    if not starts:
        return None
    begin = starts[-1].end()
    if text[begin - 1] != "{":
        return re.split(r"[$\n]", text[begin : begin + _MAX_PART], maxsplit=1)[0]
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return text[begin:]


def _is_expression(part: str) -> bool:
    """Numbers and operators only, and more than one number or fraction."""
    is_number = _NUMBER.fullmatch(part) is not None
    return not is_number and _EXPRESSION.fullmatch(part) is not None and _OPERATOR.search(part) is not None


def _last_number(part: str) -> Fraction | None:
    found = list(_NUMBER.finditer(part))
    if not found:
        return None
    last = found[-1]
    if last["clock"] or _NEGATED.search(part, 0, last.start()):
        return None
    sign = -1 if last["sign"] == "-" else 1
    try:
        if last["plain"]:
            return sign * _fraction(last["plain"])
        whole = _fraction(last["whole"] or last["mixed"] or "0")
        return sign * (whole + _fraction(last["top"] or last["over"]) / _fraction(last["bottom"] or last["under"]))
    except (ZeroDivisionError, ValueError):
        return None


def _fraction(digits: str) -> Fraction:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("too many digits")
    return Fraction(digits.replace(",", "").rstrip("."))


async def _is_equal_expression(expression: str, reference: Fraction) -> bool:
    if len(expression) > _MAX_EXPRESSION:
        return False
    gold = f"\\frac{{{reference.numerator}}}{{{reference.denominator}}}"
    try:
        return bool(await shared_pool(MATH_VERIFY)(gold, expression.replace("**", "^")))
    except GraderTimeout:
        return False


def require_math_verify(task: str) -> None:
    """Raises ConfigError where the package is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"task {task} needs the extra math: pip install 'poise[math]'")
