"""Text to token ids and back, for the tiny byte vocabulary and for OpenAI's o200k_harmony alike."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOKENIZER_FILE = "tokenizer.json"
# What a checkpoint folder holds beside tokenizer.json; kept byte for byte when a folder is loaded and saved again.
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# The named specials of o200k_harmony in the order of their ids there.
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()

# For users of Transformers: system, developer, user and assistant messages of plain text, without tools. Roles and
# channels come out as in Renderer; the text of a message is not shielded from special tokens here, so poise itself
# never uses it.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
        {%- endif -%}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
    {%- elif message.role in ['system', 'developer', 'user'] -%}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('this template renders the roles system, developer, user and assistant, not ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start|>assistant' -}}
{%- endif -%}
"""  # noqa: E501


class HarmonyTokenizer:
    """A byte-level BPE tokenizer with harmony's special tokens, which text can never produce.

    Raises ValueError where a special token of harmony is missing, or the tokenizer is not byte-level.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, source: str = "the tokenizer", side_files: dict[str, bytes] | None = None
    ):
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ValueError(f"{source} is not a byte-level tokenizer: its decoder is {tokenizer.decoder}")
        # Text that spells a special token is then split like any other text.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._side_files = side_files or {}
        self._special_ids = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        missing = [name for name in SPECIAL_TOKENS[2:] if name not in self._special_ids]
        if missing:
            raise ValueError(f"{source} lacks harmony's special token {', '.join(missing)}")
        self.start = self._special_ids["<|start|>"]
        self.end = self._special_ids["<|end|>"]
        self.message = self._special_ids["<|message|>"]
        self.channel = self._special_ids["<|channel|>"]
        self.constrain = self._special_ids["<|constrain|>"]
        self.return_ = self._special_ids["<|return|>"]
        self.call = self._special_ids["<|call|>"]
        self.pad = self._special_ids.get("<|endoftext|>")
        self.stop_ids = frozenset({self.return_, self.call})
        self.special_ids = frozenset(self._special_ids.values())
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._bytes_of_char = {char: byte for byte, char in enumerate(_byte_chars())}
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "HarmonyTokenizer":
        """Reads ``tokenizer.json`` of a checkpoint folder. Raises FileNotFoundError or ValueError naming the file."""
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
        found = {name: path.with_name(name).read_bytes() for name in SIDE_FILES if path.with_name(name).is_file()}
        return cls(tokenizer, source=str(path), side_files=found)

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and what Transformers wants beside it: its configuration and the chat template."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / TOKENIZER_FILE))
        files = self._side_files or {
            "tokenizer_config.json": json.dumps(self._transformers_config(), indent=2).encode(),
            "chat_template.jinja": CHAT_TEMPLATE.encode(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special token, whatever the text spells. Lone surrogates become U+FFFD."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            # The binding refuses strings that are not valid Unicode, such as a tool's "\ud800".
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, keep_specials: bool = True) -> str:
        """Text of ids, specials spelled out or left out. Invalid UTF-8 and ids outside the vocabulary become U+FFFD."""
        if not keep_specials:
            ids = [i for i in ids if i not in self.special_ids]
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, specials spelled out; U+FFFD for an id outside the vocabulary."""
        pieces = self._pieces
        return b"".join([pieces[i] if i in pieces else self._piece(i) for i in ids])

    def _piece(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return REPLACEMENT  # not remembered: a stream of random ids must not fill the memory
        is_special = token_id in self.special_ids
        piece = token.encode() if is_special else bytes([self._bytes_of_char[char] for char in token])
        self._pieces[int(token_id)] = piece
        return piece

    def _transformers_config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }


def byte_tokenizer() -> HarmonyTokenizer:
    """The tiny vocabulary: id = byte value for 0..255, then harmony's named specials."""
    model = models.BPE(vocab={char: byte for byte, char in enumerate(_byte_chars())}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return HarmonyTokenizer(tokenizer)


@cache
def _byte_chars() -> Sequence[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (the convention of GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256))
