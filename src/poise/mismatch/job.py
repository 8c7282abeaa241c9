"""``poise mismatch``, whole: episodes or a file of tokens through engine and trainer, then the report."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poise.assembly import Parts, assemble
from poise.config import Config, ConfigError, RunError
from poise.console import Console
from poise.engine import EmbeddedEngine
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
from poise.types import Action, Batch, Policy, Trajectory, Turn

MISMATCH_STREAM = 3  # part of a seed: keeps these episodes' numbers apart from training's and evaluation's
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
        if self.engine != "embedded":
            raise ConfigError(f'--engine must be "embedded" or the URL of a server, got {self.engine!r}')
        if self.engine_checkpoint is not None and self.engine != "embedded":
            raise ConfigError("--engine-checkpoint belongs to --engine embedded: a server has loaded its own")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``sample`` is a ``Policy``; ``score`` says what it would have said of an action that is given."""

    name: str
    sample: Policy
    score: Callable[..., Awaitable[Action]]


def mismatch_job(config: Config, console: Console, options: Options) -> Report:
    """Compares, prints the tables, writes ``options.json``. Raises ConfigError for what cannot be loaded or read."""
    parts = assemble(config, console, trains=False)
    previous = None
    if options.previous is not None:
        previous = _other_model(parts.model, options.previous, "--previous")
    with Interrupt() as interrupt:
        engine = embedded(parts, config, options)
        trajectories = interrupt.run(streams_of(engine, parts, config, options))
    report = compare(trajectories, parts, config, console, engine_name=engine.name, previous=previous)
    print_report(report, console)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return report


def embedded(parts: Parts, config: Config, options: Options) -> Engine:
    engine, name = parts.engine, "embedded"
    if options.engine_checkpoint is not None:
        model = _other_model(parts.model, options.engine_checkpoint, "--engine-checkpoint")
        engine = EmbeddedEngine(
            model,
            stop_ids=engine.stop_ids,
            return_id=engine.return_id,
            num_slots=config.rollout.num_slots,
            max_context_tokens=config.rollout.max_context_tokens,
            max_prefill_tokens=config.rollout.max_prefill_tokens,
            temperature=config.rollout.temperature,
        )
        name = f"embedded, on {options.engine_checkpoint}"
    return Engine(name=name, sample=engine, score=engine.score)


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


async def streams_of(engine: Engine, parts: Parts, config: Config, options: Options) -> list[Trajectory]:
    """Streams with the engine's log-probs: sampled episodes, or those of a file."""
    if options.tokens is not None:
        streams = read_streams(options.tokens, vocab_size=parts.model.config.vocab_size)
        return list(await asyncio.gather(*(_replayed(stream, engine, config) for stream in streams)))
    evaluation = await evaluate(
        engine.sample,
        parts.renderer,
        parts.task,
        num_problems=options.episodes,
        limits=parts.limits,
        seed=derive_seed(config.run.seed, MISMATCH_STREAM),
        max_concurrent=config.rollout.num_slots,
    )
    found = [t for episode in evaluation.episodes for t in episode if t.is_trainable]
    if not found:
        raise RunError("no episode has a sampled token: the environment failed each time, see the warnings above")
    return found


async def _replayed(stream: Trajectory, engine: Engine, config: Config) -> Trajectory:
    if (length := len(stream.token_ids)) > config.rollout.max_context_tokens:
        raise ConfigError(
            f"--tokens: {stream.episode_id} has {length} tokens, rollout.max_context_tokens is "
            f"{config.rollout.max_context_tokens}"
        )
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


def compare(
    trajectories: Sequence[Trajectory],
    parts: Parts,
    config: Config,
    console: Console,
    *,
    engine_name: str,
    previous: GptOss | None = None,
) -> Report:
    """Everything after the engine has spoken."""
    batches = batches_of(trajectories)
    tokens = Tokens.of(trajectories, batches, parts.tokenizer)
    forward = Forward(model=parts.model, temperature=config.rollout.temperature)
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
        checkpoint=config.model.path or "random weights",
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
