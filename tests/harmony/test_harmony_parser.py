"""The parser: forms that models write, agreement with openai-harmony, and streams that are not harmony at all."""

import itertools
import re

import openai_harmony as oh
import pytest
from harmony_conversations import episode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poise.harmony import (
    ArgumentError,
    Message,
    ParsedAction,
    ParseError,
    Role,
    json_arguments,
    parse,
)

many = settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SPECIALS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]


def ids_of(written: str, tokenizer) -> list[int]:
    """Ids of a stream written out, specials included."""
    names = {tokenizer.decode([i]): i for i in tokenizer.special_ids}
    ids: list[int] = []
    while written:
        name = next((name for name in SPECIALS if written.startswith(name)), None)
        if name:
            ids.append(names[name])
            written = written[len(name) :]
            continue
        cut = min((i for i in (written.find(name) for name in SPECIALS) if i >= 0), default=len(written))
        ids += tokenizer.encode(written[:cut])
        written = written[cut:]
    return ids


def said(content, **fields):
    return Message(role=Role.ASSISTANT, content=content, **fields)


ADD = {"recipient": "functions.add", "channel": "commentary"}
JSON = {"content_type": "json"}
FORMS = [
    # The answer, with and without thinking.
    ("<|channel|>final<|message|>4<|return|>", [said("4", channel="final")]),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        [said("hm", channel="analysis"), said("4", channel="final")],
    ),
    # The recipient in the channel part, as GPT-OSS writes it, and in the role part, as histories are rendered.
    (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        [said("{}", **ADD, **JSON, is_constrained=True)],
    ),
    (
        " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        [said("{}", **ADD, **JSON, is_constrained=True)],
    ),
    (
        "<|channel|>commentary to=functions.add<|constrain|>json<|message|>{}<|call|>",
        [said("{}", **ADD, **JSON, is_constrained=True)],
    ),
    (
        " to=functions.add<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        [said("{}", **ADD, **JSON, is_constrained=True)],
    ),
    # Without <|constrain|>, without a type, in either order.
    ("<|channel|>commentary to=functions.add json<|message|>{}<|call|>", [said("{}", **ADD, **JSON)]),
    ("<|channel|>commentary json to=functions.add<|message|>{}<|call|>", [said("{}", **ADD, **JSON)]),
    (
        "<|channel|>commentary <|constrain|>json to=functions.add<|message|>{}<|call|>",
        [said("{}", **ADD, **JSON, is_constrained=True)],
    ),
    ("<|channel|>commentary to=functions.add<|message|>{}<|call|>", [said("{}", **ADD)]),
    (" to=functions.add<|channel|>commentary<|message|>{}<|call|>", [said("{}", **ADD)]),
    # A single word without to= is a recipient.
    ("<|channel|>commentary functions.add<|message|>{}<|call|>", [said("{}", **ADD)]),
    ("<|channel|>commentary functions.add json<|message|>{}<|call|>", [said("{}", **ADD, **JSON)]),
    # Built-in tools on analysis, unknown tools anywhere.
    (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        [said("1+1", recipient="python", channel="analysis", content_type="code")],
    ),
    ("<|channel|>commentary to=python<|message|>1+1<|call|>", [said("1+1", recipient="python", channel="commentary")]),
    ("<|channel|>final to=who.ever<|message|>?<|call|>", [said("?", recipient="who.ever", channel="final")]),
    (" to=python<|message|>1<|call|>", [said("1", recipient="python")]),
    # No channel at all, an unknown channel, a type without recipient, empty content.
    ("<|message|>4<|return|>", [said("4")]),
    ("<|channel|>musing<|message|>4<|return|>", [said("4", channel="musing")]),
    (
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>",
        [said("{}", channel="final", content_type="json", is_constrained=True)],
    ),
    ("<|channel|>final<|message|><|return|>", [said("", channel="final")]),
    # The role said twice, white space.
    ("assistant<|channel|>final<|message|>4<|return|>", [said("4", channel="final")]),
    ("<|channel|>final  \n<|message|> 4\n<|return|>", [said(" 4\n", channel="final")]),
    # A preamble for the user, then the call; a second message whose role part has the recipient.
    (
        "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        "<|message|>{}<|call|>",
        [said("Wait.", channel="commentary"), said("{}", **ADD, **JSON)],
    ),
    # Specials inside content are text.
    ("<|channel|>final<|message|>a<|start|>b<|channel|>c<|message|>d<|return|>", None),
    ("<|channel|>final<|message|>naïve 東京 🙂<|return|>", [said("naïve 東京 🙂", channel="final")]),
]


@pytest.mark.parametrize(("written", "expected"), FORMS)
def test_forms_that_models_write(tokenizer, written, expected):
    if expected is None:
        expected = [said("a<|start|>b<|channel|>c<|message|>d", channel="final")]
    assert parse(ids_of(written, tokenizer), tokenizer) == ParsedAction(messages=tuple(expected), is_complete=True)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("<|message|>4<|end|><|start|>user<|message|>5<|return|>", "not in the role of the assistant but 'user'"),
        (
            "<|channel|>analysis to=python<|message|>1<|end|><|start|>python to=assistant<|message|>1<|return|>",
            "not in the role of the assistant but 'python'",
        ),
        ("<|channel|>final<|message|>4<|end|><|start|><|channel|>final<|message|>5<|return|>", "message 2 has no role"),
        ("<|channel|>final<|message|>4<|end|>x<|return|>", "message 1 is followed by another token than <|start|>"),
        ("<|channel|>final<|message|>4<|return|>x", r"tokens follow <\|return\|>"),
        ("<|channel|>final<|message|>4<|call|><|start|>assistant", r"tokens follow <\|call\|>"),
        ("<|return|>", r"header of message 1 has <\|return\|> before <\|message\|>"),
        ("4<|return|>", r"header of message 1 has <\|return\|> before <\|message\|>"),
        ("<|channel|>final<|end|>", r"header of message 1 has <\|end\|> before <\|message\|>"),
        ("<|start|>assistant<|channel|>final<|message|>4<|return|>", r"has <\|start\|> before <\|message\|>"),
        ("<|channel|><|message|>4<|return|>", r"has <\|channel\|> without a channel"),
        ("<|channel|> final<|message|>4<|return|>", r"has <\|channel\|> without a channel"),
        ("<|channel|>a<|channel|>b<|message|>4<|return|>", "has two channels"),
        ("<|channel|>final <|constrain|><|message|>4<|return|>", r"has <\|constrain\|> without a content type"),
        ("<|constrain|>json<|constrain|>json<|message|>4<|return|>", r"has two <\|constrain\|>"),
        ("<|channel|>final to=<|message|>4<|return|>", "has to= without a recipient"),
        ("<|channel|>final to=a to=b<|message|>4<|return|>", "has the words 'to=a to=b'"),
        ("<|channel|>final\u00a0x<|message|>4<|return|>", r"has the text 'final\\xa0x'"),
        ("<|channel|>final let me think<|message|>4<|return|>", "has the words 'let me think'"),
    ],
)  # fmt: skip
def test_what_is_not_harmony_is_a_typed_error(tokenizer, written, reason):
    result = parse(ids_of(written, tokenizer), tokenizer)
    assert isinstance(result, ParseError)
    assert not result.is_truncated
    assert re.search(reason, result.reason), result.reason


def test_text_that_spells_specials_in_a_header_is_refused(tokenizer):
    spelled = tokenizer.encode("<|channel|>final")
    result = parse([*spelled, tokenizer.message, *tokenizer.encode("4"), tokenizer.return_], tokenizer)
    assert result == ParseError(reason="the header of message 1 has the text '<|channel|>final'")


def test_header_bytes_that_are_not_utf8_are_refused(tiny):
    result = parse([tiny.channel, 0xE6, tiny.message, tiny.return_], tiny)
    assert result == ParseError(reason="the header of message 1 is not valid UTF-8")
    # In content they are replaced, as the tool or the grader will see them.
    result = parse([tiny.message, 0xE6, 65, tiny.return_], tiny)
    assert result == ParsedAction(messages=(said("\ufffdA"),), is_complete=True)


def test_ids_outside_the_vocabulary(tiny):
    assert isinstance(parse([tiny.channel, 70000, tiny.message, tiny.return_], tiny), ParseError)
    result = parse([tiny.message, 65, 10**30, -5, tiny.return_], tiny)
    assert result == ParsedAction(messages=(said("A\ufffd\ufffd"),), is_complete=True)


@pytest.mark.parametrize("seed", range(60))
def test_demonstrations_come_back(o200k_renderer, o200k, seed):
    conversation = episode(seed, num_finals=1)
    expected = [
        list(run)
        for is_action, run in itertools.groupby(conversation.messages, lambda m: m.role is Role.ASSISTANT)
        if is_action
    ]
    actions = [action for _, action in o200k_renderer.demonstration(conversation)]
    parsed = [parse(action, o200k) for action in actions]
    assert parsed == [ParsedAction(messages=tuple(run), is_complete=True) for run in expected]
    # Cut anywhere, an action is reported as cut: inside a header as an error, else with what was said.
    for cut in range(len(actions[0])):
        result = parse(actions[0][:cut], o200k)
        assert result.is_truncated if isinstance(result, ParseError) else not result.is_complete


def test_a_cut_action_keeps_what_was_said(tokenizer):
    cut = ids_of(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>The ans", tokenizer
    )
    expected = (said("hm", channel="analysis"), said("The ans", channel="final"))
    assert parse(cut, tokenizer) == ParsedAction(messages=expected, is_complete=False)
    cut = ids_of("<|channel|>analysis<|message|>hm<|end|>", tokenizer)
    assert parse(cut, tokenizer) == ParsedAction(messages=expected[:1], is_complete=False)
    for written in ("", "<|channel|>fin"):
        result = parse(ids_of(written, tokenizer), tokenizer)
        assert result == ParseError(reason="message 1 ends inside its header", is_truncated=True)


PIECES = [
    *SPECIALS,
    *SPECIALS,
    "assistant",
    "user",
    "python",
    "to=",
    "functions.f",
    "json",
    "final",
    "analysis",
    " ",
    " ",
    "\n",
]
PIECES += [
    " to=python",
    " json",
    "x",
    "naïve",
    "<|channel|>final",
    "🙂",
    "<|start|>assistant",
    "<|channel|>analysis<|message|>",
]
ARBITRARY = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join)
WORD = st.sampled_from(
    ["", " ", " to=python", " to=functions.f", " json", " code", " <|constrain|>json", "<|constrain|>json", "to="]
)
HEADER = st.tuples(
    WORD, WORD, st.sampled_from(["", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"]), WORD, WORD
).map("".join)
CONTENT = st.text(max_size=12)
MESSAGES = st.lists(st.tuples(HEADER, CONTENT).map("<|message|>".join), min_size=1, max_size=3)
STREAM = st.tuples(
    MESSAGES.map("<|end|><|start|>assistant".join), st.sampled_from(["", "<|end|>", "<|call|>", "<|return|>"])
)

# Where poise is stricter than openai-harmony, on purpose.
STRICTER = (
    "is not in the role of the assistant",  # a policy that writes the turns of others
    "tokens follow <|",  # a sampler stops there
    "before <|message|>",  # specials inside a header
    "has the text",  # text that spells specials inside a header
    "has two",
    "without a recipient",
    "without a content type",
    "has the words",  # <|constrain|> in front of another word
)


def compare(harmony, o200k, written):
    return compare_ids(harmony, o200k, ids_of(written, o200k))


def compare_ids(harmony, o200k, ids):
    written = o200k.decode(ids)
    ours = parse(ids, o200k)
    try:
        theirs = harmony.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)
    except oh.HarmonyError:
        return "they refuse"
    if isinstance(ours, ParseError):
        assert any(reason in ours.reason for reason in STRICTER), (written, ours)
        return "we refuse"
    assert len(ours.messages) == len(theirs)
    for mine, other in zip(ours.messages, theirs, strict=True):
        assert mine.role.value == other.author.role.value
        assert mine.channel == other.channel
        assert mine.content == other.content[0].text
        content_type = mine.content_type and "<|constrain|>" * mine.is_constrained + mine.content_type
        if other.recipient is not None and other.recipient.startswith("<|constrain|>"):
            # 0.0.8 takes a lone content type for a recipient.
            assert (mine.recipient, content_type) == (None, other.recipient)
        else:
            assert (mine.recipient, content_type) == (other.recipient, other.content_type), written
    return "agree"


@many
@given(ARBITRARY)
def test_where_openai_harmony_accepts_we_agree_or_say_why(harmony, o200k, written):
    compare(harmony, o200k, written)


@many
@given(STREAM.map("".join))
def test_plausible_actions_agree_with_openai_harmony(harmony, o200k, written):
    compare(harmony, o200k, written)


@many
@given(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 199997)), max_size=20))
def test_content_of_any_tokens_agrees_with_openai_harmony(harmony, o200k, content):
    # Broken UTF-8 included: ids up to 255 are mostly single bytes.
    final = ids_of("<|channel|>final<|message|>", o200k)
    assert compare_ids(harmony, o200k, [*final, *content, o200k.return_]) == "agree"


def test_every_usual_header_agrees_with_openai_harmony(harmony, o200k):
    recipients, types = (
        ["", " to=python", " to=functions.f"],
        ["", " json", " <|constrain|>json", "<|constrain|>json", " code"],
    )
    verdicts = [
        compare(harmony, o200k, f"{role}<|channel|>{channel}{recipient}{kind}<|message|>x{stop}")
        for role in recipients
        for channel in ("analysis", "commentary", "final")
        for recipient in (recipients if not role else [""])
        for kind in types
        for stop in ("<|call|>", "<|return|>", "<|end|>", "")
    ]
    assert verdicts == ["agree"] * len(verdicts)


def test_demonstrations_agree_with_openai_harmony(harmony, o200k, o200k_renderer):
    for seed in range(60):
        for _, action in o200k_renderer.demonstration(episode(seed, num_finals=1)):
            theirs = harmony.parse_messages_from_completion_tokens(action, oh.Role.ASSISTANT)
            ours = parse(action, o200k)
            assert isinstance(ours, ParsedAction)
            assert [m.content for m in ours.messages] == [m.content[0].text for m in theirs]
            assert [m.channel for m in ours.messages] == [m.channel for m in theirs]
            assert [m.recipient for m in ours.messages] == [m.recipient for m in theirs]


@many
@given(st.lists(st.one_of(st.integers(250, 270), st.integers(0, 255), st.integers()), max_size=60))
def test_never_raises_whatever_the_ids(tiny, ids):
    result = parse(ids, tiny)
    assert isinstance(result, ParsedAction | ParseError)
    if isinstance(result, ParsedAction):
        assert result.messages
        assert result.is_complete == (ids[-1] in tiny.stop_ids)
        assert all(message.role is Role.ASSISTANT for message in result.messages)


@many
@given(ARBITRARY)
def test_never_raises_on_streams_of_specials_and_text(tiny, written):
    ids = ids_of(written, tiny)
    result = parse(ids, tiny)
    if isinstance(result, ParsedAction):
        # Every message consumed exactly one <|message|> that opened it.
        assert len(result.messages) <= ids.count(tiny.message)


def test_json_arguments():
    assert json_arguments('{"a": [1, 2.5, null], "b": "é"}') == {"a": [1, 2.5, None], "b": "é"}
    for content, reason in [
        ("", "arguments are no JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            "{'a': 1}",
            "arguments are no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ('{"a": NaN}', "arguments are no JSON: NaN is not JSON"),
        ('{"a": [-Infinity]}', "arguments are no JSON: -Infinity is not JSON"),
        ('{"a": 1e999}', "arguments are no JSON: 1e999 is too large"),
        ("[1]", "arguments must be a JSON object, got array"),
        ("3", "arguments must be a JSON object, got integer"),
        ('"x"', "arguments must be a JSON object, got string"),
        ("true", "arguments must be a JSON object, got boolean"),
        ("null", "arguments must be a JSON object, got null"),
    ]:
        assert json_arguments(content) == ArgumentError(reason=reason)
    assert isinstance(json_arguments("[" * 100_000), ArgumentError)
    assert isinstance(json_arguments('{"a": ' + "9" * 10_000 + "}"), ArgumentError)
