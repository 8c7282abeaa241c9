"""Which ablation of the trainer best explains what the engine said."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poise.mismatch.ablations import Ablation
from poise.mismatch.forward import Forward

# A difference (rms) up to so many times that of rounding is rounding, ...
ROUNDING_MARGIN = 3
# ... and up to so many times may well be: where no ablation explains it, it is called so.
CLOSE_TO_ROUNDING = 10
# An explanation takes away at least this share of the squared difference ...
MIN_EXPLAINED = 0.5
# ... and leaves at most this share of what the next best one leaves.
MAX_OF_NEXT = 0.5
# A second cause is looked for where the first takes away at least so much, and more than rounding is left.
MIN_FIRST_CAUSE = 0.2

Score = Callable[[Forward], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One ablation: the ``rms`` difference to the engine, k3 (nats) and ``explained``, the share of the squared
    difference that it takes away; negative where it makes things worse."""

    name: str
    advice: str
    rms: float
    k3: float
    explained: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """``cause``: names of the ablations that explain the mismatch, together; empty where none does or none is needed.
    ``sentence``: the verdict in words. ``rounding``: what rounding alone does (rms, nats). ``trials``: best first."""

    sentence: str
    cause: tuple[str, ...]
    rms: float
    rounding: float
    trials: tuple[Trial, ...]


def trial(name: str, advice: str, ablated: NDArray[np.float64], base: float, engine: NDArray[np.float64]) -> Trial:
    """``base``: the mean squared difference without the ablation."""
    difference = ablated - engine
    # An ablation may call a token impossible: then it explains nothing.
    finite = np.where(np.isfinite(difference), difference, -1e3)
    squared = float(np.square(finite).mean())
    return Trial(
        name=name,
        advice=advice,
        rms=squared**0.5,
        k3=float((np.expm1(np.minimum(finite, 50.0)) - finite).mean()),
        explained=1 - squared / base,
    )


def ranked(trials: Sequence[Trial], rounding: float) -> list[Trial]:
    """Best first; of those that leave no more than rounding does, those given earlier first: the narrower ones."""
    return sorted(trials, key=lambda t: max(t.rms, ROUNDING_MARGIN * rounding))


def is_rounding(rms: float, rounding: float) -> bool:
    return rms <= ROUNDING_MARGIN * rounding


def verdict(trials: Sequence[Trial], *, rounding: float) -> tuple[str, tuple[str, ...]]:
    """(sentence, names of the ablations that explain the mismatch) from ``ranked`` trials."""
    best, others = trials[0], trials[1:]
    if best.explained < MIN_EXPLAINED:
        return (
            f"none of {len(trials)} ablations explains the mismatch; the nearest, {best.name}, takes away "
            f"{max(0.0, best.explained):.0%} of the squared difference",
            (),
        )
    floor = ROUNDING_MARGIN * rounding
    same = [t.name for t in others if max(best.rms, floor) ** 2 > MAX_OF_NEXT * max(t.rms, floor) ** 2]
    sentence = f"{best.name} explains {best.explained:.2%} of the squared difference: {best.advice}"
    if same:
        return f"{sentence} (not to be told apart here from: {', '.join(same)})", (best.name,)
    if others:
        sentence += f"; the next best, {others[0].name}, explains {max(0.0, others[0].explained):.0%}"
    return sentence, (best.name,)


def diagnose(
    forward: Forward,
    suspects: Sequence[Ablation],
    engine: NDArray[np.float64],
    score: Score,
    *,
    rounding: float,
    on_trial: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Tries every suspect on the trainer's side; where none explains the mismatch, those that can befall one layer
    alone, layer by layer; where one explains it in part, every other one beside it.

    ``score(forward)``: log-probs of the same tokens as ``engine``. ``rounding``: see ``jittered``.
    """
    base = float(np.square(score(forward) - engine).mean())
    everywhere = range(forward.model.config.num_layers)

    def tried(name: str, advice: str, changed: Forward) -> Trial:
        on_trial(name)
        return trial(name, advice, score(changed), base, engine)

    def result(sentence: str, cause: tuple[str, ...], trials: Sequence[Trial]) -> Diagnosis:
        return Diagnosis(sentence=sentence, cause=cause, rms=base**0.5, rounding=rounding, trials=tuple(trials))

    if is_rounding(base**0.5, rounding):
        sentence = f"no mismatch beyond rounding: {base**0.5:.2g} nats (rms); rounding alone makes {rounding:.2g}"
        return result(sentence, (), [])
    trials = ranked([tried(s.name, s.advice, s.apply(forward, everywhere)) for s in suspects], rounding)
    if trials[0].explained < MIN_EXPLAINED and len(everywhere) > 1:
        trials += [
            tried(f"{s.name}, layer {layer} only", s.advice, s.apply(forward, {layer}))
            for s in suspects
            if s.befalls_single_layers
            for layer in everywhere
        ]
        trials = ranked(trials, rounding)
    sentence, cause = verdict(trials, rounding=rounding)
    if not cause and base**0.5 <= CLOSE_TO_ROUNDING * rounding:
        sentence = (
            f"no mismatch clearly beyond rounding: {base**0.5:.2g} nats (rms); rounding alone makes {rounding:.2g}; "
            f"{sentence}"
        )
    best = trials[0]
    first = next((s for s in suspects if s.name == best.name), None)
    if first is None or best.explained < MIN_FIRST_CAUSE or is_rounding(best.rms, rounding):
        return result(sentence, cause, trials)
    beside = first.apply(forward, everywhere)
    others = {
        f"{best.name} + {s.name}": s for s in suspects if s is not first and not (s.is_rounding and first.is_rounding)
    }
    pairs = ranked(
        [
            tried(name, f"{best.advice}; and {other.advice}", other.apply(beside, everywhere))
            for name, other in others.items()
        ],
        rounding,
    )
    pair = pairs[0]
    if pair.explained >= MIN_EXPLAINED and pair.rms**2 <= MAX_OF_NEXT * best.rms**2:
        trials = [pair, *trials]
        sentence = (
            f"two causes: {pair.name} explain {pair.explained:.2%} of the squared difference, {best.name} alone "
            f"{best.explained:.0%}: {pair.advice}"
        )
        cause = (best.name, others[pair.name].name)
    return result(sentence, cause, trials)
