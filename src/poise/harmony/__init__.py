"""Harmony, the chat format of GPT-OSS: conversations to token ids and sampled token ids back to messages."""

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
from poise.harmony.parser import ArgumentError, ParsedAction, ParseError, json_arguments, parse
from poise.harmony.renderer import Renderer
from poise.harmony.tokens import HarmonyTokenizer, byte_tokenizer

__all__ = [
    "ArgumentError",
    "Channel",
    "Conversation",
    "DeveloperContent",
    "FunctionTool",
    "HarmonyTokenizer",
    "Message",
    "ParseError",
    "ParsedAction",
    "Renderer",
    "Role",
    "SystemContent",
    "analysis",
    "byte_tokenizer",
    "final",
    "json_arguments",
    "parse",
    "tool_result",
    "user",
]
