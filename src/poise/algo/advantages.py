"""Advantages: how much better an episode did than its siblings."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Relative to the group's largest |reward|. TRL adds 1e-4 to the deviation of rewards of size one; taking it relative
# keeps the advantages the same when all rewards are scaled.
STD_FLOOR = 1e-4

Normalize = Literal["std", "none", "leave_one_out", "global"]


def group_advantages(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], *, normalize: Normalize = "std"
) -> Float[Tensor, " N"]:
    """Reward of an episode against the mean of its group (the episodes of one problem).

    ``std``: A_i = (r_i - mean) / (std + 1e-4 max|r|), GRPO (Shao et al. 2024, section 4.1.2). The deviation is that of
    the sample (N - 1), as in TRL; the second term keeps rewards that differ by rounding from being blown up to one.
    ``none``: A_i = r_i - mean, Dr. GRPO (Liu et al. 2025, section 3.2).
    ``leave_one_out``: A_i = r_i - mean of the others = N / (N - 1) (r_i - mean), RLOO (Ahmadian et al. 2024).
    ``global``: as ``std``, but the whole batch is one group, REINFORCE++ (Hu 2025, section 3).

    Statistics in float64 around a member of the group, so that equal rewards give exactly 0. Returns float64 [N].
    Pass only episodes that may be trained on (``Trajectory.is_trainable``): one that failed for reasons of its
    environment would shift the baseline of its siblings. Raises ValueError for a group of one, which has no
    baseline (``global``: a batch of one), for rewards that are not finite and for an unknown ``normalize``.
    """
    if normalize not in ("std", "none", "leave_one_out", "global"):
        raise ValueError(f'normalize must be "std", "none", "leave_one_out" or "global", got {normalize!r}')
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must both be [N]")
    rewards = rewards.double()
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()].tolist()}")
    if normalize == "global":
        group_ids = torch.zeros_like(group_ids)
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
        if normalize in ("std", "global"):
            std = centred.std(correction=1)
            centred = centred / (std + STD_FLOOR * group.abs().max()) if std > 0 else torch.zeros_like(centred)
        elif normalize == "leave_one_out":
            centred = centred * (size / (size - 1))
        advantages[members] = centred
    return advantages


def turn_advantages(
    advantages: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"],
    turn_rewards: Sequence[Sequence[float]],
    *,
    discount: float,
    normalize: Normalize = "std",
) -> list[Float[Tensor, " turns"]]:
    """Advantage of each turn: what came after it counts, what came before does not.

    With a = ``advantages`` (of the episodes, from ``group_advantages``), K turns and b = the turns' rewards, put
    through ``group_advantages`` as if each turn of the group were a sample of it:

        A_k = discount^(K-1-k) a + sum_{j >= k} discount^(j-k) b_j,

    which is the process supervision of GRPO (Shao et al. 2024, section 4.1.3) with the outcome as one more reward at
    the end and a discount between turns. With equal turn rewards b is exactly 0, and with discount 1 every turn then
    has the advantage of its episode. ``turn_rewards[i]``: of episode i, which has at least one turn. Float64. Raises
    ValueError for lengths that differ, an episode without a turn and a discount outside [0, 1].
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1], got {discount}")
    if not len(advantages) == len(group_ids) == len(turn_rewards):
        lengths = f"{len(advantages)}, {len(group_ids)} and {len(turn_rewards)}"
        raise ValueError(f"advantages, group_ids and turn_rewards must have one entry an episode, got {lengths}")
    counts = [len(rewards) for rewards in turn_rewards]
    if 0 in counts:
        raise ValueError(f"turn_rewards[{counts.index(0)}] is empty: an episode has at least one turn")
    flat = torch.tensor([reward for rewards in turn_rewards for reward in rewards], dtype=torch.float64)
    turn_groups = group_ids.repeat_interleave(torch.tensor(counts, device=group_ids.device))
    centred = group_advantages(flat, turn_groups, normalize=normalize)
    credited = []
    for advantage, terms in zip(advantages.tolist(), centred.split(counts), strict=True):
        later, backwards = advantage, []
        for number, term in enumerate(reversed(terms.tolist())):
            later = term + (later if number == 0 else discount * later)
            backwards.append(later)
        credited.append(torch.tensor(backwards[::-1], dtype=torch.float64))
    return credited


def gae(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    *,
    gamma: float,
    lam: float,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Generalized advantage estimation over the masked tokens (Schulman et al. 2016, equations 11, 12 and 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; return_t = A_t + V_t. ``t + 1`` is the next
    *masked* token: the tokens of an observation are no steps, whatever stands at them does not matter, and each
    episode ends with V = 0. ``cu_seqlens``: borders of packed sequences (None: one). (advantages, returns), float64, 0
    outside the mask.
    """
    borders = [0, len(rewards)] if cu_seqlens is None else cu_seqlens.tolist()
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    returns = torch.zeros(len(rewards), dtype=torch.float64)
    reward, value, is_step = rewards.tolist(), values.tolist(), mask.tolist()
    for start, end in itertools.pairwise(borders):
        next_value = next_advantage = 0.0
        for t in reversed(range(start, end)):
            if not is_step[t]:
                continue
            next_advantage = reward[t] + gamma * next_value - value[t] + gamma * lam * next_advantage
            next_value = value[t]
            advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages.to(rewards.device), returns.to(rewards.device)


def explained_variance(values: Float[Tensor, " T"], returns: Float[Tensor, " T"]) -> float:
    """Share of the variance of the returns that the values account for: 1 - Var(returns - values) / Var(returns).

    1: they are right but for a constant; 0: no better than any constant; negative: worse. NaN where the returns are all
    equal, since there is nothing to explain. Two passes in float64.
    """
    variance = _variance(returns.double())
    return 1 - _variance(returns.double() - values.double()) / variance if variance > 0 else math.nan


def _variance(values: Tensor) -> float:
    # Around a member first, so that equal numbers give exactly 0.
    centred = values - values[0]
    return (centred - centred.mean()).square().mean().item()
