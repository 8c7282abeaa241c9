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


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCredit:
    """Of each sampled token of a stream, in order: its advantage, what the critic expected, what it should have."""

    advantages: Float[Tensor, " n"]
    values: Float[Tensor, " n"]
    returns: Float[Tensor, " n"]


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Float[Tensor, " N"] | Sequence[Float[Tensor, " turns"] | TokenCredit],
    *,
    tokens_per_microbatch: int,
) -> list[Batch]:
    """Micro-batches of at most ``tokens_per_microbatch`` rows.

    A trajectory of n tokens gives n - 1 rows: row t reads token t and speaks of token t + 1. ``advantages[i]`` goes to
    each token that was sampled in trajectory i; where it holds one number a turn, to those of that turn; a
    ``TokenCredit`` has a number for each. First-fit decreasing: the longest first, each into the first micro-batch with
    room (ties in the order given), so the outcome depends on nothing but the lengths. A trajectory in which nothing was
    sampled takes part and changes nothing. Raises ValueError for a trajectory that does not fit, ends in ENV_ERROR or
    has fewer than two tokens, where only some carry routes or a TokenCredit, where a token but the first lacks routes,
    and for as many numbers as there are neither turns nor tokens.
    """
    if len(advantages) != len(trajectories):
        raise ValueError(f"advantages has {len(advantages)} entries for {len(trajectories)} trajectories")
    sequences = []
    for index, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        if trajectory.stop is Stop.ENV_ERROR:
            raise ValueError(f"trajectory {index} ({trajectory.episode_id}) ended in ENV_ERROR: never trained on")
        sequences.append(
            _Sequence(
                token_ids=np.array(trajectory.token_ids, dtype=np.int64),
                mask=np.array(trajectory.response_mask, dtype=bool),
                rollout_log_probs=np.array(trajectory.rollout_log_probs, dtype=np.float32),
                routes=_routes(trajectory),
                **_credits(trajectory, advantage, f"advantages[{index}]"),
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
                advantages=np.array(mask, dtype=np.float32),
            )
        )
    return _pack(sequences, tokens_per_microbatch)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sequence:
    """One stream; arrays are aligned with ``token_ids``, not yet shifted."""

    token_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    rollout_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    routes: NDArray[np.int16] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) - 1


def _credits(trajectory: Trajectory, credit: Tensor | TokenCredit, name: str) -> dict[str, NDArray[np.float32]]:
    """Numbers at the sampled tokens, 0 at observations."""
    turns = trajectory.turns
    if isinstance(credit, TokenCredit):
        per_token = vars(credit)
    else:
        if credit.dim() and len(credit) != len(turns):
            raise ValueError(f"{name} has {len(credit)} numbers for {len(turns)} turns")
        counts = torch.tensor([len(turn.action_ids) for turn in turns], dtype=torch.int64)
        per_token = {"advantages": credit.expand(len(turns)).cpu().repeat_interleave(counts)}
    mask = np.array(trajectory.response_mask, dtype=bool)
    placed = {}
    for field, numbers in per_token.items():
        if len(numbers) != mask.sum():
            raise ValueError(f"{name}.{field} has {len(numbers)} numbers for {mask.sum()} sampled tokens")
        placed[field] = np.zeros(len(mask), dtype=np.float32)
        placed[field][mask] = numbers.cpu().numpy()
    return placed


def _routes(trajectory: Trajectory) -> NDArray[np.int16] | None:
    """Row i of the experts belongs to token i; only the first token of a stream has none."""
    routes = trajectory.routes
    if routes is not None and (routes[1:] < 0).any():
        row = 1 + int((routes[1:] < 0).any(axis=(1, 2)).argmax())
        raise ValueError(f"trajectory {trajectory.episode_id}: token {row} of {len(routes)} has no routes")
    return routes


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
    if len({sequence.values is None for sequence in sequences}) > 1:
        raise ValueError("advantages: a TokenCredit for all or for none")
    bins = first_fit_decreasing([sequence.num_rows for sequence in sequences], tokens_per_microbatch)
    return [_batch([sequences[index] for index in members]) for members in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """What ``pack`` puts together, given the rows of each sequence: indices of the sizes that share a bin.

    Within a bin in the order given.
    """
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
    routes = [sequence.routes[1:] for sequence in sequences if sequence.routes is not None]
    return Batch(
        input_ids=torch.from_numpy(np.concatenate([sequence.token_ids[:-1] for sequence in sequences])),
        target_ids=torch.from_numpy(np.concatenate([sequence.token_ids[1:] for sequence in sequences])),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        response_mask=torch.from_numpy(mask),
        rollout_log_probs=torch.from_numpy(np.concatenate([sequence.rollout_log_probs[1:] for sequence in sequences])),
        advantages=torch.from_numpy(np.concatenate([sequence.advantages[1:] for sequence in sequences])),
        values=_joined([sequence.values for sequence in sequences]),
        returns=_joined([sequence.returns for sequence in sequences]),
        routes=torch.from_numpy(np.concatenate(routes)) if routes else None,
    )


def _joined(arrays: Sequence[NDArray[np.float32] | None]) -> Tensor | None:
    known = [array[1:] for array in arrays if array is not None]
    return torch.from_numpy(np.concatenate(known)) if known else None
