"""``poise mismatch``, whole: episodes or a file of tokens through engine and trainer, then the report."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poise.assembly import Parts, assemble, embedded_engine
from poise.config import Config, ConfigError, RunError
from poise.console import Console
from poise.engine.http import EngineError, Servers
from poise.engine.vllm import VllmEngine
from poise.evaluate import evaluate
from poise.interrupt import Interrupt
from poise.mismatch.ablations import ablations
from poise.mismatch.diagnosis import diagnose
from poise.mismatch.forward import Forward, batches_of, log_probs
from poise.mismatch.report import (
    Report,
    Routes,
    Tokens,
    band_summaries,
    compared_routes,
    kind_summaries,
    print_report,
    worst_tokens,
)
from poise.mismatch.rounding import jittered
from poise.mismatch.statistics import summary
from poise.mismatch.streams import read_streams
from poise.model import GptOss, load_model
from poise.seeding import derive_seed
from poise.train.replay import replay_route
from poise.types import Batch, Policy, Trajectory, Turn

MISMATCH_STREAM = 3  # part of a seed: keeps these episodes' numbers apart from training's and evaluation's
MAX_WAIT_S = 60.0  # for a server that does not answer
JITTERS = 3  # rounding is the largest difference of so many perturbed forwards


@dataclass(frozen=True, kw_only=True)
class Options:
    """``engine``: "embedded" or a server's URL. ``engine_checkpoint``: what the embedded engine loads instead of the
    trainer's checkpoint. ``tokens``: a file of streams instead of ``episodes`` sampled ones. ``previous``: a checkpoint
    from before the last sync. ``json``: a file for the report."""

    engine: str
    engine_checkpoint: Path | None = None
    episodes: int = 16
    tokens: Path | None = None
    previous: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.engine != "embedded" and not self.engine.startswith(("http://", "https://")):
            raise ConfigError(f'--engine must be "embedded" or the URL of a server, got {self.engine!r}')
        if self.engine_checkpoint is not None and self.engine != "embedded":
            raise ConfigError("--engine-checkpoint belongs to --engine embedded: a server has loaded its own")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``sample`` is a ``Policy`` at the configured temperature; ``replay`` gives a stream the log-probs that the engine
    has of it, at ``replay_temperature``."""

    name: str
    sample: Policy
    replay: Callable[[Trajectory], Awaitable[Trajectory]]
    replay_temperature: float
    close: Callable[[], Awaitable[None]] | None = None


def mismatch_job(config: Config, console: Console, options: Options) -> Report:
    """Compares, prints the tables, writes ``options.json``. Raises ConfigError for what cannot be loaded or read."""
    parts = assemble(config, console, trains=False)
    previous = None
    if options.previous is not None:
        previous = _other_model(parts.model, options.previous, "--previous")
    with Interrupt() as interrupt:
        trajectories, engine = interrupt.run(streams_of(parts, config, options))
    is_replayed = options.tokens is not None
    report = compare(
        trajectories,
        parts,
        console,
        checkpoint=str(config.model.path),
        engine_name=engine.name,
        temperature=engine.replay_temperature if is_replayed else config.rollout.temperature,
        previous=previous,
    )
    print_report(report, console)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return report


def embedded(parts: Parts, config: Config, options: Options) -> Engine:
    model, name = parts.model, "embedded"
    if options.engine_checkpoint is not None:
        model = _other_model(parts.model, options.engine_checkpoint, "--engine-checkpoint")
        name = f"embedded, on {options.engine_checkpoint}"
    engine = embedded_engine(model, parts.tokenizer, config)

    async def replay(stream: Trajectory) -> Trajectory:
        """Turn by turn, so that observations are prefilled and actions decoded, as in a rollout."""
        ids: list[int] = []
        turns: list[Turn] = []
        for turn in stream.turns:
            ids += turn.observation_ids
            action = await engine.score(ids, turn.action_ids, episode_id=stream.episode_id)
            ids += turn.action_ids
            routes = action.routes
            if routes is not None:
                routes = routes[-len(turn.observation_ids) - len(turn.action_ids) :]
                if not turns:  # nothing predicts the first token of a stream
                    routes = np.concatenate([np.full_like(routes[:1], -1), routes])
            turns.append(replace(turn, rollout_log_probs=action.log_probs, routes=routes))
        return replace(stream, turns=tuple(turns))

    return Engine(name=name, sample=engine, replay=replay, replay_temperature=config.rollout.temperature)


async def served(parts: Parts, config: Config, options: Options) -> Engine:
    """A server of vLLM's token endpoint; with the experts where it reports them. Raises EngineError."""
    servers = Servers([options.engine], max_wait_s=MAX_WAIT_S)
    await servers.wait_until_healthy(options.engine)
    shape = parts.model.config.num_layers, parts.model.config.experts_per_token

    def engine_of(routes_shape: tuple[int, int] | None) -> VllmEngine:
        return VllmEngine(
            servers,
            stop_ids=parts.renderer.stop_ids,
            vocab_size=parts.model.config.vocab_size,
            temperature=config.rollout.temperature,
            routes_shape=routes_shape,
        )

    engine = engine_of(shape)
    try:
        await engine([parts.tokenizer.start], episode_id="probe", seed=0, max_tokens=1)
    except EngineError:  # the same again without experts: any other error then comes to light
        engine = engine_of(None)

    async def replay(stream: Trajectory) -> Trajectory:
        ids = stream.token_ids
        log_probs = [0.0, *await engine.score(ids)]
        turns, end = list[Turn](), 0
        for turn in stream.turns:
            start = end + len(turn.observation_ids)
            end = start + len(turn.action_ids)
            turns.append(replace(turn, rollout_log_probs=tuple(log_probs[start:end])))
        return replace(stream, turns=tuple(turns))

    # Servers score prompts by the raw logits.
    return Engine(name=options.engine, sample=engine, replay=replay, replay_temperature=1.0, close=engine.close)


def _other_model(model: GptOss, folder: Path, option: str) -> GptOss:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{option} {folder} has no config.json: not a checkpoint folder")
    weight = model.lm_head.weight
    try:
        other = load_model(folder, dtype=weight.dtype, device=weight.device)
    except ValueError as error:
        raise ConfigError(f"{option} {folder}: {error}") from error
    for name, parameter in model.named_parameters():
        if other.get_parameter(name).shape != parameter.shape:
            raise ConfigError(f"{option} {folder} is another model: its {name} has another shape")
    return other


async def streams_of(parts: Parts, config: Config, options: Options) -> tuple[list[Trajectory], Engine]:
    """Streams with the engine's log-probs: sampled episodes, or those of a file."""
    is_embedded = options.engine == "embedded"
    engine = embedded(parts, config, options) if is_embedded else await served(parts, config, options)
    try:
        if options.tokens is not None:
            streams = read_streams(options.tokens, vocab_size=parts.model.config.vocab_size)
            for stream in streams:
                if len(stream.token_ids) > config.rollout.max_context_tokens:
                    raise ConfigError(
                        f"--tokens: stream {stream.episode_id} has {len(stream.token_ids)} tokens, above "
                        f"rollout.max_context_tokens ({config.rollout.max_context_tokens})"
                    )
            return list(await asyncio.gather(*(engine.replay(stream) for stream in streams))), engine
        evaluation = await evaluate(
            engine.sample,
            parts.renderer,
            parts.task,
            num_problems=options.episodes,
            limits=parts.limits,
            seed=derive_seed(config.run.seed, MISMATCH_STREAM),
            max_concurrent=config.rollout.num_slots,
        )
    finally:
        if engine.close is not None:
            await engine.close()
    found = [t for episode in evaluation.episodes for t in episode if t.is_trainable]
    if not found:
        raise RunError("no episode has a sampled token: the environment failed each time, see the warnings above")
    return found, engine


def compare(
    trajectories: Sequence[Trajectory],
    parts: Parts,
    console: Console,
    *,
    checkpoint: str,
    engine_name: str,
    temperature: float,
    previous: GptOss | None = None,
) -> Report:
    """Everything after the engine has spoken."""
    batches = batches_of(trajectories)
    tokens = Tokens.of(trajectories, batches, parts.tokenizer)
    forward = Forward(model=parts.model, temperature=temperature)
    recorded: list[NDArray[np.int16]] = []
    trainer = log_probs(forward, batches, recorded)
    moved = [log_probs(jittered(forward, seed=seed), batches) - trainer for seed in range(JITTERS)]
    suspects = ablations(forward, previous)
    with console.bar("ablations", None) as bar:
        diagnosis = diagnose(
            forward,
            suspects,
            tokens.engine,
            lambda changed: log_probs(changed, batches),
            rounding=max(float(np.sqrt(np.square(d).mean())) for d in moved),
            on_trial=bar.advance,
        )
    window = next((w for w in parts.model.config.windows if w is not None), None)
    return Report(
        checkpoint=checkpoint,
        engine=engine_name,
        num_streams=len(trajectories),
        temperature=forward.temperature,
        kinds=kind_summaries(tokens, trainer),
        bands=band_summaries(tokens, trainer, window),
        worst=worst_tokens(tokens, trainer, trajectories, parts.tokenizer),
        routes=_routes(forward, batches, recorded, tokens.engine),
        diagnosis=diagnosis,
    )


def _routes(
    forward: Forward, batches: Sequence[Batch], recorded: Sequence[NDArray[np.int16]], engine: NDArray[np.float64]
) -> Routes | None:
    if any(batch.routes is None for batch in batches):
        return None
    rows, differing = compared_routes(batches, recorded)
    if not rows:
        return None

    def replayed(batch: Batch) -> NDArray[np.float64]:
        assert batch.routes is not None
        route = replay_route(batch.routes.to(forward.model.lm_head.weight.device))
        return log_probs(replace(forward, route=lambda own: route), [batch])

    log_p = np.concatenate([replayed(batch) for batch in batches])
    return Routes(rows=rows, differing=differing, replayed=summary(log_p, engine))
