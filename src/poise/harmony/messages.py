"""Conversations in the terms of OpenAI's harmony format (https://cookbook.openai.com/articles/openai-harmony)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Channel(StrEnum):
    """``ANALYSIS``: thinking and built-in tools; ``COMMENTARY``: function tools, preambles; ``FINAL``: the answer."""

    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class FunctionTool:
    """A tool declared in namespace ``functions`` of the developer message; ``parameters`` is a JSON schema or None."""

    name: str
    description: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SystemContent:
    """The system message. A field that is None is left out, as openai-harmony does.

    ``reasoning_effort``: "low", "medium", "high". ``builtin_tools``: of "python" and "browser", declared with the
    descriptions the models were trained with. Where the developer message declares functions, the renderer adds the
    line that sends their calls to the commentary channel. Raises ValueError for an unknown effort or built-in tool.
    """

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
    conversation_start_date: str | None = None
    reasoning_effort: str | None = "medium"
    builtin_tools: tuple[str, ...] = ()
    channels: tuple[str, ...] = ("analysis", "commentary", "final")

    def __post_init__(self) -> None:
        if self.reasoning_effort not in (None, "low", "medium", "high"):
            raise ValueError(
                f'SystemContent.reasoning_effort is "low", "medium", "high" or None, not {self.reasoning_effort!r}'
            )
        unknown = [name for name in self.builtin_tools if name not in ("python", "browser")]
        if unknown:
            raise ValueError(f'SystemContent.builtin_tools are of "python" and "browser", not {unknown}')


@dataclass(frozen=True, kw_only=True)
class DeveloperContent:
    """The developer message: instructions, and function tools rendered as harmony's TypeScript namespace."""

    instructions: str | None = None
    tools: tuple[FunctionTool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Message:
    """One harmony message of plain text.

    ``name``: author of a tool result ("python", "functions.get_weather"). ``recipient``: whom the message addresses
    (a tool call: the tool's full name; a tool result: "assistant"). ``content_type``: the rest of the channel part
    ("code", "json"); ``is_constrained`` says that ``<|constrain|>`` stood before it.
    """

    role: Role
    content: str
    name: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    is_constrained: bool = False

    def __post_init__(self) -> None:
        if self.role is Role.TOOL and not self.name:
            raise ValueError("Message.name is required for role tool: the name of the tool that answers")

    @property
    def is_tool_call(self) -> bool:
        return self.role is Role.ASSISTANT and self.recipient is not None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What an episode starts from: system, developer, then messages. ``system`` None renders no system message."""

    messages: tuple[Message, ...]
    system: SystemContent | None = None
    developer: DeveloperContent | None = None


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def final(content: str) -> Message:
    return Message(role=Role.ASSISTANT, channel=Channel.FINAL, content=content)


def analysis(content: str) -> Message:
    return Message(role=Role.ASSISTANT, channel=Channel.ANALYSIS, content=content)


def tool_result(name: str, content: str, *, channel: str = Channel.COMMENTARY) -> Message:
    """The answer of tool ``name`` ("python", "functions.NAME"), addressed to the assistant on the call's channel."""
    return Message(role=Role.TOOL, name=name, recipient="assistant", channel=channel, content=content)
