"""What routed experts are made of: rows sorted by expert and cut into spans, products per expert, the activation."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.ops.mxfp4 import Mxfp4Stack
from poise.ops.prepared import PreparedStack
from poise.ops.products import rows_times, sum_over_rows

# A stack of matrices [E, I, O] as it is, in four bits, or laid out for products of few rows.
Stack = Tensor | Mxfp4Stack | PreparedStack

HALF_TYPES = (torch.float16, torch.bfloat16)
# Elements of a block of rows in elementwise maths: 1 MiB in float32 on the CPU, where it should stay in the cache.
MAX_BLOCK = 2**18
MAX_BLOCK_ON_GPUS = 2**22
# A span holds at least so many rows where there are as many, so that the products stay efficient, ...
MIN_SPAN = 1024
# ... and more while its temporaries have at most so many elements: 4 MiB in float32.
MAX_SPAN_ELEMENTS = 2**20


@dataclass(frozen=True)
class Span:
    """Rows of the sorted order that exist at once.

    Either with the experts that they belong to and the number of rows of each, or with ``offsets`` int32 [E] and
    ``experts_of_rows`` on the device: where each expert's rows end, and whose each row is.
    """

    start: int
    stop: int
    experts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    starts_inside: bool = False  # the first expert has rows in the span before
    ends_inside: bool = False  # the last expert has rows in the span after
    offsets: Tensor | None = None
    experts_of_rows: Tensor | None = None

    def of(self, rows: Tensor) -> Tensor:
        return rows if len(rows) == self.stop - self.start else rows[self.start : self.stop]

    def blocks(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The rows of each expert, which lie along ``dim``."""
        return torch.split_with_sizes(rows, self.sizes, dim)  # Tensor.split does the same more slowly


def rows_per_span(channels: int, width: int) -> int:
    """The rows that a loop over experts holds at once: about 2 D + 3 F elements each."""
    return max(MIN_SPAN, MAX_SPAN_ELEMENTS // max(1, 2 * channels + 3 * width))


def spans_of_counts(counts: list[int], max_rows: int) -> list[Span]:
    """Spans of at most ``max_rows`` rows; experts without rows appear in none, large ones are cut into equal parts."""
    hit = [(expert, count) for expert, count in enumerate(counts) if count]
    num_rows = sum(counts)
    if 0 < num_rows <= max_rows:
        experts, sizes = zip(*hit, strict=True)
        return [Span(0, num_rows, experts, sizes)]
    parts = []  # (expert, rows, has rows before, has rows after)
    for expert, count in hit:
        num_parts = -(-count // max_rows)
        for i in range(num_parts):
            size = count * (i + 1) // num_parts - count * i // num_parts
            parts.append((expert, size, i > 0, i < num_parts - 1))
    spans = []
    first = start = stop = 0
    for i, (_, size, _, _) in enumerate(parts):
        stop += size
        if i + 1 == len(parts) or stop + parts[i + 1][1] - start > max_rows:
            experts, sizes, *_ = zip(*parts[first : i + 1], strict=True)
            spans.append(Span(start, stop, experts, sizes, parts[first][2], parts[i][3]))
            first, start = i + 1, stop
    return spans


def spans_of_sorted(experts: Tensor, num_experts: int, max_rows: int) -> list[Span]:
    """The same rows for grouped products, without asking the device for their numbers."""
    bounds = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, bounds, right=True, out_int32=True)
    spans = []
    for start in range(0, len(experts), max_rows):
        stop = min(start + max_rows, len(experts))
        offsets = ends.clamp(start, stop) - start
        spans.append(Span(start, stop, offsets=offsets, experts_of_rows=experts[start:stop]))
    return spans


def counts_of(flat_ids: Tensor, num_experts: int) -> list[int]:
    """Rows of each expert. Raises ValueError for an id outside 0..E-1."""
    if len(flat_ids) == 0:
        return [0] * num_experts
    if flat_ids.device.type == "cpu" and int(flat_ids.min()) < 0:  # on CUDA bincount itself refuses
        raise ValueError(f"expert_ids must be 0..{num_experts - 1}, got {int(flat_ids.min())}")
    counts: list[int] = torch.bincount(flat_ids, minlength=num_experts).tolist()
    if len(counts) > num_experts:
        raise ValueError(f"expert_ids must be 0..{num_experts - 1}, got {len(counts) - 1}")
    return counts


# --- products ---


def matrices_of(
    stack: Tensor | Mxfp4Stack, experts: tuple[int, ...], dtype: torch.dtype, *, is_transposed: bool = False
) -> Iterable[Tensor]:
    """[I, O] of each expert in ``dtype``: unpacked or widened for the moment where it is stored otherwise."""
    if isinstance(stack, Mxfp4Stack):
        matrices = (stack.matrix(expert, dtype) for expert in experts)
        return (matrix.t() for matrix in matrices) if is_transposed else matrices
    stack = stack.detach()  # views without a history are made in half the time
    every = (stack.transpose(1, 2) if is_transposed else stack).unbind()
    chosen = [every[expert] for expert in experts]
    return chosen if stack.dtype == dtype else (matrix.to(dtype) for matrix in chosen)


def products(rows: Tensor, stack: Stack, bias: Tensor | None, span: Span, *, is_transposed: bool = False) -> Tensor:
    """Each row [I] times its expert's matrix [I, O], or that transposed, plus its bias -> [R, O]."""
    if isinstance(stack, PreparedStack):
        return _prepared_products(rows, stack, bias, span)
    if span.offsets is not None:
        assert isinstance(stack, Tensor)
        out = torch.nn.functional.grouped_mm(rows, stack.transpose(1, 2) if is_transposed else stack, offs=span.offsets)
        if bias is not None:
            assert span.experts_of_rows is not None
            for block, experts in row_blocks(out, span.experts_of_rows):
                block += bias.index_select(0, experts)
        return out
    out = rows.new_empty(len(rows), stack.shape[1 if is_transposed else 2])
    factors = matrices_of(stack, span.experts, rows.dtype, is_transposed=is_transposed)
    blocks, results = span.blocks(rows), span.blocks(out)
    biases = [None] * len(blocks) if bias is None else matrices_of(bias, span.experts, rows.dtype)
    for block, result, factor, b in zip(blocks, results, factors, biases, strict=True):
        rows_times(block, factor, b, out=result)
    return out


def _prepared_products(rows: Tensor, stack: PreparedStack, bias: Tensor | None, span: Span) -> Tensor:
    biases = [None] * len(stack.matrices) if bias is None else bias.unbind()
    blocks = zip(span.blocks(rows), span.experts, strict=True)
    return torch.cat([stack.matrices[expert].product(block, biases[expert]) for block, expert in blocks])


class StackGradient:
    """The gradient of a stack [E, I, O], written span by span into one tensor: a whole one per expert never exists.

    The sum over an expert's rows is made in the rows' type and rounded once, by grouped products once a span.
    """

    def __init__(self, stack: Tensor) -> None:
        self._shape, self._dtype, self._device = stack.shape, stack.dtype, stack.device
        self._total: Tensor | None = None
        self._unwritten = set(range(len(stack)))
        self._partial: Tensor | None = None

    def _stack(self) -> Tensor:
        if self._total is None:
            self._total = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._total

    def add(self, left: Tensor, right: Tensor, span: Span) -> None:
        """Adds left^T right over each expert's rows: ``left`` [R, I], ``right`` [R, O]."""
        if span.offsets is not None:
            grouped = torch.nn.functional.grouped_mm(left.t(), right, offs=span.offsets)
            # Nothing promises what a group without rows gets.
            is_empty = torch.diff(span.offsets, prepend=span.offsets.new_zeros(1)) == 0
            grouped.masked_fill_(is_empty[:, None, None], 0)
            self._total = grouped if self._total is None else self._total.add_(grouped)
            self._unwritten.clear()
            return
        totals, last = self._stack().unbind(), len(span.experts) - 1
        is_same_type = totals[0].dtype == left.dtype
        blocks = zip(span.experts, span.blocks(left), span.blocks(right), strict=True)
        for i, (expert, left_block, right_block) in enumerate(blocks):
            target = totals[expert] if is_same_type else self._partial_sum(left.dtype)
            sum_over_rows(left_block, right_block, out=target, is_added=i == 0 and span.starts_inside)
            if not is_same_type and not (i == last and span.ends_inside):
                totals[expert].copy_(target)
        self._unwritten.difference_update(span.experts)

    def _partial_sum(self, dtype: torch.dtype) -> Tensor:
        if self._partial is None:
            self._partial = torch.empty(self._shape[1:], dtype=dtype, device=self._device)
        return self._partial

    def finished(self) -> Tensor:
        total = self._stack()
        for expert in self._unwritten:
            total[expert].zero_()
        return total


def add_bias_gradient(total: Tensor, rows: Tensor, weights: Tensor | None, span: Span) -> None:
    """Adds to ``total`` [E, O] the sum of each expert's rows [R, O], weighed by ``weights`` [R, 1]."""
    if span.experts_of_rows is not None:
        # One matrix product: atomic additions would change their order from run to run.
        chosen = span.experts_of_rows[None, :] == torch.arange(len(total), device=rows.device)[:, None]
        selector = chosen.to(rows.dtype) if weights is None else chosen * weights.to(rows.dtype).t()
        total += selector @ rows
        return
    factors = rows.new_ones(len(rows)) if weights is None else weights[:, 0].to(rows.dtype)
    totals, is_same_type = total.unbind(), total.dtype == rows.dtype
    for expert, block, factor in zip(span.experts, span.blocks(rows.t(), dim=1), span.blocks(factors), strict=True):
        if is_same_type:
            totals[expert].addmv_(block, factor)
        else:
            totals[expert].add_(torch.mv(block, factor))


# --- elementwise ---


def row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, few enough that the temporaries of elementwise maths stay small."""
    most = MAX_BLOCK if tensors[0].device.type == "cpu" else MAX_BLOCK_ON_GPUS
    if tensors[0].numel() <= most:
        return iter([tensors])
    rows = max(1, most // max(1, tensors[0].shape[1]))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_TYPES else x


def activation(h: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate), clamped: [R, 2F] with gate and up interleaved -> [R, F]."""
    result = h.new_empty(len(h), h.shape[1] // 2)
    for block, out in row_blocks(h, result):
        rows = widened(block)
        gate = rows[:, 0::2].clamp(max=limit)
        up = rows[:, 1::2].clamp(-limit, limit)
        swish = torch.sigmoid(gate * alpha).mul_(gate)
        if out.dtype == swish.dtype:
            torch.addcmul(swish, swish, up, out=out)
        else:
            out.copy_(swish.addcmul_(swish, up))
    return result


def activation_backward(
    h: Tensor, grad: Tensor, row_weights: Tensor, alpha: float, limit: float, *, grad_h: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of the activation before weighting: weighted activation, and gradient of the weights.

    The weighted activation replaces ``grad``. The gradient of h goes to ``grad_h``, which may be ``h`` itself; it is
    zero where the clamp holds.
    """
    grad_weights = torch.empty_like(row_weights)
    bound = torch.tensor(limit, dtype=widened(h[:0]).dtype, device="cpu")
    # The gradient of a clamp that also passes at its bounds, as torch.clamp's does.
    above = torch.nextafter(bound, torch.full_like(bound, torch.inf)).item()
    clamped_grad, silu_grad = torch.ops.aten.hardtanh_backward, torch.ops.aten.silu_backward
    for rows, grads, weights, grad_rows, grad_w in row_blocks(h, grad, row_weights, grad_h, grad_weights):
        wide, g = widened(rows), widened(grads)
        raw_gate, raw_up = wide[:, 0::2].contiguous(), wide[:, 1::2].contiguous()
        gate, up = raw_gate.clamp(max=limit), raw_up.clamp(-limit, limit)
        scaled = gate * alpha
        swish = torch.sigmoid(scaled).mul_(gate)
        del gate
        act = torch.addcmul(swish, swish, up)
        torch.sum(g * act, dim=1, keepdim=True, out=grad_w)
        weighted = g * weights
        grads.copy_(act.mul_(weights))
        del act
        # swish(gate) = silu(alpha gate) / alpha
        by_gate = silu_grad(up.add_(1).mul_(weighted), scaled)
        grad_rows[:, 0::2] = clamped_grad(by_gate, raw_gate, -torch.inf, above)
        grad_rows[:, 1::2] = clamped_grad(swish.mul_(weighted), raw_up, -above, above)
    return grad, grad_weights
