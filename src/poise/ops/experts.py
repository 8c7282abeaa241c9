"""Routed experts: the matrix products of a mixture of experts, with a backward written by hand."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

KERNELS = ("auto", "loop", "reference")
# Elements of a block of rows in elementwise maths: 1 MiB in float32.
MAX_BLOCK = 2**18


def routed_experts(
    x: Float[Tensor, "T D"],
    gate_up: Float[Tensor, "E D F2"],
    gate_up_bias: Float[Tensor, "E F2"],
    down: Float[Tensor, "E F D"],
    down_bias: Float[Tensor, "E D"],
    expert_ids: Int[Tensor, "T A"],
    expert_weights: Float[Tensor, "T A"],
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    kernel: str = "auto",
) -> Float[Tensor, "T D"]:
    """The weighted sum of each token's experts.

    y_t = sum_a w_ta (act(x_t G_e + g_e) D_e + d_e), e = expert_ids[t, a];
    act(h) = (up + 1) gate sigmoid(alpha gate), gate = min(h[0::2], limit), up = clamp(h[1::2], -limit, limit).
    "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2.3.

    ``kernel``: "loop" sorts the rows by expert and multiplies expert by expert; "reference" is the equation; "auto"
    takes "loop". Two runs on the same input give the same bits on the CPU. Raises ValueError for an expert id outside
    0..E-1, operands that do not fit together and an unknown kernel.
    """
    _check_operands(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights)
    if kernel == "reference":
        return _reference(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights, alpha, limit)
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    return _LoopedExperts.apply(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights, alpha, limit)


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


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, few enough that the temporaries of elementwise maths stay in the CPU's cache."""
    rows = max(1, MAX_BLOCK // max(1, tensors[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _activation(h: Tensor, alpha: float, limit: float) -> Tensor:
    """[R, 2F] with gate and up interleaved -> [R, F]."""
    result = h.new_empty(len(h), h.shape[1] // 2)
    for rows, out in _row_blocks(h, result):
        gate = rows[:, 0::2].clamp(max=limit)
        up = rows[:, 1::2].clamp(-limit, limit)
        swish = torch.sigmoid(gate * alpha).mul_(gate)
        torch.addcmul(swish, swish, up, out=out)
    return result


def _activation_backward(
    h: Tensor, grad_activation: Tensor, row_weights: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of the activation before weighting: weighted activation, gradient of h and of the weights.

    The derivatives by gate and up are zero where the clamp holds.
    """
    activation, grad_h, grad_weights = (
        torch.empty_like(grad_activation),
        torch.empty_like(h),
        torch.empty_like(row_weights),
    )
    blocks = _row_blocks(h, grad_activation, row_weights, activation, grad_h, grad_weights)
    for rows, grad, weights, act, grad_rows, grad_w in blocks:
        raw_gate, raw_up = rows[:, 0::2], rows[:, 1::2]
        gate, up = raw_gate.clamp(max=limit), raw_up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(gate * alpha)
        swish = gate.mul_(sigmoid)
        torch.addcmul(swish, swish, up, out=act)
        torch.sum(grad * act, dim=1, keepdim=True, out=grad_w)
        act.mul_(weights)
        weighted = grad * weights
        # d swish / d gate = sigmoid + alpha gate sigmoid (1 - sigmoid) = sigmoid + alpha swish (1 - sigmoid)
        by_gate = torch.addcmul(sigmoid, swish, 1 - sigmoid, value=alpha).mul_(up.add_(1))
        torch.mul(weighted, by_gate.masked_fill_(raw_gate > limit, 0), out=grad_rows[:, 0::2])
        torch.mul(weighted, swish.masked_fill_(raw_up.abs() > limit, 0), out=grad_rows[:, 1::2])
    return activation, grad_h, grad_weights


class _LoopedExperts(torch.autograd.Function):
    """Rows sorted by expert; one matrix product per expert that is hit.

    Autograd over ``weight[e]`` would allocate a gradient of the whole stack for every expert; here each expert's
    gradient is written into its slice of one stack. The activation is computed again instead of kept, and the gradient
    of the weights comes from grad @ D_e^T, so that the experts' outputs need not be kept either.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
        num_experts, num_active = len(gate_up), expert_ids.shape[1]
        flat_ids = expert_ids.reshape(-1)
        counts = _rows_per_expert(flat_ids, num_experts)
        order = torch.argsort(flat_ids, stable=True)
        token = order // num_active
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        h = _matmul_per_expert(x.index_select(0, token), gate_up, gate_up_bias, counts)
        y = _matmul_per_expert(_activation(h, alpha, limit), down, down_bias, counts)
        ctx.save_for_backward(x, gate_up, down, down_bias, expert_weights, h, order, token, place)
        ctx.counts, ctx.alpha, ctx.limit = counts, alpha, limit
        per_token = y.index_select(0, place).view(len(x), num_active, y.shape[1])
        return torch.bmm(expert_weights.to(y.dtype).unsqueeze(1), per_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, down_bias, expert_weights, h, order, token, place = ctx.saved_tensors
        counts = ctx.counts
        row_weights = expert_weights.reshape(-1, 1).index_select(0, order).to(h.dtype)
        grad_y = grad.index_select(0, token)
        grad_activation = _matmul_per_expert(grad_y, down.transpose(1, 2), None, counts)
        activation, grad_h, grad_row_weights = _activation_backward(
            h, grad_activation, row_weights, ctx.alpha, ctx.limit
        )
        # dL/dw = grad . y with y = activation D_e + d_e; the first part is in grad_row_weights.
        grad_row_weights += _matmul_per_expert(grad_y, down_bias.unsqueeze(2), None, counts)
        grad_down, grad_down_bias = _weight_grads(activation, grad_y, row_weights, counts)
        ones = torch.ones_like(row_weights)
        grad_gate_up, grad_gate_up_bias = _weight_grads(x.index_select(0, token), grad_h, ones, counts)
        grad_rows = _matmul_per_expert(grad_h, gate_up.transpose(1, 2), None, counts)
        grad_x = grad_rows.index_select(0, place).view(*expert_weights.shape, x.shape[1]).sum(dim=1)
        grad_weights = grad_row_weights.index_select(0, place).view_as(expert_weights).to(expert_weights.dtype)
        return grad_x, grad_gate_up, grad_gate_up_bias, grad_down, grad_down_bias, None, grad_weights, None, None


def _rows_per_expert(flat_ids: Tensor, num_experts: int) -> list[int]:
    if len(flat_ids) == 0:
        return [0] * num_experts
    if flat_ids.device.type == "cpu" and int(flat_ids.min()) < 0:  # on CUDA bincount itself refuses
        raise ValueError(f"expert_ids must be 0..{num_experts - 1}, got {int(flat_ids.min())}")
    counts: list[int] = torch.bincount(flat_ids, minlength=num_experts).tolist()
    if len(counts) > num_experts:
        raise ValueError(f"expert_ids must be 0..{num_experts - 1}, got {len(counts) - 1}")
    return counts


def _matmul_per_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """Row block e of ``rows`` [R, I] times ``weight[e]`` [I, O] (plus ``bias[e]``) -> [R, O]."""
    out = rows.new_empty(len(rows), weight.shape[2])
    row_blocks, out_blocks, weights = rows.split(counts), out.split(counts), weight.unbind()
    biases = [None] * len(counts) if bias is None else bias.unbind()
    for count, row_block, out_block, w, b in zip(counts, row_blocks, out_blocks, weights, biases, strict=True):
        if not count:
            continue
        if b is None:
            torch.mm(row_block, w, out=out_block)
        else:
            torch.addmm(b, row_block, w, out=out_block)
    return out


def _weight_grads(rows: Tensor, grad: Tensor, bias_weights: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Gradients of the stack [E, I, O] and of its bias [E, O], each expert's from its own block of rows.

    ``bias_weights`` [R, 1] weighs each row of ``grad`` in the sum for the bias.
    """
    stack = rows.new_empty(len(counts), rows.shape[1], grad.shape[1])
    bias = rows.new_empty(len(counts), 1, grad.shape[1])
    blocks = zip(rows.split(counts), grad.split(counts), bias_weights.split(counts), strict=True)
    for e, (row_block, grad_block, weight_block) in enumerate(blocks):
        if counts[e]:
            torch.mm(row_block.t(), grad_block, out=stack[e])
            torch.mm(weight_block.t(), grad_block, out=bias[e])
        else:
            stack[e].zero_()
            bias[e].zero_()
    return stack, bias.squeeze(1)


def _check_operands(
    x: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor, ids: Tensor, weights: Tensor
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
    if not x.dtype == gate_up.dtype == gate_up_bias.dtype == down.dtype == down_bias.dtype:
        raise ValueError(f"x and the experts must share one dtype, got {x.dtype}, {gate_up.dtype}, {down.dtype}")
