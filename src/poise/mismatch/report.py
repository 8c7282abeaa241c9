"""The report of ``poise mismatch``: what was measured, as tables and as JSON."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.console import Console
from poise.harmony import HarmonyTokenizer
from poise.mismatch.diagnosis import Diagnosis
from poise.mismatch.statistics import Summary, bands, route_differences, summary
from poise.mismatch.streams import Kind, token_kinds
from poise.types import Batch, Trajectory

NUM_WORST = 8
CONTEXT_TOKENS = 16
NUM_TRIALS = 10


@dataclass(frozen=True, kw_only=True)
class WorstToken:
    """One token, where it stands, and the text before it. Log-probs in nats."""

    stream: str
    position: int
    kind: str
    context: str
    token: str
    trainer: float
    engine: float


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Over ``rows`` inputs whose experts the engine reported: the share whose set of experts differs, by layer, and the
    difference of log-probs that is left when the trainer takes the engine's experts."""

    rows: int
    differing: Sequence[float]
    replayed: Summary


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``poise mismatch`` found. Summaries are of trainer - engine."""

    checkpoint: str
    engine: str
    num_streams: int
    temperature: float
    kinds: dict[str, Summary]
    bands: dict[str, Summary]
    worst: Sequence[WorstToken]
    routes: Routes | None
    diagnosis: Diagnosis

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The compared tokens, one after the other: arrays [N]. ``streams``: index of each one's stream; ``position_ids``:
    of the input that predicts it, so it is token ``position_ids + 1`` of its stream."""

    streams: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    kinds: NDArray[np.str_]
    engine: NDArray[np.float64]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], batches: Sequence[Batch], tokenizer: HarmonyTokenizer) -> "Tokens":
        # Row t of a stream speaks of its token t + 1, in a batch and here alike.
        mask = np.concatenate([batch.response_mask.numpy() for batch in batches])
        streams = [np.full(len(t.token_ids) - 1, index) for index, t in enumerate(trajectories)]
        kinds = [np.array(token_kinds(t.token_ids, tokenizer))[1:] for t in trajectories]
        return cls(
            streams=np.concatenate(streams)[mask],
            position_ids=np.concatenate([batch.position_ids.numpy() for batch in batches])[mask],
            kinds=np.concatenate(kinds)[mask],
            engine=np.concatenate([batch.rollout_log_probs.double().numpy() for batch in batches])[mask],
        )


def kind_summaries(tokens: Tokens, trainer: NDArray[np.float64]) -> dict[str, Summary]:
    found = {"all": summary(trainer, tokens.engine)}
    for kind in Kind:
        if (chosen := tokens.kinds == kind).any():
            found[kind.value] = summary(trainer[chosen], tokens.engine[chosen])
    return found


def band_summaries(tokens: Tokens, trainer: NDArray[np.float64], window: int | None) -> dict[str, Summary]:
    return {
        name: summary(trainer[chosen], tokens.engine[chosen]) for name, chosen in bands(tokens.position_ids, window)
    }


def worst_tokens(
    tokens: Tokens, trainer: NDArray[np.float64], trajectories: Sequence[Trajectory], tokenizer: HarmonyTokenizer
) -> list[WorstToken]:
    """Those with the largest differences, largest first."""
    order = np.argsort(-np.abs(trainer - tokens.engine), kind="stable")[:NUM_WORST]
    found = []
    for index in order.tolist():
        trajectory = trajectories[int(tokens.streams[index])]
        position = int(tokens.position_ids[index]) + 1
        ids = trajectory.token_ids
        found.append(
            WorstToken(
                stream=trajectory.episode_id,
                position=position,
                kind=str(tokens.kinds[index]),
                context=tokenizer.decode(ids[max(0, position - CONTEXT_TOKENS) : position]),
                token=tokenizer.decode([ids[position]]),
                trainer=float(trainer[index]),
                engine=float(tokens.engine[index]),
            )
        )
    return found


def compared_routes(
    batches: Sequence[Batch], trainer_routes: Sequence[NDArray[np.int16]]
) -> tuple[int, Sequence[float]]:
    engine_routes = [batch.routes.numpy() for batch in batches if batch.routes is not None]
    return route_differences(np.concatenate(trainer_routes), np.concatenate(engine_routes))


# --- tables ---

_COLUMNS = ["", "tokens", "mean |d|", "p99", "max", "k1", "k3", "|d| > 0.1", "Pearson"]


def _cells(name: str, s: Summary) -> list[str]:
    pearson = "-" if s.pearson is None else f"{s.pearson:.6f}"
    numbers = [f"{value:.1e}" for value in (s.mean, s.p99, s.max, s.k1, s.k3)]
    return [name, str(s.num_tokens), *numbers, f"{s.share_large:.2%}", pearson]


def print_report(report: Report, console: Console) -> None:
    console.line(
        f"\n{report.num_streams} streams of {report.checkpoint}; d = trainer - engine ({report.engine}), log-probs in "
        f"nats at temperature {report.temperature:g}"
    )
    console.table("by kind of message", _COLUMNS, [_cells(name, s) for name, s in report.kinds.items()])
    console.table("by position of the token's input", _COLUMNS, [_cells(name, s) for name, s in report.bands.items()])
    console.table(
        "worst tokens",
        ["stream", "position", "kind", "d", "trainer", "engine", "token", "after"],
        [
            [w.stream, str(w.position), w.kind, f"{w.trainer - w.engine:+.1e}", f"{w.trainer:.3f}", f"{w.engine:.3f}",
             repr(w.token), repr(w.context)]
            for w in report.worst
        ],
    )  # fmt: skip
    routes = report.routes
    if routes is None:
        console.line("experts: the engine reports none")
    else:
        console.table(
            f"experts: share of {routes.rows} inputs whose set differs",
            [f"layer {layer}" for layer in range(len(routes.differing))],
            [[f"{share:.2%}" for share in routes.differing]],
        )
        console.line(
            f"with the engine's experts replayed: mean |d| {routes.replayed.mean:.1e}, max {routes.replayed.max:.1e}"
        )
    _print_diagnosis(report.diagnosis, console)


def _print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    if diagnosis.trials:
        console.table(
            "if the trainer did as well: what is left of the difference",
            ["", "rms d", "k3", "explained"],
            [
                ["(as it is)", f"{diagnosis.rms:.1e}", "", ""],
                *(
                    [t.name, f"{t.rms:.1e}", f"{t.k3:.1e}", f"{t.explained:.2%}" if t.explained > 0 else "no"]
                    for t in diagnosis.trials[:NUM_TRIALS]
                ),
            ],
        )
    console.line(f"diagnosis: {diagnosis.sentence}")
