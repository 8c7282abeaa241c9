"""Attention with sinks on torch's CPU flash kernel.

The kernel knows no sinks, but returns lse, the log-sum-exp of each row's scores, and its backward reads (out, lse).
With a sink s in the denominator, lse' = logaddexp(lse, s) and out' = out * exp(lse - lse') = out * sigmoid(lse - s).
Given out' and lse', the kernel's backward forms P = exp(S - lse') and dS = P * (dO V^T - rowsum(dO * out')), which is
the gradient with the sink; scaling ``out`` alone would give wrong gradients under a right forward. What is left is
d s = -sum over rows of exp(s - lse') * rowsum(dO * out').

Two layouts feed the kernel. Full attention: sequences of similar length are padded to a batch; the padding lies behind
the causal mask, so it needs no mask of its own. Sliding window: the packed tokens are cut into blocks that see
themselves and the window before them, under a mask that also keeps sequences apart: O(T window) time and memory.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.ops.remembered import remembered

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Below this many queries a block is too little work for one call of the kernel's inner loop.
MIN_BLOCK = 32


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: tuple[int, ...], window: int | None, scale: float
) -> Tensor:
    """``sink_attention`` on the CPU; ``bounds``: ``cu_seqlens`` as integers. Half types compute in float32.

    The kernel would take bfloat16, but CPUs without AVX512-bf16 or AMX emulate its products, up to a hundred times
    more slowly than float32's.
    """
    if q.dtype in (torch.float16, torch.bfloat16):
        return cpu_attention(q.float(), k.float(), v.float(), sinks.float(), bounds, window, scale).to(q.dtype)
    longest = max(end - start for start, end in pairwise(bounds))
    if window is not None and window < longest:
        return _SlidingAttention.apply(q, k, v, sinks, bounds, window, scale)
    return _FullAttention.apply(q, k, v, sinks, bounds, scale)


def _forward_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out' [B, H, L, C] and lse' [B, H, L]; without a mask, causal."""
    out, lse = _flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    column = sinks[:, None]
    return out.mul_(torch.sigmoid(lse - column).unsqueeze(-1)), torch.logaddexp(lse, column)


def _sink_grad(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    row_sums = (grad_out * out).sum(dim=-1)
    return -(torch.exp(sinks[:, None] - lse) * row_sums).sum(dim=(0, 2))


# --- full attention: batches of similar length ---


@dataclass(frozen=True)
class _Batches:
    """Where packed tokens lie in padded batches.

    ``gather`` [P]: token at each padded place; ``place`` [T]: the inverse. Both are None for a single
    sequence, which needs no padding. ``shapes``: (sequences, length) of each batch.
    """

    gather: Tensor | None
    place: Tensor | None
    shapes: tuple[tuple[int, int], ...]

    def pad(self, x: Tensor) -> Tensor:
        # Padding repeats the sequence's last token: finite, and hidden from every real query by causality.
        return x if self.gather is None else x.index_select(0, self.gather)

    def pad_with_zeros(self, x: Tensor) -> Tensor:
        if self.gather is None or self.place is None:
            return x
        return x.new_zeros(len(self.gather), *x.shape[1:]).index_copy_(0, self.place, x)

    def unpad(self, batches: list[Tensor]) -> Tensor:
        """[B, H, L, C] of each batch -> [T, H, C]."""
        flat = [batch.transpose(1, 2).flatten(0, 1) for batch in batches]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        return padded if self.place is None else padded.index_select(0, self.place)

    def split(self, padded: Tensor) -> list[Tensor]:
        """[P, H, C] -> [B, H, L, C] of each batch, as views."""
        parts = padded.split([count * length for count, length in self.shapes])
        return [
            part.view(*shape, *padded.shape[1:]).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)
        ]


@lru_cache(maxsize=4)  # every full layer of a forward asks for the same
def _batches(bounds: tuple[int, ...]) -> _Batches:
    lengths = [(end - start, start) for start, end in pairwise(bounds) if end > start]
    if len(lengths) == 1:
        return _Batches(None, None, ((1, lengths[0][0]),))
    lengths.sort(reverse=True)
    groups: list[list[tuple[int, int]]] = []
    for length, start in lengths:
        longest = groups[-1][0][0] if groups else 0
        if groups and (4 * length >= 3 * longest or longest <= MIN_BLOCK):
            groups[-1].append((length, start))
        else:
            groups.append([(length, start)])
    gather, place, offset = [], torch.empty(bounds[-1], dtype=torch.int64, device="cpu"), 0
    for group in groups:
        longest = group[0][0]
        for length, start in group:
            gather.append(torch.arange(start, start + longest, device="cpu").clamp_(max=start + length - 1))
            place[start : start + length] = torch.arange(offset, offset + length, device="cpu")
            offset += longest
    return _Batches(torch.cat(gather), place, tuple((len(group), group[0][0]) for group in groups))


class _FullAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: tuple[int, ...], scale: float
    ) -> Tensor:
        batches = _batches(bounds)
        padded = [batches.split(batches.pad(x.contiguous())) for x in (q, k, v)]

        def run() -> tuple[Tensor, ...]:
            outs, lses = [], []
            for q_b, k_b, v_b in zip(*padded, strict=True):
                out, lse = _forward_with_sinks(q_b, k_b, v_b, sinks, None, scale)
                outs.append(out)
                lses.append(lse)
            return batches.unpad(outs), *lses

        # The result, which what comes next keeps anyway, stands for its padded batches. Not as a view: autograd lets
        # nobody write into a view that a function returns, while other writes it notices.
        result, *lses = remembered(run)
        result = result.detach()
        ctx.save_for_backward(sinks, result, *padded[0], *padded[1], *padded[2], *lses)
        ctx.batches, ctx.scale = batches, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, result, *saved = ctx.saved_tensors
        batches: _Batches = ctx.batches
        n = len(batches.shapes)
        q, k, v, lses = (saved[i * n : (i + 1) * n] for i in range(4))
        outs = batches.split(batches.pad(result))
        grads: tuple[list[Tensor], ...] = ([], [], [])
        grad_sinks = torch.zeros_like(sinks)
        grad_outs = batches.split(batches.pad_with_zeros(grad.contiguous()))
        for q_b, k_b, v_b, out, lse, grad_out in zip(q, k, v, outs, lses, grad_outs, strict=True):
            grad_sinks += _sink_grad(grad_out, out, lse, sinks)  # first: its products are gone when the others come
            parts = _flash_backward(grad_out, q_b, k_b, v_b, out, lse, 0.0, True, scale=ctx.scale)
            for whole, part in zip(grads, parts, strict=True):
                whole.append(part)
        return batches.unpad(grads[0]), batches.unpad(grads[1]), batches.unpad(grads[2]), grad_sinks, None, None


# --- sliding window: blocks that see themselves and the window before them ---


@lru_cache(maxsize=2)  # every sliding layer of a forward asks for the same
@torch.inference_mode(False)  # the first to ask may be sampling, the next one training
def _window_mask(bounds: tuple[int, ...], window: int, block: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [blocks, 1, block, window - 1 + block]: 0 where the query sees the key, else -inf."""
    num_tokens = bounds[-1]
    num_rows = -(-num_tokens // block) * block
    position = torch.arange(num_rows, device="cpu")
    borders = torch.tensor(bounds, device="cpu")
    starts = torch.repeat_interleave(borders[:-1], borders.diff())
    first = F.pad(starts, (0, num_rows - num_tokens), value=num_rows)
    # Rows behind the last token see only themselves, so that their softmax is finite; nothing reads them.
    first = torch.maximum(first, position - window + 1).minimum(position).view(-1, block, 1)
    position = position.view(-1, block, 1)
    key = position[:, :1] + torch.arange(1 - window, block, device="cpu")
    hidden = (key < first) | (key > position)
    return torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf).unsqueeze(1)


def _overlapping_blocks(x: Tensor, num_blocks: int, block: int, before: int) -> Tensor:
    """[T, K, C] -> [blocks, K, before + block, C]: each block with the ``before`` rows ahead of it, zeros outside."""
    _, heads, channels = x.shape
    padded = F.pad(x, (0, 0, 0, 0, before, num_blocks * block - len(x)))
    row = heads * channels
    strides = (block * row, row, channels, 1)
    return padded.as_strided((num_blocks, before + block, heads, channels), strides).transpose(1, 2)


def _sum_overlapping_blocks(blocks: Tensor, num_tokens: int, before: int) -> Tensor:
    """The transpose of ``_overlapping_blocks``: every row collects its gradient from the two blocks that hold it."""
    num_blocks, heads, width, channels = blocks.shape
    block = width - before
    rows = blocks.transpose(1, 2)
    total = rows.new_zeros((num_blocks + 1) * block, heads, channels)
    total[before : before + num_blocks * block].view(num_blocks, block, heads, channels).copy_(rows[:, before:])
    total[: num_blocks * block].view(num_blocks, block, heads, channels)[:, :before] += rows[:, :before]
    return total[before : before + num_tokens]


def _query_blocks(x: Tensor, num_blocks: int, block: int) -> Tensor:
    """[T, H, C] -> [blocks, H, block, C], zeros behind the last token."""
    missing = num_blocks * block - len(x)
    padded = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return padded.view(num_blocks, block, *x.shape[1:]).transpose(1, 2)


class _SlidingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: tuple[int, ...], window: int, scale: float
    ) -> Tensor:
        num_tokens, block, before = len(q), max(window, MIN_BLOCK), window - 1
        num_blocks = -(-num_tokens // block)
        mask = _window_mask(bounds, window, block, q.dtype)
        q_b = _query_blocks(q.contiguous(), num_blocks, block)
        k_b, v_b = (_overlapping_blocks(x.contiguous(), num_blocks, block, before) for x in (k, v))
        out, lse = remembered(lambda: _forward_with_sinks(q_b, k_b, v_b, sinks, mask, scale))
        ctx.save_for_backward(sinks, q_b, k_b, v_b, out, lse, mask)
        ctx.num_tokens, ctx.before, ctx.scale = num_tokens, before, scale
        return out.transpose(1, 2).flatten(0, 1)[:num_tokens].detach()  # as above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, q_b, k_b, v_b, out, lse, mask = ctx.saved_tensors
        num_blocks, _, block, _ = q_b.shape
        grad_out = _query_blocks(grad.contiguous(), num_blocks, block)
        grad_sinks = _sink_grad(grad_out, out, lse, sinks)
        grad_q, grad_k, grad_v = _flash_backward(
            grad_out, q_b, k_b, v_b, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        grad_q = grad_q.transpose(1, 2).flatten(0, 1)[: ctx.num_tokens]
        grad_k, grad_v = (_sum_overlapping_blocks(x, ctx.num_tokens, ctx.before) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None
