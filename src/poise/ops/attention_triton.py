"""Attention with sinks on Triton: layouts, tile sizes and launches; the kernels are in attention_triton_kernels.py.

Needs the package ``triton``, which comes with torch's GPU builds. With TRITON_INTERPRET=1 in the environment before
Triton is imported, the kernels run in its interpreter on the CPU, slowly; that is how their numbers are tested without
a GPU.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.ops import attention_triton_kernels as kernels
from poise.ops.remembered import remembered

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
NO_WINDOW = 2**30


@dataclass(frozen=True)
class Tile:
    """How a program is cut: rows of queries and of keys at a time, warps, stages of the load pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    query_grad: Tile
    key_grad: Tile


# The largest of those tried that neither spill registers on sm_80 and sm_90 nor pass the 99 KiB of shared memory of
# sm_86 and sm_89, as compiled (see the test): speed has not been measured. Full-precision float32 runs on the scalar
# units, which hold their operands in registers, hence its small tiles.
TILES = {
    # (bytes of an element, up to this many channels)
    (2, 32): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 2)),
    (2, 64): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    (2, 128): Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
    (4, 32): Tiles(Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 2)),
    (4, 64): Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 32, 8, 2)),
    (4, 128): Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 32, 8, 1)),
}


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: tuple[int, ...], window: int | None, scale: float
) -> Tensor:
    """``sink_attention`` by Triton; ``bounds``: ``cu_seqlens`` as integers. Deterministic."""
    return _Attention.apply(q, k, v, sinks, bounds, window, scale)


def unavailable_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run such operands here; None if they can."""
    if not triton.knobs.runtime.interpret:
        if device.type != "cuda":
            return f"it needs a GPU, not {device.type} (or TRITON_INTERPRET=1, for tests)"
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 or higher"
    if dtype not in DTYPES:
        return f"it takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    return TILES[dtype.itemsize, next(channels for channels in (32, 64, 128) if head_dim <= channels)]


def launch_options(tile: Tile, *, is_amd: bool) -> dict[str, int]:
    # On AMD a further stage costs registers instead of shared memory.
    return {"num_warps": tile.num_warps, "num_stages": 1 if is_amd else tile.num_stages}


def lanes(head_dim: int) -> int:
    """Channels as the tiles hold them: a power of two, at least 16; those beyond the head dim are masked."""
    return max(16, triton.next_power_of_2(head_dim))


@lru_cache(maxsize=8)  # every layer of a forward and a backward asks for the same
def _block_table(bounds: tuple[int, ...], size: int, late_first: bool, device: torch.device) -> Tensor:
    """int32 [blocks, 3]: first token and length of a block's sequence, the block's first position in it.

    Blocks with the most work come first, so that the last programs to start are short ones: queries late in a
    sequence see the most keys, keys early in a sequence are seen the most often.
    """
    borders = torch.tensor(bounds)
    lengths = borders.diff()
    counts = (lengths + size - 1) // size
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = (torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]) * size
    work = first if late_first else lengths[sequence] - first
    table = torch.stack((borders[:-1][sequence], lengths[sequence], first), dim=1)
    return table[work.argsort(descending=True, stable=True)].to(device, torch.int32)


def _with_dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        bounds: tuple[int, ...],
        window: int | None,
        scale: float,
    ) -> Tensor:
        q, k, v = (_with_dense_channels(x) for x in (q, k, v))
        sinks = sinks.contiguous()
        num_tokens, heads, _ = q.shape
        ctx.bounds, ctx.window, ctx.scale = bounds, window, scale

        def run() -> tuple[Tensor, Tensor]:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(heads, num_tokens, dtype=torch.float32, device=q.device)
            tile = tiles(q.dtype, q.shape[2]).forward
            blocks = _block_table(bounds, tile.queries, True, q.device)
            with torch.cuda.device_of(q):
                kernels.forward_kernel[(len(blocks) * heads,)](
                    q, k, v, sinks, blocks, out, lse, *_strides(q, k, v), num_tokens, **_constants(ctx, q, k, tile)
                )
            return out, lse

        out, lse = remembered(run)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        num_tokens, heads, _ = q.shape
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        delta = torch.empty_like(lse)
        tile = tiles(q.dtype, q.shape[2]).query_grad
        blocks = _block_table(ctx.bounds, tile.queries, True, q.device)
        sink_parts = torch.empty(len(blocks), heads, dtype=torch.float32, device=q.device)
        with torch.cuda.device_of(q):
            kernels.query_grad_kernel[(len(blocks) * heads,)](
                q, k, v, sinks, blocks, out, lse, grad_out, grad_q, delta, sink_parts, *_strides(q, k, v), num_tokens,
                grad_scale=ctx.scale, **_constants(ctx, q, k, tile),
            )  # fmt: skip
            tile = tiles(q.dtype, q.shape[2]).key_grad
            blocks = _block_table(ctx.bounds, tile.keys, False, q.device)
            kernels.key_grad_kernel[(len(blocks) * k.shape[1],)](
                q, k, v, blocks, lse, grad_out, delta, grad_k, grad_v, *_strides(q, k, v), num_tokens,
                grad_scale=ctx.scale, **_constants(ctx, q, k, tile),
            )  # fmt: skip
        return grad_q, grad_k, grad_v, sink_parts.sum(dim=0).to(sinks.dtype), None, None, None


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1)


def _constants(ctx: Any, q: Tensor, k: Tensor, tile: Tile) -> dict[str, Any]:
    heads, head_dim = q.shape[1:]
    slides = ctx.window is not None and ctx.window < len(q)
    return {
        "window": ctx.window if slides else NO_WINDOW,
        "scale": ctx.scale * math.log2(math.e),
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "CHANNELS": head_dim,
        "LANES": lanes(head_dim),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "SLIDES": slides,
        **launch_options(tile, is_amd=torch.version.hip is not None),
    }
