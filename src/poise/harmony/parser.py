"""What a policy sampled, as messages or as a typed error."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poise.harmony.messages import Message, Role
from poise.harmony.tokens import HarmonyTokenizer

# In a header: text that may spell a special token, ids outside the vocabulary, white space that is not ASCII's.
_STRANGE = re.compile("[<\N{REPLACEMENT CHARACTER}]|[^\\S \t\n\f\r]")


@dataclass(frozen=True, kw_only=True)
class ParsedAction:
    """The messages of one action. ``is_complete``: it ended with ``<|return|>`` or ``<|call|>``, it was not cut."""

    messages: tuple[Message, ...]
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class ParseError:
    """An action that is not harmony. ``reason``: one sentence. ``is_truncated``: it was cut inside a header."""

    reason: str
    is_truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class ArgumentError:
    """Arguments of a tool call that are not a JSON object. ``reason``: one sentence for the policy."""

    reason: str


@dataclass(frozen=True)
class _Header:
    recipient: str | None
    channel: str | None
    content_type: str | None
    is_constrained: bool


def parse(token_ids: Sequence[int], tokenizer: HarmonyTokenizer) -> ParsedAction | ParseError:
    """Reads the ids that follow ``<|start|>assistant``; never raises, whatever the ids.

    The recipient (``to=NAME``) may stand in the role part or in the channel part, ``<|constrain|>`` may be left out.
    A message cut inside its content is kept, with ``is_complete`` False. Special tokens inside content are read as
    the text that spells them. A message in another role than the assistant's is an error: no policy writes its own
    tool results.
    """
    ids = list(token_ids)
    ends = {tokenizer.end, *tokenizer.stop_ids}
    messages: list[Message] = []
    position = 0
    while True:
        number = len(messages) + 1
        body = _find(ids, {tokenizer.message, tokenizer.start, *ends}, position)
        if body == len(ids):
            return ParseError(reason=f"message {number} ends inside its header", is_truncated=True)
        if ids[body] != tokenizer.message:
            special = tokenizer.decode([ids[body]])
            return ParseError(reason=f"the header of message {number} has {special} before <|message|>")
        header = _parse_header(ids[position:body], tokenizer, has_role=number > 1)
        if isinstance(header, str):
            return ParseError(reason=f"the header of message {number} {header}")
        end = _find(ids, ends, body + 1)
        messages.append(
            Message(
                role=Role.ASSISTANT,
                content=tokenizer.decode(ids[body + 1 : end]),
                recipient=header.recipient,
                channel=header.channel,
                content_type=header.content_type,
                is_constrained=header.is_constrained,
            )
        )
        if end + 1 >= len(ids):
            is_complete = end < len(ids) and ids[end] in tokenizer.stop_ids
            return ParsedAction(messages=tuple(messages), is_complete=is_complete)
        if ids[end] in tokenizer.stop_ids:
            return ParseError(reason=f"tokens follow {tokenizer.decode([ids[end]])}")
        if ids[end + 1] != tokenizer.start:
            return ParseError(reason=f"message {number} is followed by another token than <|start|>")
        position = end + 2


def json_arguments(content: str) -> dict[str, Any] | ArgumentError:
    """The arguments of a function call: its content as a JSON object, in which NaN and Infinity are no numbers."""
    try:
        arguments = json.loads(content, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return ArgumentError(reason=f"arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return ArgumentError(reason=f"arguments must be a JSON object, got {json_kind(arguments)}")
    return arguments


def _parse_header(ids: Sequence[int], tokenizer: HarmonyTokenizer, *, has_role: bool) -> _Header | str:
    """The header from ``<|start|>assistant`` (``<|start|>`` with ``has_role``) to ``<|message|>``, or what is wrong.

    Words are read as openai-harmony reads them: the last may be the content type, the one before the recipient, and a
    single word without ``to=`` is a recipient.
    """
    words: list[tuple[str, bool]] = []  # (text, follows <|constrain|>)
    channel: str | None = None
    is_constrained = False
    for marker, segment in _segments(ids, tokenizer):
        if marker is not None and marker not in (tokenizer.channel, tokenizer.constrain):
            return f"has {tokenizer.decode([marker])}"
        try:
            text = tokenizer.decode_bytes(segment).decode("utf-8")
        except UnicodeDecodeError:
            return "is not valid UTF-8"
        if _STRANGE.search(text):
            return f"has the text {text!r}"
        found = text.split()
        if marker == tokenizer.channel:
            if channel is not None:
                return "has two channels"
            if not found or text[0].isspace():
                return "has <|channel|> without a channel"
            channel = found.pop(0)
        elif marker == tokenizer.constrain:
            if is_constrained:
                return "has two <|constrain|>"
            if not found:
                return "has <|constrain|> without a content type"
            is_constrained = True
            words.append((found.pop(0), True))
        words += [(word, False) for word in found]
    if words and words[0] == (Role.ASSISTANT, False):
        words.pop(0)
    elif has_role:
        return f"is not in the role of the assistant but {words[0][0]!r}" if words else "has no role"
    return _sort_words(words, channel)


def _sort_words(words: list[tuple[str, bool]], channel: str | None) -> _Header | str:
    recipients = [word.removeprefix("to=") for word, is_type in words if word.startswith("to=") and not is_type]
    others = [(word, is_type) for word, is_type in words if is_type or not word.startswith("to=")]
    content_type, is_constrained = None, False
    if others and (recipients or len(others) > 1 or others[0][1]):
        content_type, is_constrained = others.pop()
    if others and not recipients and not others[-1][1]:
        recipients = [others.pop()[0]]
    if len(recipients) > 1 or others:
        return f"has the words {' '.join(word for word, _ in words)!r}"
    if recipients == [""]:
        return "has to= without a recipient"
    return _Header(
        recipient=recipients[0] if recipients else None,
        channel=channel,
        content_type=content_type,
        is_constrained=is_constrained,
    )


def _segments(ids: Sequence[int], tokenizer: HarmonyTokenizer) -> list[tuple[int | None, list[int]]]:
    """The ids cut at special tokens: (the special before, or None at the beginning; the ids after it)."""
    segments: list[tuple[int | None, list[int]]] = [(None, [])]
    for token_id in ids:
        if token_id in tokenizer.special_ids:
            segments.append((token_id, []))
        else:
            segments[-1][1].append(token_id)
    return segments


def _find(ids: Sequence[int], wanted: set[int], start: int) -> int:
    return next((i for i in range(start, len(ids)) if ids[i] in wanted), len(ids))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number


def json_kind(value: Any) -> str:
    """JSON's name for the type of a value: "object", "array", "string", "number", "integer", "boolean", "null"."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
