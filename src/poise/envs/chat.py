"""Conversations as OpenAI's chat completions write them, from and to harmony."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poise.envs.env import final_text
from poise.envs.tools import tool_author
from poise.harmony.messages import (
    Channel,
    Conversation,
    DeveloperContent,
    FunctionTool,
    Message,
    Role,
    SystemContent,
    analysis,
    final,
    tool_result,
    user,
)

ChatMessage = Mapping[str, Any]


def text_of_content(content: Any) -> str:
    """Text of a chat content: nothing, a string, or blocks of type "text". ValueError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(block, dict) and block.get("type") == "text" for block in content):
        return "".join(block["text"] for block in content)
    raise ValueError(f"prompts and observations must be text, got {type(content).__name__}: images are not supported")


def declared_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[FunctionTool, ...]:
    """Function tools of a chat request. ValueError for tools of other types, which harmony can't declare."""
    declared = []
    for tool in tools:
        if tool.get("type", "function") != "function":
            raise ValueError(f'tools must be of type "function", got {tool.get("type")!r}')
        function = tool["function"]
        declared.append(
            FunctionTool(
                name=function["name"],
                description=function.get("description") or "",
                parameters=function.get("parameters"),
            )
        )
    return tuple(declared)


def to_conversation(
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool] = (),
    *,
    system: SystemContent | None = SystemContent(),  # noqa: B008  (frozen)
) -> Conversation:
    """Chat messages as harmony: system and developer messages become the developer's instructions.

    Thinking (``reasoning_content``) is kept after the last final answer and dropped before it, as the format has it.
    Raises ValueError for other roles, for images, and for a tool's result without its call.
    """
    instructions: list[str] = []
    history: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        role, text = message["role"], text_of_content(message.get("content"))
        if role in ("system", "developer"):
            instructions.append(text)
        elif role == "user":
            history.append(user(text))
        elif role == "assistant":
            history += _spoken(message, text)
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        elif role == "tool":
            history.append(tool_result(_full_name(_called(message, names)), text))
        else:
            raise ValueError(f"a chat holds system, developer, user, assistant and tool messages, got {role!r}")
    last_final = max((i for i, message in enumerate(history) if message.channel == Channel.FINAL), default=-1)
    kept = tuple(m for i, m in enumerate(history) if i > last_final or m.channel != Channel.ANALYSIS)
    has_developer = bool(instructions) or bool(tools)
    developer = DeveloperContent(instructions="\n\n".join(instructions) or None, tools=tuple(tools))
    return Conversation(system=system, developer=developer if has_developer else None, messages=kept)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An action as a chat message, and by the id of each call whom the tool's result comes from, on which channel."""

    message: dict[str, Any]
    calls: Mapping[str, tuple[str, str]]


def to_answer(action: Sequence[Message], *, number: int) -> Answer:
    """The messages of one action: the final text (what was said on the commentary channel before tool calls), thinking
    as ``reasoning_content``, and its tool calls.

    Calls before a last message that is none are left out: nobody waits for their results. ``number``: of the action in
    its episode; it keeps the ids of calls apart.
    """
    calls = [m for m in action if m.is_tool_call] if action and action[-1].is_tool_call else []
    message: dict[str, Any] = {"role": "assistant", "content": final_text(action)}
    if calls:
        message["content"] = _texts(action, Channel.COMMENTARY)
    if thinking := _texts(action, Channel.ANALYSIS):
        message["reasoning_content"] = thinking
    ids = [f"call_{number}_{i}" for i in range(len(calls))]
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": (call.recipient or "").removeprefix("functions."), "arguments": call.content},
            }
            for call_id, call in zip(ids, calls, strict=True)
        ]
    authors = [(tool_author(call), call.channel or Channel.COMMENTARY) for call in calls]
    return Answer(message=message, calls=dict(zip(ids, authors, strict=True)))


def extension(
    before: Sequence[ChatMessage], now: Sequence[ChatMessage], calls: Mapping[str, tuple[str, str]]
) -> tuple[Message, ...] | None:
    """What ``now`` adds to ``before``, whose last message was the policy's, as harmony messages.

    None where it is another conversation, adds nothing, or adds a message of the assistant or the system: its stream
    can't be continued then. Thinking is not compared: not everybody sends it back. ``calls``: as in ``Answer``.
    """
    if len(now) <= len(before) or [_essence(m) for m in now[: len(before)]] != [_essence(m) for m in before]:
        return None
    added: list[Message] = []
    for message in now[len(before) :]:
        text = text_of_content(message.get("content"))
        if message["role"] == "user":
            added.append(user(text))
        elif message["role"] == "tool" and message.get("tool_call_id") in calls:
            name, channel = calls[message["tool_call_id"]]
            added.append(tool_result(name, text, channel=channel))
        else:
            return None
    return tuple(added)


def _texts(action: Sequence[Message], channel: Channel) -> str:
    return "\n".join(m.content for m in action if m.channel == channel and not m.is_tool_call)


def _essence(message: ChatMessage) -> tuple[Any, ...]:
    """What makes two messages the same one, however their senders write them."""
    calls = [
        (call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], text_of_content(message.get("content")), calls, message.get("tool_call_id")


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _spoken(message: ChatMessage, text: str) -> list[Message]:
    spoken = []
    thinking = message.get("reasoning_content") or message.get("thinking")
    calls = message.get("tool_calls") or ()
    if thinking:
        spoken.append(analysis(thinking))
    if text and calls:  # said before acting
        spoken.append(Message(role=Role.ASSISTANT, channel=Channel.COMMENTARY, content=text))
    elif not calls:
        spoken.append(final(text))
    for call in calls:
        function = call["function"]
        spoken.append(
            Message(
                role=Role.ASSISTANT,
                recipient=_full_name(function["name"]),
                channel=Channel.COMMENTARY,
                content=_arguments(function["arguments"]),
                content_type="json",
                is_constrained=True,
            )
        )
    return spoken


def _called(message: ChatMessage, names: Mapping[str, str]) -> str:
    name = names.get(message.get("tool_call_id") or "") or message.get("name")
    if not name:
        raise ValueError(f"a tool's result answers no call: {message.get('tool_call_id')!r}")
    return str(name)


def _full_name(name: str) -> str:
    return f"functions.{name.removeprefix('functions.')}"
