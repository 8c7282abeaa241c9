"""Kinds of tokens, token by token; streams from files."""

import json

import pytest

from poise.config import ConfigError
from poise.harmony import byte_tokenizer
from poise.mismatch.streams import Kind, read_streams, token_kinds

TOKENIZER = byte_tokenizer()
SPECIALS = {"<S>": TOKENIZER.start, "<C>": TOKENIZER.channel, "<M>": TOKENIZER.message, "<E>": TOKENIZER.end,
            "<call>": TOKENIZER.call, "<return>": TOKENIZER.return_}  # fmt: skip


def ids(*parts: str) -> list[int]:
    return [i for part in parts for i in ([SPECIALS[part]] if part in SPECIALS else TOKENIZER.encode(part))]


USER = ids("<S>", "user", "<M>", "1+1", "<E>")
ANALYSIS = ids("<S>", "assistant", "<C>", "analysis", "<M>", "hm", "<E>")
CALL = ids("<S>", "assistant", "<C>", "analysis to=python", "<M>", "1+1", "<call>")
CALL_IN_ROLE = ids("<S>", "assistant to=functions.f", "<C>", "commentary", "<M>", "{}", "<call>")
RESULT = ids("<S>", "python to=assistant", "<C>", "analysis", "<M>", "2", "<E>")
PREAMBLE = ids("<S>", "assistant", "<C>", "commentary", "<M>", "now", "<E>")
FINAL = ids("<S>", "assistant", "<C>", "final", "<M>", "2", "<return>")


def test_every_token_has_the_kind_of_its_message():
    messages = [
        (USER, Kind.OTHER), (ANALYSIS, Kind.ANALYSIS), (CALL, Kind.CALL), (RESULT, Kind.OTHER),
        (PREAMBLE, Kind.OTHER), (CALL_IN_ROLE, Kind.CALL), (FINAL, Kind.FINAL),
    ]  # fmt: skip
    stream = [token for message, _ in messages for token in message]
    assert token_kinds(stream, TOKENIZER) == [kind for message, kind in messages for _ in message]


def test_cut_and_malformed_messages():
    cut_content, cut_header = FINAL[:-1], ANALYSIS[:4]
    assert token_kinds(cut_content, TOKENIZER) == [Kind.FINAL] * len(cut_content)
    assert token_kinds(cut_header, TOKENIZER) == [Kind.OTHER] * len(cut_header)
    # A message that begins before the last one ended; tokens after an end and before a start.
    unended = [*ANALYSIS[:-1], *FINAL, *ids("junk"), *FINAL]
    expected = [Kind.ANALYSIS] * (len(ANALYSIS) - 1) + [Kind.FINAL] * len(FINAL) + [Kind.OTHER] * 4
    assert token_kinds(unended, TOKENIZER) == expected + [Kind.FINAL] * len(FINAL)
    assert token_kinds([], TOKENIZER) == []


def test_streams_of_a_file(tmp_path):
    path = tmp_path / "tokens.jsonl"
    masked = {"token_ids": [5, 6, 7, 8, 9], "response_mask": [False, True, True, False, True], "reward": 1.0}
    path.write_text(f"[1, 2, 3]\n\n{json.dumps(masked)}\n")
    plain, with_mask = read_streams(path, vocab_size=10)
    assert plain.token_ids == [1, 2, 3]
    assert plain.response_mask == [False, True, True]
    assert with_mask.token_ids == [5, 6, 7, 8, 9]
    assert with_mask.response_mask == masked["response_mask"]
    assert [turn.action_ids for turn in with_mask.turns] == [(6, 7), (9,)]


def test_what_follows_the_last_compared_token_is_dropped(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"token_ids": [1, 2, 3, 4], "response_mask": [false, true, false, false]}')
    assert read_streams(path, vocab_size=10)[0].token_ids == [1, 2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1, 2]\n{", "line 2 is no JSON"),
        ("[1]", "line 1 must hold at least two token ids"),
        ('{"tokens": [1, 2]}', "line 1 must hold at least two token ids"),
        ("[1, 2.0]", "line 1 must hold at least two token ids"),
        ("[1, 10]", "line 1: token ids must be 0..9, got 10"),
        ("[1, -1]", "line 1: token ids must be 0..9, got -1"),
        ('{"token_ids": [1, 2], "response_mask": [true, true]}', "must be false for the first token"),
        ('{"token_ids": [1, 2], "response_mask": [false]}', "one true or false per token"),
        ("\n", "holds no stream"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, text, sentence):
    path = tmp_path / "tokens.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_streams(path, vocab_size=10)
    assert sentence in str(refused.value)
    with pytest.raises(ConfigError, match="does not exist"):
        read_streams(tmp_path / "none", vocab_size=10)
