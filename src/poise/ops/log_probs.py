"""Log-probabilities of given tokens and the entropy of their distributions, from hidden states, chunk by chunk."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Logits held at once: 2**26 float32 are 256 MiB; the backward pass holds a few tensors of this size.
MAX_LOGITS = 2**26


def token_log_probs(
    hidden: Float[Tensor, "T D"],
    lm_head: Float[Tensor, "V D"],
    target_ids: Int[Tensor, " T"],
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """log p(target) and entropy, in nats, of softmax(hidden lm_head^T / temperature).

    log p_t = z_target - logsumexp(z); H = -sum_j p_j log p_j. Both are float32 (float64 for float64 operands) and carry
    gradients. Logits exist for one chunk of rows at a time, in the backward pass too, which computes them again.
    Raises ValueError for a temperature that is not positive, a target outside 0..V-1 and operands that do not fit.
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
    log_probs, entropy = _TokenLogProbs.apply(hidden, lm_head, target_ids.long(), temperature)
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


def _chunks(num_rows: int, vocabulary: int) -> list[slice]:
    rows = max(1, MAX_LOGITS // vocabulary)
    return [slice(start, start + rows) for start in range(0, num_rows, rows)]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, target_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        head = _widen(lm_head).t()
        lse = torch.empty(len(hidden), dtype=head.dtype, device=hidden.device)
        target_logits, mean_logits = torch.empty_like(lse), torch.empty_like(lse)
        for rows in _chunks(len(hidden), len(lm_head)):
            logits = torch.mm(_widen(hidden[rows]), head).div_(temperature)
            lse[rows] = torch.logsumexp(logits, dim=-1)
            target_logits[rows] = logits.gather(1, target_ids[rows, None]).squeeze(1)
            probs = torch.exp(logits - lse[rows, None])
            mean_logits[rows] = probs.mul_(logits).sum(dim=-1)
        entropy = lse - mean_logits
        ctx.save_for_backward(hidden, lm_head, target_ids, lse, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target_logits - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, lm_head, target_ids, lse, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        head = _widen(lm_head)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head)
        for rows in _chunks(len(hidden), len(lm_head)):
            wide = _widen(hidden[rows])
            log_p = torch.mm(wide, head.t()).div_(ctx.temperature).sub_(lse[rows, None])
            grad = torch.exp(log_p)
            # d log p_target / d z_j = 1[j = target] - p_j;  d H / d z_j = -p_j (log p_j + H)
            if grad_entropy is None:
                assert grad_log_probs is not None
                grad.mul_(-grad_log_probs[rows, None])
            else:
                factor = log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
                if grad_log_probs is not None:
                    factor.sub_(grad_log_probs[rows, None])
                grad.mul_(factor)
            if grad_log_probs is not None:
                grad.scatter_add_(1, target_ids[rows, None], grad_log_probs[rows, None])
            grad.div_(ctx.temperature)
            grad_hidden[rows] = torch.mm(grad, head).to(hidden.dtype)
            grad_head.addmm_(grad.t(), wide)
        return grad_hidden, grad_head.to(lm_head.dtype), None, None
