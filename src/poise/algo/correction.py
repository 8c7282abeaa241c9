"""How far the policy that is trained is from the policy that acted, and what to do about it."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poise.algo.losses import MAX_LOG_RATIO, Estimator, kl, per_token, sequence_sums

Correction = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence"]
RejectBy = Literal["none", "sum", "mean", "max"]


def mismatch(
    log_probs: Float[Tensor, " T"], rollout_log_probs: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> dict[str, Tensor]:
    """Disagreement of trainer and engine over the same weights at the tokens that the engine sampled, in nats.

    With d = log_probs - rollout_log_probs: ``abs_sum`` and ``abs_max`` of |d|; ``k1_sum``, the sum of -d, and
    ``k3_sum``, the sum of exp(d) - 1 - d, which per token are unbiased estimates of KL(engine || trainer), the second
    never negative (Schulman 2020). Detached; all are 0 without a masked token. Sums combine by sum and ``abs_max`` by
    max; the caller divides. Float64: d^2 / 2 of a tiny d drowns in float32. A log-prob of -inf under the trainer gives
    inf: the engine sampled what the trainer calls impossible.
    """
    difference = log_probs.detach()[mask].double() - rollout_log_probs.detach()[mask].double()
    size = difference.abs()
    return {
        "abs_sum": size.sum(),
        "abs_max": size.amax() if len(size) else size.sum(),
        "k1_sum": (-difference).sum(),
        "k3_sum": (torch.expm1(difference) - difference).sum(),
    }


def rollout_correction(
    old_log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    cu_seqlens: Int[Tensor, " N1"],
    *,
    correction: Correction = "none",
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
    reject_by: RejectBy = "none",
    reject_estimator: Estimator = "k1",
    reject_above: float = 0.0,
    veto_below: float = 0.0,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"], dict[str, Tensor]]:
    """Importance weights that turn the engine's samples into the trainer's, and which tokens to keep.

    With d = old_log_probs - rollout_log_probs, clamped to +-20, rho = exp(d) for ``level`` token and
    exp(sum of d over the sequence) for ``sequence``:

    ``truncate``: weight min(rho, high) (truncated importance sampling, TIS: Ionides 2008; Yao et al. 2025).
    ``mask``: weight rho where low <= rho <= high, else 0 and not kept (IcePop, Ling team 2025, "Every Step Evolves").
    ``none``: weight 1.

    ``reject_by``: a sequence is rejected where the ``sum``, ``mean`` (k1: the geometric mean of its ratios) or ``max``
    over its tokens of ``reject_estimator`` exceeds ``reject_above``: k1 = -d, whose sum and mean are taken as absolute
    values and max as that of |d|; k2 = d^2 / 2; k3 = exp(d) - 1 - d; all estimate KL(engine || trainer).
    ``veto_below``: so is one with a token of exp(d) < veto_below (0: none): a token that the trainer calls impossible.

    Weights are detached, float32, 0 where not kept and outside the mask; whatever stands outside the mask changes
    nothing. A masked token keeps its place in the normalizer; drop rejected sequences before the baseline.
    Metrics, detached sums over this micro-batch: of rho - 1 squared, ``chi2_sum`` over tokens and ``chi2_sequence_sum``
    over sequences; of exp(d) for the effective sample size (sum)^2 / (n sum of squares): ``ratio_sum`` and
    ``ratio_square_sum``; ``perplexity_gap_sum`` over sequences of |mean d|; counts ``limited_tokens`` (truncated or
    masked), ``rejected_sequences``, ``vetoed_sequences`` and ``num_sequences`` (those with a masked token).
    Raises ValueError for unknown names and for bounds that are not 0 <= low <= 1 <= high.
    """
    _require_names(correction, level, reject_by, low, high)
    zeros = torch.zeros_like(old_log_probs, dtype=torch.float64)
    # Masked before the difference and before exp: whatever stands at observations stays there.
    difference = torch.where(mask, old_log_probs.detach().double() - rollout_log_probs.detach().double(), zeros)
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.where(mask, difference.exp(), zeros)
    counts = sequence_sums(mask.double(), mask, cu_seqlens)
    sums = sequence_sums(difference, mask, cu_seqlens)
    sequence_ratio = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    rho = ratio if level == "token" else torch.where(mask, per_token(sequence_ratio, cu_seqlens), zeros)

    is_limited = torch.zeros_like(mask)
    weights = mask.double()
    if correction != "none":
        is_limited = mask & ((rho > high) | ((rho < low) & (correction == "mask")))
        weights = rho.clamp(max=high) if correction == "truncate" else rho.masked_fill(is_limited, 0.0)
    veto_above = -math.log(veto_below) if veto_below > 0 else math.inf
    is_vetoed = _sequence_max(torch.where(mask, -difference, -torch.inf), cu_seqlens) > veto_above
    is_rejected = is_vetoed
    if reject_by != "none":
        is_rejected = is_vetoed | (_statistic(difference, mask, cu_seqlens, reject_by, reject_estimator) > reject_above)
    keep = mask & ~per_token(is_rejected, cu_seqlens)
    if correction == "mask":
        keep = keep & ~is_limited
    has_tokens = counts > 0
    metrics = {
        "chi2_sum": torch.where(mask, (ratio - 1).square(), zeros).sum(),
        "chi2_sequence_sum": (sequence_ratio[has_tokens] - 1).square().sum(),
        "ratio_sum": ratio.sum(),
        "ratio_square_sum": ratio.square().sum(),
        "perplexity_gap_sum": (sums / counts.clamp(min=1)).abs().sum(),
        "limited_tokens": is_limited.sum(),
        "rejected_sequences": is_rejected.sum(),
        "vetoed_sequences": is_vetoed.sum(),
        "num_sequences": has_tokens.sum(),
    }
    return weights.masked_fill(~keep, 0.0).float(), keep, metrics


def _statistic(
    difference: Tensor, mask: Tensor, cu_seqlens: Tensor, reject_by: RejectBy, estimator: Estimator
) -> Tensor:
    """One number a sequence: sum, mean or max over its tokens of the estimator of KL(engine || trainer)."""
    values = kl(-difference, torch.zeros_like(difference), estimator)
    if reject_by == "max":
        return _sequence_max(torch.where(mask, values.abs(), 0.0), cu_seqlens)
    sums = sequence_sums(values, mask, cu_seqlens).abs()
    return sums if reject_by == "sum" else sums / sequence_sums(mask.double(), mask, cu_seqlens).clamp(min=1)


def _sequence_max(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Largest value of each sequence; -inf for an empty one."""
    num_sequences = len(cu_seqlens) - 1
    index = torch.arange(num_sequences, device=values.device).repeat_interleave(cu_seqlens.diff().long())
    return values.new_full((num_sequences,), -torch.inf).scatter_reduce(0, index, values, "amax")


def _require_names(correction: str, level: str, reject_by: str, low: float, high: float) -> None:
    allowed = {
        "correction": (correction, ("none", "truncate", "mask")),
        "level": (level, ("token", "sequence")),
        "reject_by": (reject_by, ("none", "sum", "mean", "max")),
    }
    for name, (value, names) in allowed.items():
        if value not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low and high must be 0 <= low <= 1 <= high, got {low} and {high}")
