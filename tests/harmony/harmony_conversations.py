"""Random conversations, and the same conversations as openai-harmony's objects."""

import random
from typing import Any

import openai_harmony as oh

from poise.harmony import Conversation, DeveloperContent, FunctionTool, Message, Role, SystemContent

WORDS = [
    *(
        "weather",
        "Paris",
        "naïve",
        "Straße",
        "東京",
        "עברית",
        "🙂👩\u200d👩\u200d👧",
        "1,234.5",
        "don't",
        "",
        "",
        "tabs\there",
    ),
    *("x=1;y=2", "<b>bold</b>", "\\frac{1}{2}", '"quoted"', "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
    *("<|call|>", "<|constrain|>", "end|>", "é", "e\u0301", "ﬁ", "\u200b", "\u00a0", "//", "*/", "null"),
]


def text(rng: random.Random, most: int = 12) -> str:
    words = (rng.choice(WORDS) for _ in range(rng.randint(0, most)))
    return rng.choice(["", " ", "\n"]) + rng.choice([" ", "\n", "\n\n", "\r\n", ""]).join(words)


def line(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))


def value(rng: random.Random) -> Any:
    numbers = [0, 1, -7, 2.5, 1.0, 1e-5, -2.25e-5, 1e-7, 1.5e22, 1e16, 0.0001, 123456789.125]
    texts = ["", "metric", 'a "b" \n', "é🙂", "\x1f\x7f"]
    return rng.choice([*numbers, *texts, True, False, None, [], [1, "x"], {"b": 1, "a": [True, {"c": 0.001}]}])


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "number", "integer", "boolean", "enum", "union", "unknown", "bare"]
    kinds += ["object", "array", "oneOf", "object", "oneOf"] if depth < 3 else []
    kind = rng.choice(kinds)
    out: dict[str, Any]
    if kind == "object":
        out = object_schema(rng, depth + 1)
    elif kind == "array":
        out = {"type": "array"} | ({"items": schema(rng, depth + 1)} if rng.random() < 0.8 else {})
    elif kind == "oneOf":
        out = {"oneOf": [schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]}
    elif kind == "enum":
        out = {"type": "string", "enum": rng.sample(["celsius", "fahrenheit", "Ångström", 'q"'], rng.randint(0, 4))}
    elif kind == "union":
        out = {"type": rng.sample(["number", "string", "null", "integer", "boolean"], rng.randint(0, 3))}
    elif kind == "unknown":
        out = {"type": rng.choice(["null", "date"])} if rng.random() < 0.5 else {"$ref": "#/$defs/A"}
    else:
        out = {} if kind == "bare" else {"type": kind}
    if rng.random() < 0.4:
        out["description"] = text(rng, 6)
    if rng.random() < 0.2:
        out["title"] = line(rng)
    if rng.random() < 0.2:
        out["examples"] = [value(rng) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.3:
        out["default"] = value(rng)
    if rng.random() < 0.2:
        out["nullable"] = rng.random() < 0.7
    if "oneOf" in out and out["oneOf"] and "description" in out and rng.random() < 0.4:
        out["oneOf"][0]["description"] = out["description"]
    return out


def object_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["zeta", "alpha", "location", "unit_of", "n", "été", "with space", "x"], rng.randint(0, 4))
    out: dict[str, Any] = {"type": "object"}
    if rng.random() < 0.95:
        out["properties"] = {name: schema(rng, depth) for name in names}
    if rng.random() < 0.6:
        out["required"] = [name for name in names if rng.random() < 0.5]
    return out


def system(rng: random.Random) -> SystemContent:
    return SystemContent(
        model_identity=rng.choice(["You are ChatGPT, a large language model trained by OpenAI.", "Tu es là.", None]),
        knowledge_cutoff=rng.choice(["2024-06", None]),
        conversation_start_date=rng.choice(["2025-06-28", None]),
        reasoning_effort=rng.choice(["low", "medium", "high", None]),
        builtin_tools=rng.choice([(), ("python",), ("browser",), ("python", "browser")]),
        channels=rng.choice([("analysis", "commentary", "final"), ("analysis", "final"), ()]),
    )


def developer(rng: random.Random) -> DeveloperContent:
    tools = tuple(
        FunctionTool(
            name=rng.choice(["get_weather", "f", "search-it", "ünïcode"]),
            description=text(rng, 6),
            parameters=None
            if rng.random() < 0.2
            else object_schema(rng) | rng.choice([{}, {"description": line(rng)}]),
        )
        for _ in range(rng.randint(0, 4))
    )
    return DeveloperContent(instructions=rng.choice([None, text(rng)]), tools=tools)


def tool_exchange(rng: random.Random) -> list[Message]:
    name, channel, content_type, is_constrained = rng.choice(
        [
            ("functions.get_weather", "commentary", "json", True),
            ("functions.f", "commentary", "json", False),
            ("functions.f", "commentary", None, False),
            ("python", "analysis", "code", False),
            ("python", "commentary", None, False),
            ("browser.search", "analysis", "json", False),
            ("nobody", "commentary", "json", True),
        ]
    )
    call = Message(
        role=Role.ASSISTANT,
        recipient=name,
        channel=channel,
        content_type=content_type,
        is_constrained=is_constrained,
        content=text(rng),
    )
    answer = Message(
        role=Role.TOOL,
        name=name,
        recipient=rng.choice(["assistant", "assistant", None]),
        channel=rng.choice([channel, None]),
        content=text(rng),
    )
    return [call, answer]


def thoughts(rng: random.Random) -> list[Message]:
    channels = rng.choices(["analysis", "commentary"], weights=[3, 1], k=rng.randint(0, 2))
    return [Message(role=Role.ASSISTANT, channel=channel, content=text(rng)) for channel in channels]


def episode(seed: int, *, num_finals: int | None = None) -> Conversation:
    """System, developer, then user turns that the assistant solves with tools. The last answer may be missing."""
    rng = random.Random(seed)
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3) if num_finals is None else num_finals):
        name = rng.choice([None, None, "ann"])
        messages.append(Message(role=Role.USER, name=name, content=text(rng)))
        for _ in range(rng.randint(0, 3)):
            messages += thoughts(rng) + tool_exchange(rng)
        messages += [*thoughts(rng), Message(role=Role.ASSISTANT, channel="final", content=text(rng))]
    if num_finals is None:
        del messages[len(messages) - rng.choice([0, 0, 1, 2, 3]) :]
    if num_finals is None and rng.random() < 0.2:
        rng.shuffle(messages)  # what is dropped from a history must not depend on its being sensible
    return Conversation(
        system=system(rng) if rng.random() < 0.9 else None,
        developer=developer(rng) if rng.random() < 0.8 else None,
        messages=tuple(messages),
    )


def to_openai_message(message: Message) -> oh.Message:
    author = oh.Author(role=oh.Role(message.role.value), name=message.name)
    out = oh.Message.from_author_and_content(author, message.content)
    out.recipient, out.channel = message.recipient, message.channel
    if message.content_type is not None:
        out.content_type = ("<|constrain|>" if message.is_constrained else "") + message.content_type
    return out


def to_openai(conversation: Conversation) -> oh.Conversation:
    messages = []
    if (ours := conversation.system) is not None:
        content = oh.SystemContent(
            model_identity=ours.model_identity,
            knowledge_cutoff=ours.knowledge_cutoff,
            conversation_start_date=ours.conversation_start_date,
            reasoning_effort=ours.reasoning_effort and oh.ReasoningEffort(ours.reasoning_effort.capitalize()),
            channel_config=oh.ChannelConfig.require_channels(list(ours.channels)),
        )
        content = content.with_python_tool() if "python" in ours.builtin_tools else content
        content = content.with_browser_tool() if "browser" in ours.builtin_tools else content
        messages.append(oh.Message.from_role_and_content(oh.Role.SYSTEM, content))
    if (dev := conversation.developer) is not None:
        body = oh.DeveloperContent(instructions=dev.instructions)
        tools = [oh.ToolDescription.new(t.name, t.description, parameters=t.parameters) for t in dev.tools]
        body = body.with_function_tools(tools) if tools else body
        messages.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, body))
    messages += [to_openai_message(message) for message in conversation.messages]
    return oh.Conversation.from_messages(messages)
