"""Keys and values of the episodes being sampled, and attention over them.

A slot belongs to one episode. Full layers keep every position, sliding layers a ring of the window's size: position p
lives at row p % window, so a ring always holds the newest ``window`` positions and a decode step sees exactly the keys
that the trainer's sliding layer sees (the token itself and the window - 1 before it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poise.model import GptOssConfig
from poise.ops.attention import sink_attention

# Scores that attention to the cache holds at once, unless a single slot has more: 64 MiB in float32.
MAX_SCORES = 2**24


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens that one slot is fed in one forward: positions ``start`` .. ``start + num_tokens - 1``."""

    slot: int
    start: int
    num_tokens: int


class KeyValueCache:
    """``keys[layer]``, ``values[layer]``: [slots, K, rows, C]; rows = the context or, on sliding layers, the window."""

    def __init__(
        self, config: GptOssConfig, *, num_slots: int, max_context_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.windows = config.windows
        self.max_context_tokens = max_context_tokens
        shapes = [
            (num_slots, config.num_kv_heads, window or max_context_tokens, config.head_dim) for window in self.windows
        ]
        # Zeros, not empty: a masked row's value still enters a product with weight 0, and 0 * NaN is NaN.
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]

    def copy(self, slot: int, copies: Int[Tensor, " M"], num_tokens: int) -> None:
        """Gives ``copies`` the first ``num_tokens`` positions of ``slot``, which may hold at most one token more.

        That token is in the way only on a ring, in the row where each copy will write its own token of that position.
        """
        for window, keys, values in zip(self.windows, self.keys, self.values, strict=True):
            rows = num_tokens if window is None else window
            keys[copies, :, :rows] = keys[slot, :, :rows].clone()
            values[copies, :, :rows] = values[slot, :, :rows].clone()

    def attend(self, chunks: Sequence[Chunk]) -> "CachedAttention":
        """The ``attend`` of one forward over ``chunks``, whose tokens are packed in this order."""
        return CachedAttention(self, chunks)


class CachedAttention:
    """Writes the new keys and values and attends over the slots' history.

    Chunks come in three kinds, packed in this order: one token each (decode), continuing (a prefix is cached), fresh
    (start 0). Fresh ones never look at the cache and go to the training kernel.
    """

    def __init__(self, cache: KeyValueCache, chunks: Sequence[Chunk]) -> None:
        self.cache = cache
        device = cache.keys[0].device
        self.decode, self.continuing, self.fresh = split_chunks(chunks)
        if [*self.decode, *self.continuing, *self.fresh] != list(chunks):
            raise ValueError("chunks must be packed in the order decode, continuing, fresh (see split_chunks)")
        self.num_decode = len(self.decode)
        self.num_cached = self.num_decode + sum(chunk.num_tokens for chunk in self.continuing)
        slots = torch.tensor([c.slot for c in chunks], device=device)
        lengths = torch.tensor([c.num_tokens for c in chunks], device=device)
        starts = torch.tensor([c.start for c in chunks], device=device)
        self.position_ids = _ranges(starts, lengths)
        self.token_slots = slots.repeat_interleave(lengths)
        # Rows of a ring that this forward itself overwrites: only the last ``window`` tokens of a chunk are stored.
        self.from_end = (starts + lengths).repeat_interleave(lengths) - self.position_ids
        self.heads = torch.arange(cache.num_kv_heads, device=device)
        self.write_rows = {window: self._rows_to_write(window) for window in set(cache.windows)}
        if self.decode:
            self._lay_out_decode(slots[: self.num_decode], starts[: self.num_decode])
            self.decode_masks = {window: self._decode_mask(window) for window in set(cache.windows)}
        if self.continuing:
            self.padded: list[tuple[slice, _PaddedChunks]] = []
            first = self.num_decode
            for group in _groups_of_bounded_scores(self.continuing, cache.num_heads):
                last = first + sum(chunk.num_tokens for chunk in group)
                self.padded.append((slice(first, last), _PaddedChunks(group, cache=cache)))
                first = last
        if self.fresh:
            borders = [0, *accumulate(c.num_tokens for c in self.fresh)]
            # Of inference mode it would have no version, and each layer would wait for the device to read it again.
            with torch.inference_mode(False):
                self.fresh_cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "T H C"],
        k: Float[Tensor, "T K C"],
        v: Float[Tensor, "T K C"],
        sinks: Float[Tensor, " H"],
        window: int | None,
    ) -> Float[Tensor, "T H C"]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        n, m = self.num_decode, self.num_cached
        parts = []
        if self.continuing:  # before the writes: on a ring they overwrite keys that the chunk's first tokens still see
            for tokens, padded in self.padded:
                history = padded.history(keys, values, window)
                parts.append(padded.attention(history, q[tokens], k[tokens], v[tokens], sinks, window))
        self._write(keys, k, window)
        self._write(values, v, window)
        if self.decode:
            parts.insert(0, self._decode_attention(keys, values, q[:n], sinks, window))
        if self.fresh:
            cu_seqlens = self.fresh_cu_seqlens
            parts.append(sink_attention(q[m:], k[m:], v[m:], sinks, cu_seqlens=cu_seqlens, window=window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _lay_out_decode(self, slots: Tensor, positions: Tensor) -> None:
        """Decides which slots a decode step reads: a copy of a few, or a view of all up to the last one in use.

        Copying a slot's history costs more than attending over it, so idle slots in between are attended to as well
        and what comes out is thrown away.
        """
        num_slots = max(chunk.slot for chunk in self.decode) + 1
        self.is_gathered = 4 * self.num_decode < num_slots
        self.is_every_slot = self.num_decode == num_slots and all(c.slot == i for i, c in enumerate(self.decode))
        self.decode_slots = slots
        if self.is_gathered or self.is_every_slot:
            self.num_read, self.decode_positions = self.num_decode, positions
        else:
            self.num_read = num_slots
            self.decode_positions = positions.new_full((num_slots,), -1).index_copy_(0, slots, positions)

    def _rows_to_write(self, window: int | None) -> tuple[Tensor | None, Tensor]:
        """(tokens that are stored or None for all, their flat rows in a [slots * K * rows, C] view)."""
        rows = self.cache.max_context_tokens if window is None else window
        positions, slots, tokens = self.position_ids, self.token_slots, None
        if window is not None:
            positions = positions % window
            is_kept = self.from_end <= window
            if any(chunk.num_tokens > window for chunk in (*self.continuing, *self.fresh)):
                tokens = is_kept.nonzero().squeeze(1)
                positions, slots = positions[tokens], slots[tokens]
        flat = (slots[:, None] * len(self.heads) + self.heads) * rows + positions[:, None]
        return tokens, flat.reshape(-1)

    def _write(self, store: Tensor, new: Tensor, window: int | None) -> None:
        tokens, rows = self.write_rows[window]
        new = new if tokens is None else new[tokens]
        store.view(-1, store.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))

    def _decode_mask(self, window: int | None) -> tuple[int, Tensor]:
        """(rows to look at, mask [slots, 1, 1, rows] that is True where a row is not yet written)."""
        longest = max(chunk.start for chunk in self.decode) + 1
        num_rows = longest if window is None else min(longest, window)
        rows = torch.arange(num_rows, device=self.decode_positions.device)
        return num_rows, (rows > self.decode_positions[:, None])[:, None, None]

    def _decode_attention(self, keys: Tensor, values: Tensor, q: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        num_rows, mask = self.decode_masks[window]
        keys, values = keys[:, :, :num_rows], values[:, :, :num_rows]
        num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
        grouped = q.view(len(q), num_kv_heads, -1, head_dim)  # [D, K, G, C]
        if self.is_gathered:
            keys, values = keys.index_select(0, self.decode_slots), values.index_select(0, self.decode_slots)
        else:
            keys, values = keys[: self.num_read], values[: self.num_read]
        needs_spreading = not self.is_gathered and not self.is_every_slot
        if needs_spreading:
            spread = grouped.new_zeros(self.num_read, *grouped.shape[1:])
            grouped = spread.index_copy_(0, self.decode_slots, grouped)
        out = _masked_sink_attention(grouped, keys, values, sinks.view(1, num_kv_heads, -1, 1), mask)
        if needs_spreading:
            out = out.index_select(0, self.decode_slots)
        return out.reshape(q.shape)


class _PaddedChunks:
    """Continuing chunks, padded to [B, N]: each token sees its slot's history and the chunk up to itself."""

    def __init__(self, chunks: Sequence[Chunk], *, cache: KeyValueCache) -> None:
        device = cache.keys[0].device
        self.slots = torch.tensor([c.slot for c in chunks], device=device)
        self.starts = torch.tensor([c.start for c in chunks], device=device)
        lengths = torch.tensor([c.num_tokens for c in chunks], device=device)
        self.max_new = max(c.num_tokens for c in chunks)
        self.max_start = max(c.start for c in chunks)
        offsets = torch.arange(self.max_new, device=device)
        is_real = offsets < lengths[:, None]  # [B, N]
        firsts = lengths.cumsum(0) - lengths
        self.pad = torch.where(is_real, firsts[:, None] + offsets, 0)
        self.unpad = is_real.reshape(-1).nonzero().squeeze(1)
        self.q_positions = self.starts[:, None] + offsets  # [B, N]
        self.masks = {window: self._mask(window) for window in set(cache.windows)}

    def _history_positions(self, window: int | None) -> Int[Tensor, "B P"]:
        """Positions of the cached keys a chunk may see; negative ones do not exist."""
        if window is None:
            return torch.arange(self.max_start, device=self.starts.device).expand(len(self.starts), -1)
        return self.starts[:, None] + torch.arange(1 - window, 0, device=self.starts.device)

    def _mask(self, window: int | None) -> Bool[Tensor, "B 1 N P_plus_N"]:
        """True where a query must not see a key."""
        past = self._history_positions(window)
        past = torch.where(past < self.starts[:, None], past, -1)
        key_positions = torch.cat([past, self.q_positions], dim=1)[:, None]
        queries = self.q_positions[:, :, None]
        hidden = (key_positions > queries) | (key_positions < 0)
        if window is not None:
            hidden = hidden | (key_positions <= queries - window)
        return hidden[:, None]

    def history(self, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        if window is None:
            slots = self.slots
            return (
                keys[:, :, : self.max_start].index_select(0, slots),
                values[:, :, : self.max_start].index_select(0, slots),
            )
        rows = self._history_positions(window) % window
        index = rows[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        return keys[self.slots].gather(2, index), values[self.slots].gather(2, index)

    def attention(
        self, history: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None
    ) -> Tensor:
        keys = torch.cat([history[0], k[self.pad].transpose(1, 2)], dim=2)  # [B, K, P + N, C]
        values = torch.cat([history[1], v[self.pad].transpose(1, 2)], dim=2)
        batch, num_kv_heads, _, head_dim = keys.shape
        num_heads = q.shape[1]
        group = num_heads // num_kv_heads
        # Heads of a group share their keys: they become further query rows, so no key is ever copied per head.
        grouped = q[self.pad].view(batch, self.max_new, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(batch, num_kv_heads, group * self.max_new, head_dim)
        row_sinks = sinks.view(1, num_kv_heads, group, 1).expand(-1, -1, -1, self.max_new)
        mask = self.masks[window].repeat(1, 1, group, 1)
        out = _masked_sink_attention(grouped, keys, values, row_sinks.reshape(1, num_kv_heads, -1, 1), mask)
        out = out.view(batch, num_kv_heads, group, self.max_new, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch * self.max_new, num_heads, head_dim)[self.unpad]


def split_chunks(chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk], list[Chunk]]:
    """(decode, continuing, fresh): one cached-prefix token each, several, and those that start at position 0."""
    fresh = [chunk for chunk in chunks if chunk.start == 0]
    decode = [chunk for chunk in chunks if chunk.start > 0 and chunk.num_tokens == 1]
    continuing = [chunk for chunk in chunks if chunk.start > 0 and chunk.num_tokens > 1]
    return decode, continuing, fresh


def _groups_of_bounded_scores(chunks: Sequence[Chunk], num_heads: int) -> list[list[Chunk]]:
    """Consecutive chunks whose padded scores [B, H, N, P + N] stay within ``MAX_SCORES``; one chunk at least."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups:
            group = [*groups[-1], chunk]
            max_new = max(c.num_tokens for c in group)
            longest = max(c.start for c in group) + max_new
            if len(group) * num_heads * max_new * longest <= MAX_SCORES:
                groups[-1] = group
                continue
        groups.append([chunk])
    return groups


def _masked_sink_attention(
    q: Float[Tensor, "B K R C"],
    keys: Float[Tensor, "B K L C"],
    values: Float[Tensor, "B K L C"],
    sinks: Tensor,
    hidden: Bool[Tensor, "B 1 _ L"],
) -> Float[Tensor, "B K R C"]:
    """Float32 softmax over visible keys and the sink, whose share is dropped; ``sinks`` broadcasts to [B, K, R, 1]."""
    scores = ((q * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)).float().masked_fill_(hidden, float("-inf"))
    sinks = sinks.float()
    # In place, and with the sink beside the scores rather than among them: the scores are the largest tensor here.
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True) + (sinks - largest).exp()
    return ((weights.to(values.dtype) @ values) / total).to(values.dtype)


def _ranges(starts: Int[Tensor, " B"], lengths: Int[Tensor, " B"]) -> Int[Tensor, " T"]:
    """The concatenation of start .. start + length - 1 over the chunks."""
    firsts = lengths.cumsum(0) - lengths
    offsets = torch.arange(int(lengths.sum()), device=starts.device)
    return offsets + (starts - firsts).repeat_interleave(lengths)
