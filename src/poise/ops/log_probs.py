"""Log-probabilities of given tokens and the entropy of their distributions, from hidden states, tile by tile."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.ops.products import rows_times, sum_over_rows

# Logits of a tile: 2**23 float32 are 32 MiB; two tensors of this size exist at once.
MAX_LOGITS = 2**23
# Rows of a tile where there are as many; the rest of it is vocabulary.
TILE_ROWS = 1024


def token_log_probs(
    hidden: Float[Tensor, "T D"],
    lm_head: Float[Tensor, "V D"],
    target_ids: Int[Tensor, " T"],
    *,
    temperature: float = 1.0,
    num_sharing: int = 1,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """log p(target) and entropy, in nats, of softmax(hidden lm_head^T / temperature).

    log p_t = z_target - logsumexp(z); H = -sum_j p_j log p_j. Both are float32 (float64 for float64 operands) and carry
    gradients. Logits exist for one tile of rows and vocabulary at a time, in the backward pass too, which computes them
    again; half types are computed in float32, the head's rows of one tile at a time. ``num_sharing``: ranks
    that share the rows of a micro-batch, and with them the memory of its tiles. Raises ValueError for a temperature
    that is not positive, a target outside 0..V-1 and operands that do not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if hidden.dim() != 2 or lm_head.dim() != 2 or hidden.shape[1] != lm_head.shape[1]:
        raise ValueError(
            f"hidden must be [T, D] and lm_head [V, D], got {list(hidden.shape)} and {list(lm_head.shape)}"
        )
    if hidden.dtype != lm_head.dtype:
        raise ValueError(f"hidden and lm_head must share one dtype, got {hidden.dtype} and {lm_head.dtype}")
    if target_ids.shape != hidden.shape[:1]:
        raise ValueError(f"target_ids must be [{len(hidden)}], one per row of hidden, got {list(target_ids.shape)}")
    if target_ids.device.type == "cpu" and len(target_ids):
        low, high = (int(x) for x in target_ids.aminmax())
        if low < 0 or high >= len(lm_head):
            raise ValueError(f"target_ids must be 0..{len(lm_head) - 1}, got {low if low < 0 else high}")
    log_probs, entropy = _TokenLogProbs.apply(hidden, lm_head, target_ids.long(), temperature, num_sharing)
    return log_probs, entropy


def reference_log_probs(
    hidden: Float[Tensor, "T D"],
    lm_head: Float[Tensor, "V D"],
    target_ids: Int[Tensor, " T"],
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """``token_log_probs`` over one [T, V] tensor, differentiated by autograd."""
    log_p = (_widen(hidden) @ _widen(lm_head).t() / temperature).log_softmax(dim=-1)
    return log_p.gather(1, target_ids.long()[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def tile_shape(num_rows: int, vocabulary: int, num_sharing: int = 1) -> tuple[int, int]:
    """(rows, columns of the vocabulary) of a tile."""
    max_logits = MAX_LOGITS // num_sharing
    columns = max(1, min(vocabulary, max_logits // max(1, min(num_rows, TILE_ROWS))))
    return min(num_rows, max(1, max_logits // columns)), columns


def _tiles(num_rows: int, vocabulary: int, num_sharing: int) -> tuple[list[slice], list[slice]]:
    """How rows and vocabulary are cut."""
    rows, columns = tile_shape(num_rows, vocabulary, num_sharing)
    return _cuts(num_rows, rows), _cuts(vocabulary, columns)


def _cuts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, max(1, size))]


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = rows_times(hidden, head.t(), out=hidden.new_empty(len(hidden), len(head)))
    return logits if temperature == 1 else logits.div_(temperature)


def _place_in(columns: slice, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets lie in these columns of the vocabulary, and where there [R, 1]; 0 for the others."""
    is_here = (target_ids >= columns.start) & (target_ids < columns.stop)
    return is_here, torch.where(is_here, target_ids - columns.start, 0)[:, None]


class _TokenLogProbs(torch.autograd.Function):
    """The vocabulary in the outer loop, so that each row of a half-type head is widened once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, target_ids: Tensor, temperature: float, num_sharing: int
    ) -> tuple[Tensor, Tensor]:
        # Running over the vocabulary: largest logit, sum of exp(z - largest), and of exp(z - largest) z.
        largest = torch.full((len(hidden),), -torch.inf, dtype=_sum_dtype(hidden), device=hidden.device)
        total, weighted, target_logits = (torch.zeros_like(largest) for _ in range(3))
        row_tiles, column_tiles = _tiles(len(hidden), len(lm_head), num_sharing)
        for columns in column_tiles:
            head = _widen(lm_head[columns])
            for rows in row_tiles:
                logits = _logits(_widen(hidden[rows]), head, temperature)
                is_here, place = _place_in(columns, target_ids[rows])
                target_logits[rows] += torch.where(is_here, logits.gather(1, place).squeeze(1), 0)
                new_largest = torch.maximum(largest[rows], logits.amax(dim=1))
                shrink = torch.exp(largest[rows] - new_largest)
                exps = torch.sub(logits, new_largest[:, None]).exp_()
                largest[rows] = new_largest
                total[rows] = total[rows] * shrink + exps.sum(dim=1)
                weighted[rows] = weighted[rows] * shrink + exps.mul_(logits).sum(dim=1)
                del logits, exps  # before the next ones come
        lse = largest + total.log()
        entropy = lse - weighted / total
        ctx.save_for_backward(hidden, lm_head, target_ids, lse, entropy)
        ctx.temperature, ctx.num_sharing = temperature, num_sharing
        ctx.set_materialize_grads(False)
        return target_logits - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, lm_head, target_ids, lse, entropy = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 5
        grad_hidden = torch.zeros_like(hidden, dtype=_sum_dtype(hidden)) if needs_hidden else None
        grad_head = torch.zeros_like(lm_head) if needs_head else None
        row_tiles, column_tiles = _tiles(len(hidden), len(lm_head), ctx.num_sharing)
        for columns in column_tiles:
            head = _widen(lm_head[columns])
            grad_columns = None
            if grad_head is not None:  # half types are summed in float32 and rounded once
                is_same_type = grad_head.dtype == head.dtype
                grad_columns = grad_head[columns] if is_same_type else torch.zeros_like(head)
            for rows in row_tiles:
                wide = _widen(hidden[rows])
                log_p = _logits(wide, head, ctx.temperature).sub_(lse[rows, None])
                # d log p_target / d z_j = 1[j = target] - p_j;  d H / d z_j = -p_j (log p_j + H)
                if grad_entropy is None:
                    assert grad_log_probs is not None
                    grad = log_p.exp_().mul_(-grad_log_probs[rows, None])
                else:
                    grad = torch.exp(log_p)
                    factor = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
                    if grad_log_probs is not None:
                        factor.sub_(grad_log_probs[rows, None])
                    grad.mul_(factor)
                    del factor
                if grad_log_probs is not None:
                    is_here, place = _place_in(columns, target_ids[rows])
                    grad.scatter_add_(1, place, torch.where(is_here, grad_log_probs[rows], 0)[:, None])
                if ctx.temperature != 1:
                    grad.div_(ctx.temperature)
                if grad_hidden is not None:
                    rows_times(grad, head, out=grad_hidden[rows], is_added=True)
                if grad_columns is not None:
                    sum_over_rows(grad, wide, out=grad_columns, is_added=True)
                del log_p, grad  # before the next ones come
            if grad_head is not None and grad_columns is not None and not is_same_type:
                grad_head[columns] = grad_columns
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, None, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
