"""Routed experts: the matrix products of a mixture of experts, with a backward written by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.ops.experts_rows import (
    HALF_TYPES,
    Span,
    Stack,
    StackGradient,
    activation,
    activation_backward,
    add_bias_gradient,
    counts_of,
    products,
    rows_per_span,
    spans_of_counts,
    spans_of_sorted,
)
from poise.ops.mxfp4 import Mxfp4Stack
from poise.ops.prepared import PreparedStack

KERNELS = ("auto", "loop", "grouped", "reference")
# Gate and up of the first rows are kept for the backward pass: of a quarter of the rows, or up to so many elements
# (16 MiB in float32) or a quarter of their weights, whose gradients take more memory anyway. Those of further rows, and
# those of grouped products, are computed again.
MAX_KEPT = 2**22


def routed_experts(
    x: Float[Tensor, "T D"],
    gate_up: Float[Tensor, "E D F2"] | Mxfp4Stack | PreparedStack,
    gate_up_bias: Float[Tensor, "E F2"],
    down: Float[Tensor, "E F D"] | Mxfp4Stack | PreparedStack,
    down_bias: Float[Tensor, "E D"],
    expert_ids: Int[Tensor, "T A"],
    expert_weights: Float[Tensor, "T A"],
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    kernel: str = "auto",
    max_tokens_per_chunk: int | None = None,
    num_sharing: int = 1,
) -> Float[Tensor, "T D"]:
    """The weighted sum of each token's experts.

    y_t = sum_a w_ta (act(x_t G_e + g_e) D_e + d_e), e = expert_ids[t, a];
    act(h) = (up + 1) gate sigmoid(alpha gate), gate = min(h[0::2], limit), up = clamp(h[1::2], -limit, limit).
    "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2.3.

    ``kernel``: "loop" multiplies the rows, sorted by expert, expert by expert; "grouped" all experts of them at once
    with torch's grouped products (float32 and half types; made for bfloat16 on GPUs); "reference" is the equation;
    "auto" takes "grouped" for bfloat16 on GPUs, else "loop". Half types on the CPU are computed in float32, expert by
    expert. Frozen weights may stay packed (``Mxfp4Stack``; kernel "loop"), they are unpacked expert by expert; without
    gradients they may be prepared for few rows an expert (``PreparedStack``).

    ``max_tokens_per_chunk``: the rows of so many tokens (A each) exist at once, and no gate and up are kept for the
    backward pass; None: "loop" holds about 1024 rows or 4 MiB, the larger, and "grouped" all of them, at most
    1.5 T A (D + 2F) elements beside operands, result and gradients. ``num_sharing``: ranks that share the rows of a
    micro-batch, each of which keeps its share for the backward pass of what one alone would.

    Two runs on the same input give the same bits. Raises ValueError for an expert id outside 0..E-1 (on GPUs the
    device raises), operands that do not fit together, a kernel that is unknown or does not fit them.
    """
    _check_operands(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights)
    if max_tokens_per_chunk is not None and max_tokens_per_chunk < 1:
        raise ValueError(f"max_tokens_per_chunk must be positive or None, got {max_tokens_per_chunk}")
    if torch.is_grad_enabled() and (isinstance(gate_up, PreparedStack) or isinstance(down, PreparedStack)):
        raise ValueError("prepared weights are for forwards without gradients: call it under torch.no_grad()")
    kernel = _chosen_kernel(kernel, x, gate_up, down)
    if kernel == "reference":
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        return _reference(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights, alpha, limit)
    weights = (gate_up, gate_up_bias, down, down_bias)
    max_rows = None if max_tokens_per_chunk is None else max_tokens_per_chunk * max(1, expert_ids.shape[1])
    is_grouped = kernel == "grouped"
    return _RoutedExperts.apply(
        x, *weights, expert_ids, expert_weights, alpha, limit, is_grouped, max_rows, num_sharing
    )


def unavailable_reason(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``kernel`` cannot run such operands; None if it can."""
    if kernel == "grouped" and dtype == torch.float64:
        return "it takes float32, float16 and bfloat16, got float64"
    if kernel == "grouped" and device.type not in ("cpu", "cuda"):
        return f"torch has no grouped products on {device.type}"
    return None


def chosen_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" takes for weights that are not packed and whose sizes are multiples of 8."""
    is_made_for_it = device.type == "cuda" and dtype == torch.bfloat16
    return "grouped" if is_made_for_it and torch.cuda.get_device_capability(device) >= (8, 0) else "loop"


def _chosen_kernel(kernel: str, x: Tensor, gate_up: Stack, down: Stack) -> str:
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    is_plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    if kernel == "auto":
        # Rows of grouped products start at multiples of 16 bytes.
        is_aligned = all(size % 8 == 0 for size in (*gate_up.shape[1:], *down.shape[1:]))
        return chosen_kernel(x.device, x.dtype) if is_aligned and is_plain else "loop"
    if not is_plain and kernel != "loop":
        raise ValueError(f"kernel {kernel!r} takes no packed weights: choose 'loop' or unpack them")
    if reason := unavailable_reason(kernel, x.device, x.dtype):
        raise ValueError(f"kernel {kernel!r} cannot run here: {reason}; choose 'loop'")
    return kernel


def _reference(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """The equation for every expert and every token, zero where they are not routed to each other."""
    num_experts = len(gate_up)
    h = torch.einsum("td,edf->tef", x, gate_up) + gate_up_bias
    gate, up = h[..., 0::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    y = torch.einsum("tef,efd->ted", (up + 1) * gate * torch.sigmoid(alpha * gate), down) + down_bias
    is_routed = expert_ids.long()[..., None] == torch.arange(num_experts, device=x.device)
    weights = (expert_weights[..., None] * is_routed).sum(dim=1)
    return (weights.to(y.dtype)[..., None] * y).sum(dim=1)


class _RoutedExperts(torch.autograd.Function):
    """Rows sorted by expert and taken span by span through both products and back into the sum.

    Autograd over ``weight[e]`` would allocate a gradient of the whole stack for every expert; here each expert's
    gradient is written into its slice of one stack. The activation is computed again instead of kept, and the gradient
    of the weights comes from grad @ D_e^T, so that the experts' outputs need not be kept either.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Stack,
        gate_up_bias: Tensor,
        down: Stack,
        down_bias: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        alpha: float,
        limit: float,
        is_grouped: bool,
        max_rows: int | None,
        num_sharing: int,
    ) -> Tensor:
        flat_ids, num_active = expert_ids.reshape(-1), expert_ids.shape[1]
        order = torch.argsort(flat_ids, stable=True)
        spans = _spans(flat_ids, order, gate_up.shape, is_grouped, max_rows)
        token = order // num_active
        row_weights = expert_weights.reshape(-1, 1).index_select(0, order).to(_sum_dtype(x))
        # Products of half types are about 100 times slower than float32's on CPUs without instructions for them.
        dtype = x.dtype if x.is_cuda or is_grouped else _sum_dtype(x)
        is_kept = any(ctx.needs_input_grad) and max_rows is None and not is_grouped
        is_packed = isinstance(gate_up, Mxfp4Stack)
        room = room_to_keep(gate_up.shape, len(order), num_sharing, is_packed=is_packed) if is_kept else 0
        kept = []
        out = torch.zeros(x.shape, dtype=_sum_dtype(x), device=x.device)
        for span in spans:
            tokens = span.of(token)
            h = products(x.index_select(0, tokens).to(dtype), gate_up, gate_up_bias, span)
            room -= h.numel()
            if room >= 0:
                kept.append(h)
            h = activation(h, alpha, limit)
            y = products(h, down, down_bias, span)
            _scatter_add(out, tokens, y.mul_(span.of(row_weights)))
        saved = [stack if isinstance(stack, Tensor) else None for stack in (gate_up, down)]
        ctx.save_for_backward(
            x, *saved, gate_up_bias, down_bias, expert_ids, expert_weights, order, token, row_weights, *kept
        )
        ctx.packed = [None if isinstance(stack, Tensor) else stack for stack in (gate_up, down)]
        ctx.spans, ctx.dtype, ctx.alpha, ctx.limit = spans, dtype, alpha, limit
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: recomputation gives saved tensors once.
        tensors = ctx.saved_tensors
        x, *saved, gate_up_bias, down_bias, expert_ids, expert_weights, order, token, row_weights = tensors[:10]
        kept, dtype = tensors[10:], ctx.dtype
        gate_up, down = (packed if plain is None else plain for packed, plain in zip(ctx.packed, saved, strict=True))
        needs_x, needs_gate_up, needs_gate_up_bias, needs_down, needs_down_bias, _, needs_weights = (
            ctx.needs_input_grad[:7]
        )
        grad_x = torch.zeros(x.shape, dtype=_sum_dtype(x), device=x.device) if needs_x else None
        grad_gate_up = StackGradient(gate_up) if needs_gate_up else None
        grad_down = StackGradient(down) if needs_down else None
        grad_gate_up_bias = torch.zeros_like(gate_up_bias, dtype=_sum_dtype(x)) if needs_gate_up_bias else None
        grad_down_bias = torch.zeros_like(down_bias, dtype=_sum_dtype(x)) if needs_down_bias else None
        grad_weights = None
        if needs_weights:
            # dL/dw = grad . y with y = activation D_e + d_e: here the second part, in the spans the first.
            of_bias = torch.mm(grad.to(dtype), down_bias.to(dtype).t()).gather(1, expert_ids.long())
            grad_weights = of_bias.to(row_weights.dtype).view(-1)
        for index, span in enumerate(ctx.spans):
            tokens, weights = span.of(token), span.of(row_weights)
            is_kept = index < len(kept)
            h = kept[index] if is_kept else products(x.index_select(0, tokens).to(dtype), gate_up, gate_up_bias, span)
            grad_y = grad.index_select(0, tokens).to(dtype)
            grad_h = torch.empty_like(h) if is_kept else h
            activated, grad_row_weights = activation_backward(
                h, products(grad_y, down, None, span, is_transposed=True), weights, ctx.alpha, ctx.limit, grad_h=grad_h
            )
            del h
            if grad_weights is not None:
                grad_weights.index_add_(0, span.of(order), grad_row_weights.squeeze(1))
            if grad_down is not None:
                grad_down.add(activated, grad_y, span)
            del activated
            if grad_down_bias is not None:
                add_bias_gradient(grad_down_bias, grad_y, weights, span)
            del grad_y
            if grad_gate_up is not None:
                grad_gate_up.add(x.index_select(0, tokens).to(dtype), grad_h, span)
            if grad_gate_up_bias is not None:
                add_bias_gradient(grad_gate_up_bias, grad_h, None, span)
            if grad_x is not None:
                _scatter_add(grad_x, tokens, products(grad_h, gate_up, None, span, is_transposed=True))
        return (
            _rounded(grad_x, x),
            None if grad_gate_up is None else grad_gate_up.finished(),
            _rounded(grad_gate_up_bias, gate_up_bias),
            None if grad_down is None else grad_down.finished(),
            _rounded(grad_down_bias, down_bias),
            None,
            None if grad_weights is None else _rounded(grad_weights.view_as(expert_weights), expert_weights),
            *(None,) * 5,
        )


def _spans(flat_ids: Tensor, order: Tensor, shape: torch.Size, is_grouped: bool, max_rows: int | None) -> list[Span]:
    num_experts, channels, wide = shape
    if is_grouped:
        return spans_of_sorted(flat_ids.index_select(0, order), num_experts, max_rows or max(1, len(order)))
    counts = counts_of(flat_ids, num_experts)
    return spans_of_counts(counts, max_rows or rows_per_span(channels, wide // 2))


def room_to_keep(shape: Sequence[int], num_rows: int, num_sharing: int = 1, *, is_packed: bool) -> int:
    """Elements of gate and up that are kept for the backward pass; ``shape`` [E, D, 2F] is that of their weights.

    ``num_rows`` are this rank's, of ``num_sharing`` ranks that share a micro-batch.
    """
    experts, channels, wide = shape
    of_weights = 0 if is_packed else experts * channels * wide
    return max(MAX_KEPT // num_sharing, num_rows * wide // 4, of_weights // 4 // num_sharing)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALF_TYPES else x.dtype


def _scatter_add(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """total[tokens] += rows in a fixed order: on GPUs index_add_ has none, index_put_ sorts."""
    wide = rows.to(total.dtype)
    if total.is_cuda:
        total.index_put_((tokens,), wide, accumulate=True)
    else:
        total.index_add_(0, tokens, wide)


def _rounded(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


def _check_operands(
    x: Tensor,
    gate_up: Stack,
    gate_up_bias: Tensor,
    down: Stack,
    down_bias: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    experts, channels, wide = gate_up.shape
    fits = (
        x.shape[1] == channels
        and gate_up_bias.shape == (experts, wide)
        and down.shape == (experts, wide // 2, channels)
        and down_bias.shape == (experts, channels)
        and ids.shape == weights.shape
        and len(ids) == len(x)
    )
    if not fits:
        operands = {"x": x, "gate_up": gate_up, "gate_up_bias": gate_up_bias, "down": down, "down_bias": down_bias}
        shapes = {name: list(t.shape) for name, t in {**operands, "expert_ids": ids, "expert_weights": weights}.items()}
        raise ValueError(f"x [T, D], gate_up [E, D, 2F], down [E, F, D], expert_ids [T, A] do not fit: {shapes}")
    plain = [t for t in (gate_up, gate_up_bias, down, down_bias) if isinstance(t, Tensor)]
    if any(t.dtype != x.dtype for t in plain):
        raise ValueError(f"x and the experts must share one dtype, got {x.dtype} and {[t.dtype for t in plain]}")
