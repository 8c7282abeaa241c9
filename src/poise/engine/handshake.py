"""Questions to a server before it may sample: each reason not to trust it is found here, in seconds, and named."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from poise.engine.answers import PLACEHOLDER
from poise.engine.http import EngineError, Outage
from poise.types import Action

NUM_TOP = 5  # every server allows so many, and two are enough to see a temperature
NUM_PROBES = 4
NUM_PROBE_TOKENS = 16
COLD = 0.5  # the probes' second temperature: it doubles the distances between log-probs
# Largest mean shift of sampled against scored log-probs at temperature 1, nats. Half types shift single tokens by a
# tenth, but not all of them the same way; a nucleus of 0.95 shifts each by up to 0.05.
MAX_SHIFT = 0.03
GAP_TOLERANCE = 0.1  # of a doubled distance


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """An action and, per token, log-probs of the most probable tokens by their names."""

    action: Action
    top: list[dict[str, float]]


class Sample(Protocol):
    async def __call__(
        self, token_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float, num_top: int
    ) -> Sampled: ...


@dataclass(frozen=True, kw_only=True)
class TokenServer:
    """One server as the handshake sees it. ``processed_hint``: how to start it with log-probs of what was sampled from.

    ``score``: log-probs of tokens 1 .. n-1 at temperature 1. ``has_token``: whether an id is in its vocabulary.
    ``context``: the tokens it can hold, None where it does not say. ``sample`` and ``score`` raise EngineError
    themselves for missing ids, unequal counts, and log-probs that are missing or not finite.
    """

    url: str
    sample: Sample
    score: Callable[[Sequence[int]], Awaitable[list[float]]]
    has_token: Callable[[int], Awaitable[bool]]
    context: Callable[[], Awaitable[int | None]]
    vocab_size: int
    max_context_tokens: int
    processed_hint: str


async def shake_hands(server: TokenServer, *, stop_ids: Collection[int]) -> None:
    """Raises EngineError, with the reason, where the trainer could not reproduce what this server samples."""
    try:
        await _require_vocabulary(server)
        await _require_context(server)
        warm, scores = [], []
        # From several prompts, none of them a stop id, so that a server of random weights is not judged by one row.
        prompts = [_prompt(server, stop_ids, number) for number in range(NUM_PROBES)]
        for number, prompt in enumerate(prompts):
            sampled = await server.sample(
                prompt, seed=number, max_tokens=NUM_PROBE_TOKENS, temperature=1.0, num_top=NUM_TOP
            )
            warm.append(sampled)
            scores.append((await server.score([*prompt, *sampled.action.token_ids]))[len(prompt) - 1 :])
        _require_sampled_distribution(server, warm, scores)
        for prompt, first in zip(prompts, warm, strict=True):
            cold = await server.sample(prompt, seed=0, max_tokens=1, temperature=COLD, num_top=NUM_TOP)
            _require_temperature(server, first.top[:1], cold.top[:1])
    except Outage as error:
        raise EngineError(f"the handshake with {server.url} failed: {error}") from error


async def _require_vocabulary(server: TokenServer) -> None:
    size = server.vocab_size
    if not await server.has_token(size - 1):
        raise EngineError(
            f"{server.url} has another vocabulary: it does not know token {size - 1}, the last of the policy's {size}"
        )
    if await server.has_token(size):
        raise EngineError(f"{server.url} has another vocabulary: it takes token {size}, and the policy has only {size}")


async def _require_context(server: TokenServer) -> None:
    context = await server.context()
    if context is not None and context < server.max_context_tokens:
        raise EngineError(
            f"{server.url} holds {context} tokens, and rollout.max_context_tokens is {server.max_context_tokens}"
        )


def _prompt(server: TokenServer, stop_ids: Collection[int], number: int) -> list[int]:
    ids = [i for i in range(server.vocab_size) if i not in stop_ids][: 8 * NUM_PROBES]
    return [ids[(8 * number + i) % len(ids)] for i in range(8)]


def _require_sampled_distribution(server: TokenServer, sampled: Sequence[Sampled], scores: list[list[float]]) -> None:
    """At temperature 1 and untruncated, sampling's log-probs are those of scoring; a truncated rest is renormalized."""
    pairs = [
        (log_prob, score)
        for one, row in zip(sampled, scores, strict=True)
        for log_prob, score in zip(one.action.log_probs, row, strict=True)
    ]
    shift = sum(log_prob - score for log_prob, score in pairs) / len(pairs)
    is_cut = any(value <= PLACEHOLDER for one in sampled for row in one.top for value in row.values())
    if is_cut or shift > MAX_SHIFT:
        what = "gives likely tokens no probability at all" if is_cut else f"samples {shift:.3f} nats above its scores"
        raise EngineError(
            f"{server.url} {what} although top-p and top-k were switched off: its generation_config.json or its own "
            "settings truncate the distribution (vLLM: --generation-config vllm)"
        )
    if abs(shift) > MAX_SHIFT:
        raise EngineError(
            f"{server.url} gives sampled tokens log-probs that lie {-shift:.3f} nats below its own scores of the same "
            f"tokens: they are not of the distribution sampled from; {server.processed_hint}"
        )


def _require_temperature(server: TokenServer, warm: list[dict[str, float]], cold: list[dict[str, float]]) -> None:
    """Distances between log-probs are (x_i - x_j) / temperature: at half the temperature they double."""
    for before, after in zip(warm, cold, strict=True):
        shared = sorted(before.keys() & after.keys(), key=lambda name: before[name])
        if len(shared) < 2:
            raise EngineError(
                f"{server.url} does not return the {NUM_TOP} most probable tokens that the handshake asks for"
            )
        gap, cold_gap = (one[shared[-1]] - one[shared[0]] for one in (before, after))
        if abs(cold_gap * COLD - gap) > max(GAP_TOLERANCE * gap, 0.02):
            raise EngineError(
                f"{server.url} reports log-probs that are not of the distribution sampled from: at temperature {COLD} "
                f"two tokens are {cold_gap:.4f} nats apart, where {gap / COLD:.4f} are right; {server.processed_hint}"
            )
