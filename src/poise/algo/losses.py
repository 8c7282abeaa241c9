"""Losses per token, weighted and summed: the caller divides once, by the normalizer of the whole optimizer step."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# exp(20) = 4.9e8. Beyond it a ratio says only that the policies have nothing in common, and float32 would overflow.
MAX_LOG_RATIO = 20.0

Estimator = Literal["k1", "k2", "k3"]
Loss = Literal["clip", "dual_clip", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]


def policy_loss(
    log_probs: Float[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    loss: Loss = "clip",
    dual_clip: float = 3.0,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    weights: Float[Tensor, " T"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The policy's loss, summed over the masked tokens with ``weights`` (None: 1 each).

    With r = exp(log_probs - old_log_probs) and c(r) = clip(r, 1 - clip_low, 1 + clip_high), the loss of a token is

    ``clip``: -min(r A, c(r) A), PPO (Schulman et al. 2017, equation 7), with the two bounds of DAPO (Yu et al. 2025,
    section 3.1).
    ``dual_clip``: the same, but never above -dual_clip A where A < 0 (Ye et al. 2020, "Mastering Complex Control in
    MOBA Games").
    ``gspo``: ``clip`` with the sequence's ratio, the geometric mean of its tokens', in the place of r; each token has
    its share of the gradient (GSPO-token, Zheng et al. 2025, equations 13 and 14). Needs ``cu_seqlens``.
    ``cispo``: -c(r) A log_probs without a gradient through c(r) (MiniMax-M1, 2025, equations 4 and 5).
    ``reinforce``: -A log_probs (Williams 1992); the bounds play no part.

    With ``old_log_probs = log_probs.detach()`` the ratio is exactly 1 and the gradient of token t is -A_t for every
    one of them.

    Metrics are detached and combine over micro-batches: ``ratio_min`` and ``ratio_max`` (inf and -inf without a token)
    by min and max; by sum ``clipped_tokens``, those whose gradient the bound took away, or for ``cispo`` limited, and
    ``approx_kl``, of r - 1 - log r, which estimates KL(old policy || policy) (Schulman 2020, k3).
    Whatever stands at tokens outside the mask reaches neither loss nor gradient. A token of probability 0 (log-prob
    -inf) under either policy has no ratio and counts for nothing; NaN stays NaN. A log-ratio beyond +-20 gets no
    gradient through the ratio. Raises ValueError for an unknown ``loss`` and for gspo without ``cu_seqlens``.
    """
    if loss not in ("clip", "dual_clip", "gspo", "cispo", "reinforce"):
        raise ValueError(f'loss must be "clip", "dual_clip", "gspo", "cispo" or "reinforce", got {loss!r}')
    used = mask & ~_is_impossible(log_probs, old_log_probs)
    log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    if loss == "gspo":
        if cu_seqlens is None:
            raise ValueError('loss "gspo" needs cu_seqlens: its ratio belongs to a sequence')
        # The value of the sequence's ratio, the gradient of the token's.
        log_ratio = sequence_means(log_ratio.detach(), used, cu_seqlens) + log_ratio - log_ratio.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(used, advantages, 0.0)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss in ("cispo", "reinforce"):
        factor = bounded.detach() if loss == "cispo" else 1.0
        losses = -factor * advantages * log_probs.masked_fill(~used, 0.0)
        is_clipped = (bounded != ratio) & (advantages != 0) if loss == "cispo" else torch.zeros_like(mask)
    else:
        losses = -torch.minimum(ratio * advantages, bounded * advantages)
        is_clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
        if loss == "dual_clip":
            limit = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
            is_clipped = is_clipped | (losses > limit)
            losses = torch.minimum(losses, limit)
    with torch.no_grad():
        metrics = {
            "ratio_min": torch.where(used, ratio, torch.inf).amin() if len(ratio) else ratio.new_tensor(torch.inf),
            "ratio_max": torch.where(used, ratio, -torch.inf).amax() if len(ratio) else ratio.new_tensor(-torch.inf),
            "clipped_tokens": is_clipped.sum(),
            "approx_kl": torch.where(used, torch.expm1(log_ratio) - log_ratio, 0.0).sum(),
        }
    return (losses if weights is None else weights * losses).sum(), metrics


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    *,
    clip: float,
    weights: Float[Tensor, " T"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The critic's loss, summed over the masked tokens with ``weights`` (None: 1 each).

    max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2, the squared error of PPO (Schulman et al. 2017, equation
    9) with a bound on how far a value moves in one batch (that of OpenAI's baselines; Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", section 3). ``clip`` 0: without the bound.

    A value that has moved past the bound towards its return has no gradient; one that has moved away keeps it.
    What stands outside the mask reaches neither loss nor gradient. Metrics, detached sums: ``clipped_values`` counts
    what the bound took the gradient from, ``unweighted`` is the loss without weights. Raises ValueError for a negative
    ``clip``.
    """
    if clip < 0:
        raise ValueError(f"clip must be at least 0, got {clip}")
    values, old_values, returns = (v.masked_fill(~mask, 0.0) for v in (values, old_values.detach(), returns.detach()))
    losses = (values - returns).square()
    is_clipped = torch.zeros_like(mask)
    if clip > 0:
        moved = values - old_values
        bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
        is_clipped = mask & (moved.detach().abs() > clip) & (bounded >= losses).detach()
        losses = torch.maximum(losses, bounded)
    metrics = {"clipped_values": is_clipped.sum(), "unweighted": losses.detach().sum() / 2}
    return (losses if weights is None else weights * losses).sum() / 2, metrics


def aggregation_weights(
    mask: Bool[Tensor, " T"], cu_seqlens: Int[Tensor, " N1"], aggregation: Aggregation, *, max_tokens: int
) -> tuple[Float[Tensor, " T"], int]:
    """What each token's loss weighs, and what these tokens add to the normalizer: loss = sum w_t l_t / normalizer.

    ``token``: 1, over the number of response tokens: every token counts the same (DAPO, Yu et al. 2025, section 3.3).
    ``sequence``: 1 / response tokens of its sequence, over the number of sequences: the mean of means (GRPO, Shao et
    al. 2024, equation 3).
    ``constant``: 1 / ``max_tokens``, over the number of sequences: no length enters (Dr. GRPO, Liu et al. 2025,
    section 3.2).

    Sequences without a response token count for nothing. The caller adds up the normalizers of all micro-batches (and
    ranks) of the optimizer step, so that the gradient does not depend on the cut. Raises ValueError for another name.
    """
    counts = _segment_sums(mask.double(), cu_seqlens)
    num_sequences = int((counts > 0).sum())
    ones = mask.float()
    if aggregation == "token":
        return ones, int(mask.sum())
    if aggregation == "sequence":
        return ones / per_token(counts, cu_seqlens).clamp(min=1).float(), num_sequences
    if aggregation == "constant":
        return ones / max_tokens, num_sequences
    raise ValueError(f'aggregation must be "token", "sequence" or "constant", got {aggregation!r}')


def sequence_sums(
    values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], cu_seqlens: Int[Tensor, " N1"]
) -> Float[Tensor, " N"]:
    """Sum over the masked tokens of each sequence, in float64; what stands outside the mask does not matter."""
    return _segment_sums(values.masked_fill(~mask, 0.0).double(), cu_seqlens)


def sequence_means(
    values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], cu_seqlens: Int[Tensor, " N1"]
) -> Float[Tensor, " T"]:
    """Mean over the masked tokens of each sequence, at each of its tokens; 0 where it has none."""
    counts = _segment_sums(mask.double(), cu_seqlens).clamp(min=1)
    return per_token(sequence_sums(values, mask, cu_seqlens) / counts, cu_seqlens).to(values.dtype)


def per_token(values: Float[Tensor, " N"], cu_seqlens: Int[Tensor, " N1"]) -> Float[Tensor, " T"]:
    """One number a sequence, at each of its tokens."""
    return values.repeat_interleave(cu_seqlens.diff().long())


def _segment_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    index = torch.arange(len(cu_seqlens) - 1, device=values.device).repeat_interleave(cu_seqlens.diff().long())
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, index, values)


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
