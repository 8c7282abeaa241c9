"""Advantages: how much better an episode did than its siblings."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Relative to the group's largest |reward|. TRL adds 1e-4 to the deviation of rewards of size one; taking it relative
# keeps the advantages the same when all rewards are scaled.
STD_FLOOR = 1e-4

Normalize = Literal["std", "none", "leave_one_out"]


def group_advantages(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], *, normalize: Normalize = "std"
) -> Float[Tensor, " N"]:
    """Reward of an episode against the mean of its group (the episodes of one problem).

    ``std``: A_i = (r_i - mean) / (std + 1e-4 max|r|), GRPO (Shao et al. 2024, section 4.1.2). The deviation is that of
    the sample (N - 1), as in TRL; the second term keeps rewards that differ by rounding from being blown up to one.
    ``none``: A_i = r_i - mean, Dr. GRPO (Liu et al. 2025, section 3.2).
    ``leave_one_out``: A_i = r_i - mean of the others = N / (N - 1) (r_i - mean), RLOO (Ahmadian et al. 2024).

    Statistics in float64 around a member of the group, so that equal rewards give exactly 0. Returns float64 [N].
    Pass only episodes that may be trained on (``Trajectory.is_trainable``): one that failed for reasons of its
    environment would shift the baseline of its siblings. Raises ValueError for a group of one, which has no baseline,
    for rewards that are not finite and for an unknown ``normalize``.
    """
    if normalize not in ("std", "none", "leave_one_out"):
        raise ValueError(f'normalize must be "std", "none" or "leave_one_out", got {normalize!r}')
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must both be [N]")
    rewards = rewards.double()
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()].tolist()}")
    advantages = torch.empty_like(rewards)
    for group_id in group_ids.unique():
        members = group_ids == group_id
        group = rewards[members]
        size = len(group)
        if size == 1:
            raise ValueError(f"group {int(group_id)} has one episode: a group baseline needs at least two")
        # Differences from a member are exact zeros when all are equal; differences from a rounded mean need not be.
        centred = group - group[0]
        centred = centred - centred.mean()
        if normalize == "std":
            std = centred.std(correction=1)
            centred = centred / (std + STD_FLOOR * group.abs().max()) if std > 0 else torch.zeros_like(centred)
        elif normalize == "leave_one_out":
            centred = centred * (size / (size - 1))
        advantages[members] = centred
    return advantages
