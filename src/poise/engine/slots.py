"""What the embedded engine knows of each row of its cache, and of each request."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poise.types import Action


@dataclass(eq=False)
class Slot:
    """One row of the cache. ``cached_ids`` are the tokens whose keys and values it holds."""

    index: int
    episode_id: str | None = None
    cached_ids: list[int] = field(default_factory=list)
    is_finished: bool = False  # the last action ended the episode: first to be evicted
    last_used: int = 0
    request: "Request | None" = None


@dataclass(eq=False)
class Request:
    token_ids: list[int]
    episode_id: str
    max_tokens: int
    uniforms: NDArray[np.float64]
    future: "asyncio.Future[Action]"
    temperature: float
    stop_ids: frozenset[int]
    num_top: int = 0
    given_ids: tuple[int, ...] = ()  # taken instead of what would be drawn
    leader: "Slot | None" = None  # prefills the same prompt; this request waits and copies
    sampled_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)  # per sampled token the ``num_top`` most probable
    routes_before: Tensor | None = None  # of the inputs that an earlier policy version has read


def occupy(slot: Slot, request: Request) -> None:
    """Keeps the slot's prefix where the request extends it by at least one token; a ring can't be shortened."""
    num_cached = len(slot.cached_ids)
    is_extended = num_cached < len(request.token_ids) and slot.cached_ids == request.token_ids[:num_cached]
    if slot.episode_id != request.episode_id or not is_extended:
        slot.cached_ids.clear()
    slot.episode_id, slot.request, slot.is_finished = request.episode_id, request, False


def num_to_feed(slot: Slot) -> int:
    """How many of the stream's tokens are not in the cache yet."""
    request = slot.request
    assert request is not None
    return len(request.token_ids) + len(request.sampled_ids) - len(slot.cached_ids)


def tokens_to_feed(slot: Slot, num_tokens: int) -> list[int]:
    """The first ``num_tokens`` of them."""
    request = slot.request
    assert request is not None
    start, num_given = len(slot.cached_ids), len(request.token_ids)
    if start >= num_given:
        return request.sampled_ids[start - num_given : start - num_given + num_tokens]
    return (request.token_ids[start : start + num_tokens] + request.sampled_ids)[:num_tokens]
