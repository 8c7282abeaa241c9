"""Attention with sinks as the attention implementation "poise" of Transformers.

    from poise.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", attn_implementation="poise")

Batches may be padded on either side (``attention_mask`` [B, T]), packed (``position_ids`` that restart, or
``cu_seq_lens_q`` with one row and no padding), or both; no [T, T] mask is made. Where the keys are longer than the
queries, as in generation with a dynamic cache, plain torch holds the scores of a block of queries at a time. Refused,
never computed wrongly: static and paged caches, 4D masks, masks with gaps, dropout, soft caps, models whose attention
has no sinks.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from poise.ops.attention import sink_attention

NAME = "poise"
# Queries whose scores against a cache are held at once.
QUERY_BLOCK = 128


def register(*, kernel: str = "auto", sequence_parallel_rank: Callable[[], int] | None = None) -> None:
    """Registers ``attn_implementation="poise"`` with Transformers; calling it again replaces the choices.

    ``kernel``: as ``poise.ops.attention.sink_attention``'s; queries behind a cache do not use it.
    ``sequence_parallel_rank``: this process's rank in the group over which a sequence-parallel wrapper has split the
    heads; needed to slice the sinks to them.
    Raises ModuleNotFoundError without Transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attend(module, *args, kernel=kernel, sequence_parallel_rank=sequence_parallel_rank, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def attend(
    module: torch.nn.Module,
    query: Float[Tensor, "B H Tq C"],
    key: Float[Tensor, "B K Tk C"],
    value: Float[Tensor, "B K Tk C"],
    attention_mask: Bool[Tensor, "B Tk"] | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Float[Tensor, " sinks"] | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    kernel: str = "auto",
    sequence_parallel_rank: Callable[[], int] | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B Tq H C"], None]:
    """One layer's attention as Transformers asks for it; the second value stands for weights, which never exist.

    Raises ValueError for what this module's docstring says is refused.
    """
    _refuse(module, dropout, s_aux, attention_mask, options)
    assert s_aux is not None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    sinks = _local_sinks(s_aux, query.shape[1], sequence_parallel_rank).to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        if query.shape[2] != key.shape[2]:
            if cu_seq_lens_q is not None:
                raise ValueError("cu_seq_lens_q cannot say which keys of a cache belong to which packed sequence")
            return _attend_to_cache(query, key, value, sinks, attention_mask, sliding_window, scale), None
        rows, cu_seqlens = _sequences(query, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
        batch, num_heads, length, channels = query.shape
        # Tokens of all rows one behind the other; those that are padding are left out and come back as zeros.
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        if rows is not None:
            packed = [x.index_select(0, rows) for x in packed]
        q, k, v = packed
        out = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=sliding_window, scale=scale, kernel=kernel)
        if rows is not None:
            out = out.new_zeros(batch * length, num_heads, channels).index_copy(0, rows, out)
    return out.view(batch, length, num_heads, channels), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """What Transformers makes of ``attention_mask`` for this implementation: [B, keys], or None without padding."""
    if use_vmap:
        raise ValueError("attn_implementation 'poise' is causal: it takes no or_mask_function or and_mask_function")
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"attn_implementation 'poise' needs keys that end with the queries, got queries up to "
            f"{int(q_offset + q_length)} and keys up to {int(kv_offset + kv_length)}: use a dynamic cache"
        )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:].bool()
    return None if attention_mask.all() else attention_mask


def _refuse(
    module: torch.nn.Module,
    dropout: float,
    s_aux: Tensor | None,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    name = type(module).__name__
    if s_aux is None:
        raise ValueError(f"attn_implementation 'poise' is for attention with sinks; {name} passes no s_aux")
    if dropout:
        raise ValueError(f"attn_implementation 'poise' has no dropout; {name} asks for attention_dropout {dropout}")
    if options.get("softcap") is not None:
        raise ValueError(f"attn_implementation 'poise' has no softcap; {name} asks for {options['softcap']}")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"attn_implementation 'poise' is causal; {name} asks for is_causal=False")
    if options.get("block_table") is not None or type(options.get("cache")).__name__ == "PagedAttentionCache":
        raise ValueError("attn_implementation 'poise' takes no paged cache: generate without continuous batching")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attn_implementation 'poise' takes an attention_mask [batch, tokens], got {list(attention_mask.shape)}"
        )


def _local_sinks(s_aux: Tensor, num_heads: int, sequence_parallel_rank: Callable[[], int] | None) -> Tensor:
    """The sinks of this process's heads: all of them, or the slice of a sequence-parallel rank."""
    if len(s_aux) == num_heads:
        return s_aux
    if len(s_aux) % num_heads:
        raise ValueError(f"s_aux has {len(s_aux)} sinks, which the {num_heads} heads of the query do not divide")
    if sequence_parallel_rank is None:
        raise ValueError(
            f"s_aux has {len(s_aux)} sinks for {num_heads} heads: where heads are split over processes, "
            "register(sequence_parallel_rank=...) must say which of them are here"
        )
    rank = sequence_parallel_rank()
    if not 0 <= rank < len(s_aux) // num_heads:
        raise ValueError(f"sequence_parallel_rank gave {rank}, but there are {len(s_aux) // num_heads} parts of heads")
    return s_aux[rank * num_heads : (rank + 1) * num_heads]


# --- where the sequences of a batch begin and end ---

# Read once per forward: every layer hands over the same tensors.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()

Sequences = tuple[Tensor | None, Tensor]  # places [T] of the tokens in the flattened batch, None for all; cu_seqlens


def _sequences(
    query: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Sequences:
    batch, _, length, _ = query.shape

    def from_mask() -> Sequences:
        assert attention_mask is not None
        is_start = None if position_ids is None else _starts(batch, length, position_ids)
        return _from_mask(attention_mask, is_start)

    def from_cu_seq_lens() -> Sequences:
        assert cu_seq_lens_q is not None
        return _from_cu_seq_lens(batch, cu_seq_lens_q, cu_seq_lens_k)

    def from_positions() -> Sequences:
        assert position_ids is not None
        starts = _starts(batch, length, position_ids).flatten().nonzero().squeeze(1)
        return None, torch.nn.functional.pad(starts, (0, 1), value=batch * length).int()

    if attention_mask is not None:
        if cu_seq_lens_q is not None:
            raise ValueError("cu_seq_lens_q and an attention_mask with padding exclude each other: pass one of them")
        return _once(from_mask, (batch, length), attention_mask, position_ids)
    if cu_seq_lens_q is not None:
        return _once(from_cu_seq_lens, (batch, length), cu_seq_lens_q, cu_seq_lens_k)
    if position_ids is not None:
        return _once(from_positions, (batch, length), position_ids)
    return None, _full_rows(batch, length, query.device)


def _once(read: Callable[[], Sequences], shape: tuple[int, int], key: Tensor, other: Tensor | None = None) -> Sequences:
    """``read()``, remembered until torch writes to one of the tensors or another one takes its place."""
    tensors = [key] if other is None else [key, other]
    if any(x.is_inference() for x in tensors):  # has no version that would tell whether it was written to
        return read()
    token = (shape, [(WeakIdRef(x), x._version) for x in tensors])
    known = _known.get(key)
    if known is None or known[0] != token:
        with torch.inference_mode(False):  # the first to ask may be sampling, the next one training
            known = (token, read())
        _known[key] = known
    return known[1]


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _full_rows(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _starts(batch: int, length: int, position_ids: Tensor) -> Bool[Tensor, "B T"]:
    """True where a row or, within it, a packed sequence begins."""
    if position_ids.dim() != 2 or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch):
        raise ValueError(f"position_ids must be [{batch} or 1, {length}], got {list(position_ids.shape)}")
    is_start = torch.ones(batch, length, dtype=torch.bool, device=position_ids.device)
    is_start[:, 1:] = position_ids.diff(dim=1) != 1
    return is_start


def _from_mask(attention_mask: Tensor, is_start: Tensor | None) -> Sequences:
    is_token = attention_mask.bool()
    begins = is_token.clone()
    begins[:, 1:] &= ~is_token[:, :-1]
    if (begins.sum(dim=1) > 1).any():
        raise ValueError(
            "attention_mask has a gap between the tokens of a row: attn_implementation 'poise' takes padding on the "
            "left and on the right"
        )
    if is_start is not None:
        begins |= is_start & is_token
    rows = is_token.flatten().nonzero().squeeze(1)
    starts = begins.flatten()[rows].nonzero().squeeze(1)
    return rows, torch.nn.functional.pad(starts, (0, 1), value=len(rows)).int()


def _from_cu_seq_lens(batch: int, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None) -> Sequences:
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q describes one packed row, but the batch has {batch}")
    if not (cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q or torch.equal(cu_seq_lens_q, cu_seq_lens_k)):
        raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q: queries and keys are the same tokens")
    return None, cu_seq_lens_q.int()


# --- queries behind a cache ---


def _attend_to_cache(
    query: Float[Tensor, "B H Tq C"],
    key: Float[Tensor, "B K Tk C"],
    value: Float[Tensor, "B K Tk C"],
    sinks: Float[Tensor, " H"],
    attention_mask: Bool[Tensor, "B Tk"] | None,
    window: int | None,
    scale: float,
) -> Float[Tensor, "B Tq H C"]:
    """The last query stands at the last key; a query that sees no key gives 0."""
    num_queries, num_keys, num_kv_heads, dtype = query.shape[2], key.shape[2], key.shape[1], query.dtype
    if num_queries > num_keys:
        raise ValueError(f"{num_queries} queries cannot end with {num_keys} keys")
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value, sinks = query.float(), key.float(), value.float(), sinks.float()
    # Heads that share keys become further rows of queries, so no key is copied per head.
    column = sinks.view(1, num_kv_heads, -1, 1, 1)
    outs = []
    for start in range(0, num_queries, QUERY_BLOCK):
        q = query[:, :, start : start + QUERY_BLOCK].unflatten(1, (num_kv_heads, -1))  # [B, K, G, N, C]
        position = torch.arange(q.shape[3], device=q.device) + num_keys - num_queries + start
        distance = position[:, None] - torch.arange(num_keys, device=q.device)
        is_seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if attention_mask is not None:
            is_seen = is_seen & attention_mask[:, None, None, None, :].bool()
        scores = (q.flatten(2, 3) @ key.transpose(2, 3) * scale).unflatten(2, q.shape[2:4])
        scores = scores.masked_fill(~is_seen, -torch.inf)
        probs = torch.cat((scores, column.expand(*scores.shape[:4], 1)), dim=-1).softmax(dim=-1)[..., :-1]
        out = (probs.flatten(2, 3) @ value).unflatten(2, q.shape[2:4])
        outs.append(out.flatten(1, 2))
    return torch.cat(outs, dim=2).transpose(1, 2).to(dtype)
