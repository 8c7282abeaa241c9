"""Losses per token, summed: the caller divides once, by the response tokens of the whole optimizer step."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# exp(20) = 4.9e8. Beyond it a ratio says only that the policies have nothing in common, and float32 would overflow.
MAX_LOG_RATIO = 20.0

Estimator = Literal["k1", "k2", "k3"]


def policy_loss(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Clipped surrogate, summed over the masked tokens (Schulman et al. 2017, equation 7; two bounds as in DAPO).

    ratio = exp(log_probs - old_log_probs); loss = -sum_t min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).
    With ``old_log_probs = log_probs.detach()`` the ratio is exactly 1 and the gradient of token t is -A_t.

    Metrics are detached and combine over micro-batches: ``ratio_min`` and ``ratio_max`` (inf and -inf without a token)
    by min and max; ``clipped_tokens``, where the bound took the gradient away, by sum. Whatever stands at tokens
    outside the mask reaches neither loss nor gradient. A token of probability 0 (log-prob -inf) under either policy has
    no ratio and counts for nothing; NaN stays NaN. A log-ratio beyond +-20 gets no gradient.
    """
    log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    used = mask & ~_is_impossible(log_probs, old_log_probs)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(used, advantages, 0.0)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    with torch.no_grad():
        is_clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
        metrics = {
            "ratio_min": torch.where(used, ratio, torch.inf).amin() if len(ratio) else ratio.new_tensor(torch.inf),
            "ratio_max": torch.where(used, ratio, -torch.inf).amax() if len(ratio) else ratio.new_tensor(-torch.inf),
            "clipped_tokens": is_clipped.sum(),
        }
    return -surrogate.sum(), metrics


def kl(log_probs: Float[Tensor, " T"], ref_log_probs: Float[Tensor, " T"], estimator: Estimator) -> Float[Tensor, " T"]:
    """Estimate of KL(policy || reference) from each sampled token (Schulman 2020, "Approximating KL divergence").

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. For tokens that the policy sampled,
    k1 and k3 are unbiased in value. As a loss, k2 has the gradient of this KL in expectation, k3 that of
    KL(reference || policy), and k1 none at all. Per token, in nats; the caller masks and normalizes. A token of
    probability 0 under either policy gives 0. Beyond |d| = 20 k3 is flat. Raises ValueError for an unknown estimator.
    """
    difference = _log_ratio(log_probs, ref_log_probs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-difference) + difference
    raise ValueError(f'estimator must be "k1", "k2" or "k3", got {estimator!r}')


def _log_ratio(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """log_probs - other_log_probs, with 0 outside the mask and at impossible tokens."""
    unused = _is_impossible(log_probs, other_log_probs)
    if mask is not None:
        unused = unused | ~mask
    # Both inputs are replaced before the difference: a NaN behind a where would come back in the gradient as 0 * NaN.
    return log_probs.masked_fill(unused, 0.0) - other_log_probs.masked_fill(unused, 0.0)


def _is_impossible(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    return (log_probs == -torch.inf) | (other_log_probs == -torch.inf)
