"""Attention with sinks over packed sequences: the plain reference and the function that picks a kernel."""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from poise.ops import attention_flash
from poise.ops.attention_cpu import cpu_attention

# In the order in which "auto" tries them. On the CPU, Triton would be its interpreter.
KERNELS = ("flash4", "flash3", "flash2", "cpu", "triton", "reference")

_logger = logging.getLogger("poise")


def sink_attention(
    q: Float[Tensor, "T H C"],
    k: Float[Tensor, "T K C"],
    v: Float[Tensor, "T K C"],
    sinks: Float[Tensor, " H"],
    *,
    cu_seqlens: Int[Tensor, " N1"],
    window: int | None = None,
    scale: float | None = None,
    kernel: str = "auto",
) -> Float[Tensor, "T H C"]:
    """Causal attention within each sequence, with a learned logit per head in the softmax's denominator.

    out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij)), s_ij = scale q_i . k_j, over the j of i's sequence
    with i - window < j <= i (window None: all j <= i). Head h reads key/value head h // (H / K).
    "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2.2.

    ``scale`` defaults to C**-0.5. ``kernel``: "auto" takes the first of ``KERNELS`` that runs here and logs it once;
    all of them have the sinks and their gradient. Raises ValueError for operands that do not fit together and
    RuntimeError, with the reason, for a kernel that cannot run them. Reading ``cu_seqlens`` waits for the device once
    per tensor, so layers that share it wait once. Torch's own writes to such a tensor are noticed; those of a
    collective or of a custom GPU kernel are not: hand over a new tensor then.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"kernel must be one of auto, {', '.join(KERNELS)}, got {kernel!r}")
    _check_operands(q, k, v, sinks, cu_seqlens, window)
    if kernel == "auto":
        kernel = chosen_kernel(q.device, q.dtype, q.shape[2])
    elif reason := unavailable_reason(kernel, q.device, q.dtype, q.shape[2]):
        raise RuntimeError(f"kernel {kernel!r} cannot run here: {reason}")
    bounds = _cached_bounds(cu_seqlens, len(q))
    if len(q) == 0:
        return q + (k.sum() + v.sum() + sinks.sum())  # in the graph of all four, each with a gradient of 0
    return _run(kernel)(q, k, v, sinks, bounds, window, q.shape[-1] ** -0.5 if scale is None else scale)


def reference_attention(
    q: Float[Tensor, "T H C"],
    k: Float[Tensor, "T K C"],
    v: Float[Tensor, "T K C"],
    sinks: Float[Tensor, " H"],
    bounds: tuple[int, ...],
    window: int | None,
    scale: float,
) -> Float[Tensor, "T H C"]:
    """``sink_attention`` as its equation says it, one [H, L, L] matrix per sequence; half types compute in float32."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v, sinks = q.float(), k.float(), v.float(), sinks.float()
    outs = []
    for start, end in pairwise(bounds):
        q_h, k_h, v_h = (x[start:end].transpose(0, 1) for x in (q, k, v))
        k_h, v_h = k_h.repeat_interleave(group, dim=0), v_h.repeat_interleave(group, dim=0)
        index = torch.arange(end - start, device=q.device)
        distance = index[:, None] - index[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = (q_h @ k_h.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        sink_column = sinks[:, None, None].expand(-1, end - start, 1)
        probs = torch.cat((scores, sink_column), dim=-1).softmax(dim=-1)[..., :-1]
        outs.append((probs @ v_h).transpose(0, 1))
    return torch.cat(outs).to(dtype)


def sequence_bounds(cu_seqlens: Int[Tensor, " N1"], num_tokens: int) -> tuple[int, ...]:
    """``cu_seqlens`` as integers; raises ValueError unless they run from 0 to ``num_tokens`` without falling."""
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(f"cu_seqlens must run from 0 to {num_tokens}, the number of tokens, got {_shorten(bounds)}")
    if sorted(bounds) != list(bounds):
        raise ValueError(f"cu_seqlens must not fall, got {_shorten(bounds)}")
    return bounds


# --- which kernel runs ---

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], int | None, float], Tensor]


def unavailable_reason(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why ``kernel`` cannot run such operands here; None if it can."""
    if kernel.startswith("flash"):
        return attention_flash.unavailable_reason(int(kernel[-1]), device, dtype, head_dim)
    if kernel == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        from poise.ops import attention_triton  # imports triton

        return attention_triton.unavailable_reason(device, dtype, head_dim)
    if kernel == "cpu" and device.type != "cpu":
        return f"it takes tensors on the CPU, not on {device.type}"
    return None


@lru_cache(maxsize=64)
def chosen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What "auto" takes for such operands; logged the first time it is asked."""
    chosen = next(kernel for kernel in KERNELS if unavailable_reason(kernel, device, dtype, head_dim) is None)
    operands = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}, on {device}"
    if chosen == "reference":
        _logger.warning("attention of %s: plain reference, memory grows with the square of the length", operands)
    else:
        _logger.info("attention of %s: kernel %s", operands, chosen)
    return chosen


def _run(kernel: str) -> Kernel:
    if kernel.startswith("flash"):
        return partial(attention_flash.flash_attention, int(kernel[-1]))
    if kernel == "triton":
        from poise.ops import attention_triton

        return attention_triton.triton_attention
    return cpu_attention if kernel == "cpu" else reference_attention


# --- checks ---

# Bounds of the tensors that were read already; the version tells whether one was written to since.
_known_bounds: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _cached_bounds(cu_seqlens: Tensor, num_tokens: int) -> tuple[int, ...]:
    # Reading is free on the CPU, where NumPy may share the memory; a tensor of inference mode has no version.
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():
        return sequence_bounds(cu_seqlens, num_tokens)
    return remembered_bounds(cu_seqlens, num_tokens)


def remembered_bounds(cu_seqlens: Int[Tensor, " N1"], num_tokens: int) -> tuple[int, ...]:
    """``sequence_bounds``, read once per tensor until torch writes to it."""
    version, bounds = _known_bounds.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version or bounds[-1] != num_tokens:
        bounds = sequence_bounds(cu_seqlens, num_tokens)
        _known_bounds[cu_seqlens] = (cu_seqlens._version, bounds)
    return bounds


def _check_operands(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor, window: int | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or len(k) != len(q) or k.shape[2] != q.shape[2]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"q must be [T, H, C], k and v [T, K, C]; got {shapes}")
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q's heads ({num_heads}) must be a multiple of k's and v's heads ({num_kv_heads})")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], one logit per head of q, got {list(sinks.shape)}")
    if not q.dtype == k.dtype == v.dtype == sinks.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}, {sinks.dtype}"
        raise ValueError(f"q, k, v and sinks must share one dtype, got {dtypes}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"q, k, v and sinks must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if not q.device == k.device == v.device == sinks.device == cu_seqlens.device:
        devices = f"{q.device}, {k.device}, {v.device}, {sinks.device}, {cu_seqlens.device}"
        raise ValueError(f"q, k, v, sinks and cu_seqlens must be on one device, got {devices}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be a vector of int32, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the token itself) or None, got {window}")


def _shorten(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 12 else f"[{', '.join(map(str, bounds[:12]))}, ...]"
