"""Proof that the weights arrived: a few fixed sequences, scored by the server and by the trainer itself.

A server that keeps some old parameters answers every request as before, only with another policy's tokens. After each
update it is asked for the log-probabilities of sequences that pass through every part of the model; where they are not
the trainer's, the run stops and ``poise.train.diagnosis`` says which parameters look stale.
"""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.config import RunError
from poise.engine.http import FAILURES
from poise.model import GptOss
from poise.model.gpt_oss import packed_attend, top_k_route
from poise.ops.log_probs import token_log_probs
from poise.parallel import ALONE, Mesh, held_part, led, put_away
from poise.train.diagnosis import Diagnosis, Older, diagnose
from poise.train.replay import recording_route

NUM_CANDIDATES = 24
# Mean difference of log-probs, nats, that is arithmetic and not another policy, by the server's type. float32: 20 times
# what is seen on the CPU. bfloat16: there a token now and then takes another expert, so single tokens say nothing.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 0.1}
Score = Callable[[Sequence[int]], Awaitable[list[float]]]


class CanaryError(RunError):
    """The server's policy is not the trainer's. ``diagnosis`` says what explains the difference."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


@dataclass(frozen=True, kw_only=True)
class Canary:
    """``sequences`` of token ids. ``unreached``: experts, as (layer, expert), that no token of them is routed to: if
    those alone are stale it stays unseen, until the router sends tokens there."""

    sequences: tuple[tuple[int, ...], ...]
    unreached: tuple[tuple[int, int], ...]


@torch.no_grad()
def choose_canary(model: GptOss, *, seed: int, max_tokens: int, num_sequences: int = 6, mesh: Mesh = ALONE) -> Canary:
    """Sequences that pass through as many experts as possible, and reach beyond the sliding window.

    Random ids spread over the embedding, the head and the experts; the first tokens of a sequence see few keys, where
    the sinks weigh most. Of ``NUM_CANDIDATES`` the one that reaches most experts not reached yet is taken, and so on.
    ``max_tokens``: what the server can hold. On a mesh all ranks call it, and have the same.
    """
    config = model.config
    length = min(max_tokens - 1, config.sliding_window + 64)
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(config.vocab_size, (NUM_CANDIDATES, length), generator=generator).tolist()
    reached = mesh.gather_from_all(_experts_of(model, candidates, mesh))[0]
    put_away(model)  # an optimizer that is made next must find the shards
    missing = {(layer, expert) for layer in range(config.num_layers) for expert in range(config.num_experts)}
    chosen: list[int] = []
    while len(chosen) < num_sequences:
        best = max((i for i in range(NUM_CANDIDATES) if i not in chosen), key=lambda i: len(reached[i] & missing))
        chosen.append(best)
        missing -= reached[best]
    return Canary(sequences=tuple(tuple(candidates[i]) for i in chosen), unreached=tuple(sorted(missing)))


@torch.no_grad()
def trainer_scores(model: GptOss, canary: Canary, mesh: Mesh = ALONE) -> list[Tensor]:
    """For each sequence the log-probs of its tokens but the first, at temperature 1, float64 [n - 1] on the CPU.

    On a mesh all ranks call it: each computes all rows with the parameters that they gather block by block, whatever
    the mesh splits in training. All return the numbers of the first, on which they then decide alike.
    """
    targets = [token for sequence in canary.sequences for token in sequence[1:]]
    hidden = _hidden(model, [sequence[:-1] for sequence in canary.sequences], [], mesh)
    log_probs, _ = token_log_probs(hidden, model.lm_head.weight, torch.tensor(targets, device=hidden.device))
    put_away(model)
    scores = list(log_probs.double().cpu().split([len(sequence) - 1 for sequence in canary.sequences]))
    return mesh.gather_from_all(scores)[0]


async def verify(
    canary: Canary,
    model: GptOss,
    score: Score,
    *,
    tolerance: float,
    older: Mapping[str, Older],
    where: str,
    thorough: bool = False,
    mesh: Mesh = ALONE,
    mine: Sequence[Tensor] | None = None,
) -> float:
    """Mean difference between the server's scores and the trainer's, nats. Raises CanaryError above ``tolerance``.

    ``score(token_ids)``: the server's log-probs of tokens 1 .. n-1. ``older``: weights that the server may have kept,
    by a name to call them ("of the update before"); those of another model, or that cannot be read, count for nothing,
    and none is read where all is well. ``where``: the server, for the message. ``thorough``: also raises
    within the tolerance where older parameters explain the scores better: finds what half types would hide, and takes
    a few forward passes per layer. ``mine``: the trainer's scores, where they are known. On a mesh all ranks call it:
    the first asks the server, and what all raise is the same.
    """
    theirs = await led(mesh, lambda: scores_of(score, canary), carries=FAILURES)
    mine = trainer_scores(model, canary, mesh) if mine is None else mine
    mean, largest = difference(theirs, mine)
    if mean <= tolerance and not thorough:
        return mean
    readable = {name: value for name, value in older.items() if all(mesh.gather_from_all(_is_like(value, model, mesh)))}
    diagnosis = diagnose(
        model, lambda: trainer_scores(model, canary, mesh), theirs, older=readable, tolerance=tolerance, mesh=mesh
    )
    if mean <= tolerance and not diagnosis.groups:
        return mean
    raise CanaryError(
        f"{where} does not have the trainer's weights: its log-probs differ by {mean:.3g} nats, up to {largest:.3g}, "
        f"where {tolerance:g} is arithmetic; {diagnosis.sentence()}",
        diagnosis,
    )


async def scores_of(score: Score, canary: Canary) -> list[Tensor]:
    """A server's, of each sequence, float64."""
    return [torch.tensor(await score(sequence), dtype=torch.float64) for sequence in canary.sequences]


def difference(theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> tuple[float, float]:
    """(mean, largest) distance between two sets of scores, nats."""
    differences = torch.cat([(a - b).abs() for a, b in zip(theirs, mine, strict=True)])
    return float(differences.mean()), float(differences.max())


def _is_like(older: Older, model: GptOss, mesh: Mesh) -> bool:
    """Whether these are weights of such a model that can be read here; a server elsewhere may have its own files."""
    try:
        return all(
            tuple(older(name).shape) == tuple(held_part(name, parameter, mesh).shape)
            for name, parameter in model.named_parameters()
        )
    except (OSError, KeyError):
        return False


def _experts_of(model: GptOss, sequences: Sequence[Sequence[int]], mesh: Mesh) -> list[set[tuple[int, int]]]:
    """Which experts, as (layer, expert), each sequence reaches."""
    recorded: list[Tensor] = []
    _hidden(model, sequences, recorded, mesh)
    reached = [set[tuple[int, int]]() for _ in sequences]
    for layer, routes in enumerate(recorded):
        parts = routes.split([len(sequence) for sequence in sequences])
        for found, part in zip(reached, parts, strict=True):
            found |= {(layer, expert) for expert in part.unique().tolist()}
    return reached


def _hidden(model: GptOss, sequences: Sequence[Sequence[int]], recorded: list[Tensor], mesh: Mesh) -> Tensor:
    """[tokens, D] of the packed sequences; the experts of each layer are appended to ``recorded``."""
    device, lengths = mesh.device or model.lm_head.weight.device, [len(sequence) for sequence in sequences]
    ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    route = recording_route(top_k_route(model.config.experts_per_token), recorded)
    return model(ids, positions, packed_attend(cu_seqlens), route)
