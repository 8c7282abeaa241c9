"""The types that flow through poise: read this page first.

``Trajectory`` goes from the rollout to packing, ``Batch`` from packing to the loss, ``Action`` comes out of a policy.
Every array beside the tokens is aligned with the *token it speaks of*: in a ``Turn`` with the sampled token itself, in
a ``Batch`` with ``target_ids[t]``. The shift by one between inputs and targets happens in ``train/packing.py`` only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor


class Stop(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment said so
    MAX_TURNS = "max_turns"  # the limit of turns
    MAX_TOKENS = "max_tokens"  # an action was cut, or the context is full
    PARSE_ERROR = "parse_error"  # the policy's tokens are no harmony messages
    ENV_ERROR = "env_error"  # environment, tool server or grader failed: never trained on, never in a baseline


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a policy sampled in one turn.

    ``token_ids``: the sampled tokens, the stop token included when there is one. ``log_probs``: natural log-probability
    of each under exactly the distribution it was sampled from. ``is_stopped``: False when the action was cut by
    ``max_tokens``. ``policy_version``: of the weights that sampled its first token; ``policy_versions``: of each token
    where the weights moved under way, and empty where all are the same. ``routes``: int16 [rows, layers, A], the
    experts of the forward that predicted each token of
    the stream this call processed; the last ``len(token_ids)`` rows belong to the sampled tokens. None: not recorded.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    is_stopped: bool
    policy_version: int = 0
    policy_versions: tuple[int, ...] = ()
    routes: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        _require_versions("Action", self.policy_versions, len(self.token_ids))
        _require_equal_lengths("Action", token_ids=self.token_ids, log_probs=self.log_probs)
        _require_finite("Action.log_probs", self.log_probs)
        if not self.token_ids:
            raise ValueError("Action.token_ids is empty: a policy samples at least one token")


class Policy(Protocol):
    """Token ids in, ``Action`` out. The embedded engine, an HTTP client and a scripted fake are interchangeable.

    ``token_ids``: the whole stream of the episode so far. ``episode_id``: a hint that successive calls extend each
    other. ``seed``: of this call; the same call gives the same action for the same weights. ``max_tokens``: most tokens
    to sample.
    """

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action: ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One exchange: what was added to the stream, then what the policy answered.

    ``observation_ids``: only the tokens added since the last turn. ``reward``: credit of this turn (0 where the
    environment gives none). ``policy_version`` and ``policy_versions``: as in ``Action``.
    ``routes``: int16 [observation + action, layers, A]; row i holds the experts of the
    forward that predicted token i of this turn; the first row of a stream is -1: nothing predicts its first token.
    """

    observation_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    policy_version: int = 0
    policy_versions: tuple[int, ...] = ()
    reward: float = 0.0
    routes: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        _require_versions("Turn", self.policy_versions, len(self.action_ids))
        _require_equal_lengths("Turn", action_ids=self.action_ids, rollout_log_probs=self.rollout_log_probs)
        _require_finite("Turn.rollout_log_probs", self.rollout_log_probs)
        num_tokens = len(self.observation_ids) + len(self.action_ids)
        if self.routes is not None and len(self.routes) != num_tokens:
            raise ValueError(f"Turn.routes has {len(self.routes)} rows for {num_tokens} tokens")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One append-only stream of tokens. An episode is one of these, or several where harmony rewrites history.

    ``reward``: of the episode. ``metrics``: numbers of the episode, for reports only. ``is_trainable`` is False for
    ENV_ERROR, whose reward says nothing about the policy.
    """

    group_id: int
    episode_id: str
    turns: tuple[Turn, ...]
    reward: float
    stop: Stop
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"Trajectory.reward must be finite, got {self.reward}")
        if self.turns and not self.turns[0].observation_ids:
            raise ValueError("Trajectory.turns[0].observation_ids is empty: a stream begins with an observation")
        if len({turn.routes is None for turn in self.turns}) > 1:
            raise ValueError("Trajectory.turns: routes are recorded for every turn or for none")

    @property
    def token_ids(self) -> list[int]:
        return [i for turn in self.turns for i in (*turn.observation_ids, *turn.action_ids)]

    @property
    def response_mask(self) -> list[bool]:
        """True where the policy sampled the token."""
        return [
            is_action
            for turn in self.turns
            for is_action in (*[False] * len(turn.observation_ids), *[True] * len(turn.action_ids))
        ]

    @property
    def rollout_log_probs(self) -> list[float]:
        """Aligned with ``token_ids``; 0 at observations."""
        return [
            log_prob
            for turn in self.turns
            for log_prob in (*[0.0] * len(turn.observation_ids), *turn.rollout_log_probs)
        ]

    @property
    def policy_versions(self) -> list[int]:
        """Of each sampled token, in order."""
        return [
            version
            for turn in self.turns
            for version in turn.policy_versions or (turn.policy_version,) * len(turn.action_ids)
        ]

    @property
    def routes(self) -> NDArray[np.int16] | None:
        """int16 [tokens, layers, A], or None where they were not recorded."""
        recorded = [turn.routes for turn in self.turns if turn.routes is not None]
        return np.concatenate(recorded) if recorded else None

    @property
    def is_trainable(self) -> bool:
        return self.stop is not Stop.ENV_ERROR and any(turn.action_ids for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One packed micro-batch of one rank. Every array but ``input_ids`` speaks of ``target_ids[t]``.

    ``position_ids`` restart at each sequence; ``cu_seqlens`` holds the sequence borders, from 0 to T. ``response_mask``
    is a fact: the policy sampled this target. Fields that default to None are filled by ``dataclasses.replace``.
    ``routes[t]``: experts of the forward that predicted ``target_ids[t]``.
    """

    input_ids: Int[Tensor, " T"]
    target_ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " N1"]
    response_mask: Bool[Tensor, " T"]
    rollout_log_probs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    old_log_probs: Float[Tensor, " T"] | None = None
    ref_log_probs: Float[Tensor, " T"] | None = None
    values: Float[Tensor, " T"] | None = None
    returns: Float[Tensor, " T"] | None = None
    routes: Int[Tensor, "T layers A"] | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.input_ids)
        for name, value in vars(self).items():
            if value is None or name == "cu_seqlens":
                continue
            if len(value) != num_tokens:
                raise ValueError(f"Batch.{name} has {len(value)} rows, input_ids has {num_tokens}")
        if self.cu_seqlens.dtype != torch.int32:
            raise ValueError(f"Batch.cu_seqlens must be int32, got {self.cu_seqlens.dtype}")
        if int(self.cu_seqlens[0]) != 0 or int(self.cu_seqlens[-1]) != num_tokens:
            raise ValueError(f"Batch.cu_seqlens must run from 0 to {num_tokens}, got {self.cu_seqlens.tolist()}")

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask.sum())


def _require_equal_lengths(owner: str, **sequences: Sequence[object]) -> None:
    lengths = {name: len(sequence) for name, sequence in sequences.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: lengths differ: {lengths}")


def _require_finite(owner: str, values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{owner} must be finite, got {value}")


def _require_versions(owner: str, versions: Sequence[int], num_tokens: int) -> None:
    if versions and len(versions) != num_tokens:
        raise ValueError(f"{owner}.policy_versions has {len(versions)} entries for {num_tokens} tokens")
