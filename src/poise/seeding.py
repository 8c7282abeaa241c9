"""Randomness as pure functions of the run's seed and a place in the run: whatever is resumed sees the same numbers."""

from contextvars import ContextVar
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

EPISODE_SEED: ContextVar[int | None] = ContextVar("EPISODE_SEED", default=None)
"""Of the episode that runs in this context, for what an environment draws: tools started by it inherit it."""


def derive_seed(*parts: int) -> int:
    """A seed that depends on every part and its place: streams of different steps or episodes never coincide."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def row_index(draw: int, num_rows: int, seed: int) -> int:
    """Row of the ``draw``-th draw (from 0): every epoch is a new seeded permutation of the rows."""
    epoch, place = divmod(draw, num_rows)
    return int(_permutation(num_rows, seed, epoch)[place])


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
