"""Numbers about two lists of log-probabilities of the same tokens; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGE = 0.1  # nats: a ratio off by more than a tenth


@dataclass(frozen=True, kw_only=True)
class Summary:
    """With d = trainer - engine, in nats, over ``num_tokens`` tokens.

    ``mean``, ``p99``, ``max`` of |d|; ``rms`` of d; ``k1``, the mean of -d, and ``k3``, the mean of exp(d) - 1 - d:
    where the engine sampled the tokens, estimates of KL(engine || trainer) (Schulman 2020, "Approximating KL
    Divergence"); ``share_large``: share of |d| above 0.1; ``pearson``: correlation of the two probabilities, None where
    one side is constant.
    """

    num_tokens: int
    mean: float
    p99: float
    max: float
    rms: float
    k1: float
    k3: float
    share_large: float
    pearson: float | None


def summary(trainer: NDArray[np.float64], engine: NDArray[np.float64]) -> Summary:
    """Raises ValueError where there is no token, or not the same number of them on both sides."""
    if trainer.shape != engine.shape or trainer.ndim != 1 or not len(trainer):
        raise ValueError(f"trainer and engine must be [N] with N >= 1, got {trainer.shape} and {engine.shape}")
    difference = trainer - engine
    size = np.abs(difference)
    return Summary(
        num_tokens=len(size),
        mean=float(size.mean()),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        rms=float(np.sqrt(np.square(difference).mean())),
        k1=float(-difference.mean()),
        k3=float((np.expm1(difference) - difference).mean()),
        share_large=float((size > LARGE).mean()),
        pearson=_pearson(np.exp(trainer), np.exp(engine)),
    )


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else None


def bands(position_ids: NDArray[np.int64], window: int | None) -> list[tuple[str, NDArray[np.bool_]]]:
    """(name, which tokens) by the position of the input that predicts them: 0 .. W - 1 sees all that came before even
    on a sliding layer of window W; then W .. 2W - 1, 2W .. 4W - 1, doubling. Empty bands are left out."""
    if window is None or not len(position_ids):
        return [("everywhere (no sliding layer)", np.ones(len(position_ids), dtype=bool))]
    found = []
    start, end, name = 0, window, f"first window (0..{window - 1})"
    while start <= position_ids.max():
        chosen = (position_ids >= start) & (position_ids < end)
        if chosen.any():
            found.append((name, chosen))
        start, end = end, 2 * end
        name = f"{start // window} to {end // window} windows ({start}..{end - 1})"
    return found


def route_differences(
    trainer: NDArray[np.int16], engine: NDArray[np.int16]
) -> tuple[int, Sequence[float]]:  # [T, layers, A] each
    """(rows compared, share of them per layer whose sets of experts differ). The engine's rows of -1 were not recorded
    and are left out."""
    if trainer.shape != engine.shape:
        raise ValueError(f"routes must have one shape, got {trainer.shape} and {engine.shape}")
    is_known = (engine >= 0).all(axis=(1, 2))
    if not is_known.any():
        return 0, []
    differs = (np.sort(trainer[is_known], axis=-1) != np.sort(engine[is_known], axis=-1)).any(axis=-1)
    return int(is_known.sum()), [float(share) for share in differs.mean(axis=0)]
