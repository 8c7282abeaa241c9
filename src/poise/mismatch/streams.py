"""Token streams to compare: sampled or read from a file, and what kind of message each token belongs to."""

import json
from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from poise.config import ConfigError
from poise.harmony import Channel, HarmonyTokenizer, ParsedAction, parse
from poise.harmony.messages import Role
from poise.types import Stop, Trajectory, Turn


class Kind(StrEnum):
    """Of the message that a token belongs to, its header and its last token included."""

    ANALYSIS = "analysis"
    CALL = "call"  # a message of the assistant with a recipient, whatever its channel
    FINAL = "final"
    OTHER = "other"  # commentary to the user, what is no harmony, messages of other roles


def token_kinds(token_ids: Sequence[int], tokenizer: HarmonyTokenizer) -> list[Kind]:
    """One kind a token of a whole stream, read message by message as ``poise.harmony.parse`` reads them."""
    ends = {tokenizer.end, *tokenizer.stop_ids}
    # A message goes on until its last token, or until another begins.
    borders = {0, len(token_ids)}
    for index, token_id in enumerate(token_ids):
        if token_id == tokenizer.start:
            borders.add(index)
        if token_id in ends:
            borders.add(index + 1)
    kinds: list[Kind] = []
    for start, end in pairwise(sorted(borders)):
        kinds += [_kind(token_ids[start:end], tokenizer)] * (end - start)
    return kinds


def _kind(ids: Sequence[int], tokenizer: HarmonyTokenizer) -> Kind:
    role = [tokenizer.start, *tokenizer.encode(Role.ASSISTANT)]
    parsed = parse(ids[len(role) :], tokenizer) if list(ids[: len(role)]) == role else None
    if not isinstance(parsed, ParsedAction):
        return Kind.OTHER
    message = parsed.messages[0]
    if message.recipient is not None:
        return Kind.CALL
    if message.channel == Channel.ANALYSIS:
        return Kind.ANALYSIS
    return Kind.FINAL if message.channel == Channel.FINAL else Kind.OTHER


def read_streams(path: Path, *, vocab_size: int) -> list[Trajectory]:
    """Streams of a .jsonl file, without log-probs (they are 0).

    A line is a list of ids, or an object with ``token_ids`` and, where only some of them are to be compared,
    ``response_mask``, as in a run's trajectories. Without a mask all tokens but the first are compared. Raises
    ConfigError naming the line.
    """
    if not path.is_file():
        raise ConfigError(f"--tokens {path} does not exist: it names a .jsonl file of token ids")
    streams: list[Trajectory] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"--tokens {path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}") from None
        streams.append(_stream(value, where, index=len(streams), vocab_size=vocab_size))
    if not streams:
        raise ConfigError(f"--tokens {path} holds no stream")
    return streams


def _stream(value: Any, where: str, *, index: int, vocab_size: int) -> Trajectory:
    token_ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(token_ids, list) or len(token_ids) < 2 or any(type(i) is not int for i in token_ids):
        raise ConfigError(f"{where} must hold at least two token ids, as a list or under token_ids")
    if strange := [i for i in token_ids if not 0 <= i < vocab_size]:
        raise ConfigError(f"{where}: token ids must be 0..{vocab_size - 1}, got {strange[0]}")
    mask = value.get("response_mask") if isinstance(value, dict) else None
    if mask is None:
        mask = [False, *[True] * (len(token_ids) - 1)]
    if not isinstance(mask, list) or len(mask) != len(token_ids) or any(type(flag) is not bool for flag in mask):
        raise ConfigError(f"{where}: response_mask must hold one true or false per token")
    if mask[0] or not any(mask):
        raise ConfigError(f"{where}: response_mask must be false for the first token, and true for some other")
    return Trajectory(
        group_id=index,
        episode_id=f"replayed/{index}",
        turns=tuple(_turns(token_ids, mask)),
        reward=0.0,
        stop=Stop.DONE,
    )


def _turns(token_ids: Sequence[int], mask: Sequence[bool]) -> list[Turn]:
    """A turn for each run of masked tokens; what comes after the last is dropped: nobody compares it."""
    turns: list[Turn] = []
    observation: tuple[int, ...] = ()
    for is_action, pairs in groupby(zip(token_ids, mask, strict=True), key=lambda pair: pair[1]):
        ids = tuple(token_id for token_id, _ in pairs)
        if is_action:
            turns.append(Turn(observation_ids=observation, action_ids=ids, rollout_log_probs=(0.0,) * len(ids)))
        else:
            observation = ids
    return turns
