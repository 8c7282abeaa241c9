"""Chat completions from and to harmony."""

import pytest

from poise.envs.chat import declared_tools, extension, to_answer, to_conversation
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import FunctionTool, Message, Role, analysis, final, tool_result, user

CALL = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = Message(
    role=Role.ASSISTANT, channel="commentary", recipient="functions.add", content='{"a": 1}', content_type="json",
    is_constrained=True,
)  # fmt: skip


def chat(role, content, **more):
    return {"role": role, "content": content, **more}


def test_a_chat_becomes_a_conversation_without_the_thinking_of_earlier_answers():
    messages = [
        chat("system", "Be brief."),
        chat("user", [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]),
        chat("assistant", "2", reasoning_content="easy"),
        chat("user", "And 1 + 2?"),
        chat("assistant", "I call.", reasoning_content="harder", tool_calls=[CALL]),
        chat("tool", "3", tool_call_id="call_0_0"),
    ]
    conversation = to_conversation(messages)
    assert conversation.developer.instructions == "Be brief."
    assert list(conversation.messages) == [
        user("1 + 1?"),
        final("2"),
        user("And 1 + 2?"),
        analysis("harder"),
        Message(role=Role.ASSISTANT, channel="commentary", content="I call."),
        ADD,
        tool_result("functions.add", "3"),
    ]
    text = byte_tokenizer().decode(Renderer(byte_tokenizer()).prompt(conversation))
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>harder<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I call.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|><|start|>assistant"
    )


def test_nothing_to_say_makes_no_developer_message():
    assert to_conversation([chat("user", "Hi.")]).developer is None
    tools = declared_tools([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    assert tools == (FunctionTool(name="add", description="", parameters={"type": "object"}),)
    assert to_conversation([chat("user", "Hi.")], tools).developer.tools == tools


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([chat("function", "x")], "'function'"),
        ([chat("user", [{"type": "image_url"}])], "images are not supported"),
        ([chat("tool", "3", tool_call_id="x")], "answers no call"),
    ],
    ids=["role", "image", "result"],
)
def test_what_harmony_cannot_say_is_refused(messages, reason):
    with pytest.raises(ValueError, match=reason):
        to_conversation(messages)
    with pytest.raises(ValueError, match="must be of type"):
        declared_tools([{"type": "custom", "custom": {"name": "x"}}])


def test_an_action_becomes_an_answer():
    plain = to_answer([analysis("a"), analysis("b"), final("c")], number=0)
    assert plain.message == {"role": "assistant", "content": "c", "reasoning_content": "a\nb"}
    assert plain.calls == {}
    python = Message(role=Role.ASSISTANT, channel="analysis", recipient="python", content="1")
    calls = to_answer([analysis("a"), python, ADD], number=3)
    assert calls.message["tool_calls"] == [
        {"id": "call_3_0", "type": "function", "function": {"name": "python", "arguments": "1"}},
        {"id": "call_3_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]
    assert calls.message["content"] == ""
    assert calls.calls == {"call_3_0": ("python", "analysis"), "call_3_1": ("functions.add", "commentary")}
    unheard = to_answer([ADD, final("done")], number=0)  # nobody waits for that call
    assert (unheard.message, unheard.calls) == ({"role": "assistant", "content": "done"}, {})


BEFORE = [chat("user", "1 + 1?"), chat("assistant", "", reasoning_content="hm", tool_calls=[CALL])]
SENT_BACK = [chat("user", "1 + 1?"), chat("assistant", None, tool_calls=[CALL])]
RESULT = chat("tool", "2", tool_call_id="call_0_0", name="add")


@pytest.mark.parametrize(
    ("now", "added"),
    [
        ([*SENT_BACK, RESULT], (tool_result("functions.add", "2"),)),
        ([*SENT_BACK, RESULT, chat("user", "Go on.")], (tool_result("functions.add", "2"), user("Go on."))),
        (SENT_BACK, None),
        ([*SENT_BACK, chat("tool", "2", tool_call_id="call_9_9")], None),
        ([*SENT_BACK, chat("system", "Now be long.")], None),
        ([chat("user", "Summary."), SENT_BACK[1], RESULT], None),
        ([SENT_BACK[0], chat("assistant", "Edited.", tool_calls=[CALL]), RESULT], None),
    ],
    ids=["result", "result-user", "nothing", "foreign-result", "system", "rewritten", "edited-answer"],
)
def test_what_a_chat_adds_to_an_answer(now, added):
    assert extension(BEFORE, now, {"call_0_0": ("functions.add", "commentary")}) == added
