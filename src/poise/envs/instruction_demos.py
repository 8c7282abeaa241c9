"""Minimal texts that follow a handful of instructions: something to imitate for a policy that knows nothing yet.

Whether a text follows its instructions is for the checkers to say; here is only how one might try.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TEXT = "Here is the text."
Writer = Callable[[str, Mapping[str, Any]], str]


def _lines(count: int, line: str) -> str:
    return "\n".join([line] * count)


# In the order in which they are applied: what changes the whole text comes after what adds to it.
WRITERS: dict[str, Writer] = {
    "detectable_format:constrained_response": lambda text, given: "My answer is yes.",
    "detectable_format:json_format": lambda text, given: '{"text": "here"}',
    "keywords:existence": lambda text, given: f"{text} {' '.join(given['keywords'])}.",
    "keywords:frequency": lambda text, given: f"{text} {' '.join([given['keyword']] * given['frequency'])}.",
    "detectable_content:number_placeholders": lambda text, given: text + " [name]" * given["num_placeholders"],
    "detectable_format:number_highlighted_sections": lambda text, given: text + " *one*" * given["num_highlights"],
    "detectable_format:number_bullet_lists": lambda text, given: f"{text}\n{_lines(given['num_bullets'], '* one')}",
    "detectable_format:title": lambda text, given: f"<<title>>\n{text}",
    "detectable_content:postscript": lambda text, given: f"{text}\n{given['postscript_marker']} bye",
    "startend:end_checker": lambda text, given: f"{text} {given['end_phrase']}",
    "punctuation:no_comma": lambda text, given: text.replace(",", ""),
    "change_case:english_lowercase": lambda text, given: text.lower(),
    "change_case:english_capital": lambda text, given: text.upper(),
    "startend:quotation": lambda text, given: f'"{text}"',
    "combination:two_responses": lambda text, given: f"{text}\n******\nOr: {text}",
    "combination:repeat_prompt": lambda text, given: f"{given['prompt_to_repeat']}\n{text}",
}


def follow(instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> str:
    """A text that may follow the instructions; those without a writer are passed over."""
    given = dict(zip(instructions, arguments, strict=True))
    text = _TEXT
    for name, write in WRITERS.items():
        if name in given:
            text = write(text, given[name])
    return text
