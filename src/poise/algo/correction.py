"""How far the policy that is trained is from the policy that acted."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def mismatch(
    log_probs: Float[Tensor, " T"], rollout_log_probs: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> dict[str, Tensor]:
    """Disagreement of trainer and engine over the same weights at the tokens that the engine sampled, in nats.

    With d = log_probs - rollout_log_probs: ``abs_sum`` and ``abs_max`` of |d|, and ``k3_sum``, the sum of
    exp(d) - 1 - d, which per token is an unbiased, nonnegative estimate of KL(engine || trainer) (Schulman 2020).
    Detached; all are 0 without a masked token. Sums combine by sum and ``abs_max`` by max; the caller divides. Float64:
    d^2 / 2 of a tiny d drowns in float32. A log-prob of -inf under the trainer gives inf: the engine sampled what the
    trainer calls impossible.
    """
    difference = log_probs.detach()[mask].double() - rollout_log_probs.detach()[mask].double()
    size = difference.abs()
    return {
        "abs_sum": size.sum(),
        "abs_max": size.amax() if len(size) else size.sum(),
        "k3_sum": (torch.expm1(difference) - difference).sum(),
    }
