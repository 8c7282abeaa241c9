"""Sequences of tokens become packed micro-batches. Inputs and targets are shifted here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from poise.types import Batch, Stop, Trajectory

Demonstration = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Turns of (observation_ids, action_ids)."""


def pack(
    trajectories: Sequence[Trajectory], advantages: Float[Tensor, " N"], *, tokens_per_microbatch: int
) -> list[Batch]:
    """Micro-batches of at most ``tokens_per_microbatch`` rows.

    A trajectory of n tokens gives n - 1 rows: row t reads token t and speaks of token t + 1. ``advantages[i]`` goes to
    each token that was sampled in trajectory i. First-fit decreasing: the longest first, each into the first
    micro-batch with room (ties in the order given), so the outcome depends on nothing but the lengths. A trajectory in
    which nothing was sampled takes part and changes nothing. Raises ValueError for a trajectory that does not fit, ends
    in ENV_ERROR or has fewer than two tokens, and where only some carry routes.
    """
    if advantages.shape != (len(trajectories),):
        raise ValueError(f"advantages is {list(advantages.shape)} for {len(trajectories)} trajectories")
    sequences = []
    for index, (trajectory, advantage) in enumerate(zip(trajectories, advantages.tolist(), strict=True)):
        if trajectory.stop is Stop.ENV_ERROR:
            raise ValueError(f"trajectory {index} ({trajectory.episode_id}) ended in ENV_ERROR: never trained on")
        sequences.append(
            _Sequence(
                token_ids=np.array(trajectory.token_ids, dtype=np.int64),
                mask=np.array(trajectory.response_mask, dtype=bool),
                rollout_log_probs=np.array(trajectory.rollout_log_probs, dtype=np.float32),
                advantage=advantage,
                routes=trajectory.routes,
            )
        )
    return _pack(sequences, tokens_per_microbatch)


def pack_demonstrations(demonstrations: Sequence[Demonstration], *, tokens_per_microbatch: int) -> list[Batch]:
    """The same for demonstrations, each a list of turns (observation_ids, action_ids).

    Action tokens are the response, with advantage 1: imitation is REINFORCE on someone else's actions with advantage 1.
    ``rollout_log_probs`` are 0, since no policy sampled them. Raises as ``pack`` does.
    """
    sequences = []
    for turns in demonstrations:
        token_ids = [i for observation_ids, action_ids in turns for i in (*observation_ids, *action_ids)]
        mask = [is_action for turn in turns for is_action, ids in enumerate(turn) for _ in ids]
        sequences.append(
            _Sequence(
                token_ids=np.array(token_ids, dtype=np.int64),
                mask=np.array(mask, dtype=bool),
                rollout_log_probs=np.zeros(len(token_ids), dtype=np.float32),
                advantage=1.0,
            )
        )
    return _pack(sequences, tokens_per_microbatch)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sequence:
    """One stream; arrays are aligned with ``token_ids``, not yet shifted."""

    token_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    rollout_log_probs: NDArray[np.float32]
    advantage: float
    routes: NDArray[np.int16] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) - 1


def _pack(sequences: Sequence[_Sequence], tokens_per_microbatch: int) -> list[Batch]:
    for index, sequence in enumerate(sequences):
        if sequence.num_rows < 1:
            raise ValueError(
                f"sequence {index} has {len(sequence.token_ids)} tokens: at least 2 make an input and a target"
            )
        if sequence.num_rows > tokens_per_microbatch:
            raise ValueError(
                f"sequence {index} has {len(sequence.token_ids)} tokens and needs {sequence.num_rows} rows: "
                f"more than tokens_per_microbatch ({tokens_per_microbatch})"
            )
    if len({sequence.routes is None for sequence in sequences}) > 1:
        raise ValueError("trajectories: routes are recorded for all or for none")
    bins = _first_fit_decreasing([sequence.num_rows for sequence in sequences], tokens_per_microbatch)
    return [_batch([sequences[index] for index in members]) for members in bins]


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the sizes that share a bin; within a bin in the order given."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        number = next((number for number, free in enumerate(room) if sizes[index] <= free), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(index)
        room[number] -= sizes[index]
    return [sorted(members) for members in bins]


def _batch(sequences: Sequence[_Sequence]) -> Batch:
    lengths = [sequence.num_rows for sequence in sequences]
    mask = np.concatenate([sequence.mask[1:] for sequence in sequences])
    advantages = np.repeat(np.array([sequence.advantage for sequence in sequences], dtype=np.float32), lengths)
    routes = [sequence.routes[1:] for sequence in sequences if sequence.routes is not None]
    return Batch(
        input_ids=torch.from_numpy(np.concatenate([sequence.token_ids[:-1] for sequence in sequences])),
        target_ids=torch.from_numpy(np.concatenate([sequence.token_ids[1:] for sequence in sequences])),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        response_mask=torch.from_numpy(mask),
        rollout_log_probs=torch.from_numpy(np.concatenate([sequence.rollout_log_probs[1:] for sequence in sequences])),
        advantages=torch.from_numpy(np.where(mask, advantages, np.float32(0))),
        routes=torch.from_numpy(np.concatenate(routes)) if routes else None,
    )
