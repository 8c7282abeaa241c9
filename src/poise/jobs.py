"""The commands, whole: train, supervised warm start, evaluate."""

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from poise.assembly import Parts, assemble, compute_type, device_of
from poise.config import Config, ConfigError
from poise.console import Console, metric_rows, step_line
from poise.engine import EngineError
from poise.evaluate import Evaluation, held_out_episodes
from poise.files import write_whole
from poise.interrupt import Interrupt, Interrupted
from poise.loop import Rollout, interleaved, train
from poise.metrics import MetricsWriter
from poise.model import GptOss
from poise.parallel import Mesh, frozen_copy, settled, together
from poise.parallel.launch import joined
from poise.runfolder import CONFIG_FILE, create_run_folder, record_sandbox, write_config, write_trajectories
from poise.sampling import rollouts
from poise.seeding import derive_seed
from poise.session import connected, interrupt_of, kept_by, push_before_sampling, push_weights
from poise.train.canary import CanaryError
from poise.train.checkpoint import (
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    read_state,
    save_checkpoint,
)
from poise.train.critic import make_critic
from poise.train.optimizer import warm_start_schedule
from poise.train.remote import RemoteEngine
from poise.train.scoring import RolloutError
from poise.train.sharded import Saving
from poise.train.trainer import Trainer
from poise.train.weights import SyncError
from poise.types import Trajectory
from poise.warmstart import demonstrations, warm_start

EVALUATION_STREAM = 1  # part of a seed: keeps evaluation's numbers apart from training's
EVALUATIONS_FILE = "evaluations.jsonl"


class Run:
    """One training run and its folder: writes what happened, saves what is needed to go on."""

    def __init__(self, config: Config, parts: Parts, console: Console, folder: Path) -> None:
        self.config, self.parts, self.console, self.folder = config, parts, console, folder
        self.mesh = parts.mesh
        self.interrupt = interrupt_of(parts.mesh, in_background=config.rollout.max_staleness > 0)
        self.writer: MetricsWriter | None = None
        self.saving = Saving()

    # The steps of reinforcement learning count from 1, so those of the warm start end at 0: one axis for both.
    def warm_start_step(self, step: int) -> int:
        return step - self.config.warm_start.steps

    def save(self, trainer: Trainer, phase: str, step: int, *, waits: bool = False) -> None:
        """``waits``: until it is on the disk, which on a mesh may take a while longer."""
        self.saving.wait()
        self.saving = save_checkpoint(
            checkpoint_folder(self.folder, step),
            model=self.parts.model,
            optimizer=trainer.optimizer,
            state={"phase": phase, "step": step},
            save_tokenizer=self.parts.tokenizer.save,
            mesh=self.mesh,
            critic=trainer.critic,
        )
        if waits:
            self.saving.wait()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.writer is not None:
            self.writer.write(step, metrics)

    @contextmanager
    def writing(self, first_step: int) -> Iterator[None]:
        """Metrics go to the run's folder, from the first rank alone."""
        if not self.mesh.is_first:
            yield
            return
        with MetricsWriter(self.folder, self.config.run.trackers, first_step=first_step) as self.writer:
            yield

    def warm_start(self, trainer: Trainer) -> None:
        parts, total = self.parts, self.config.warm_start.steps
        first = self.warm_start_step(trainer.steps_done + 1)
        with (
            self.writing(first),
            self.console.bar("warm start", total - trainer.steps_done) as bar,
        ):

            def on_step(step: int, metrics: Mapping[str, float]) -> None:
                self.write(self.warm_start_step(step), {f"warm_start_{k}": v for k, v in metrics.items()})
                bar.advance(f"loss {metrics['loss']:.3f}  {metrics['tokens_per_s']:.0f} tok/s")
                if step % 50 == 0 or step == total:
                    self.console.line(
                        f"warm start {step}/{total}  loss {metrics['loss']:.4f}  entropy {metrics['entropy']:.3f}"
                        f"  grad {metrics['grad_norm']:.2f}  {metrics['tokens_per_s']:.0f} tok/s"
                    )
                if step % self.config.run.save_every == 0:
                    self.save(trainer, "warm_start", 0)
                self.interrupt.check()

            try:
                warm_start(trainer, parts.renderer, parts.task, self.config, on_step=on_step)
            except Interrupted:
                self.save(trainer, "warm_start", 0, waits=True)
                raise

    def evaluate(self, step: int) -> Evaluation:
        evaluation = evaluate_parts(self.parts, self.config, self.console, self.interrupt)
        self.new_policy_version(step)  # leave no trace in the next rollout
        if not self.mesh.is_first:
            return evaluation
        line = {"step": step, "num_problems": evaluation.num_problems, "metrics": evaluation.metrics}
        # A resumed run may come by here a second time.
        lines = [other for other in self.evaluations() if other["step"] != step] + [line]
        write_whole(self.folder / EVALUATIONS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
        self.console.line(f"held out after step {step}: reward {evaluation.metrics['reward_mean']:.3f}")
        return evaluation

    def new_policy_version(self, version: int) -> None:
        """The trainer's weights are those of ``version``: the engine samples with them from now on."""
        engine, is_ahead = self.parts.engine, self.config.rollout.max_staleness > 0

        async def tell() -> None:
            if isinstance(engine, RemoteEngine):
                engine.new_policy_version(version)
            else:
                engine.new_policy_version(version, in_flight=is_ahead)

        # With episodes under way in another thread, between two of their tokens.
        self.interrupt.finish(tell())

    def reinforce(self, trainer: Trainer, *, steps_done: int) -> None:
        """Steps ``steps_done + 1`` to ``run.steps``."""
        last_step = steps_done

        def on_step(step: int, metrics: dict[str, float], rollout: Rollout) -> None:
            nonlocal last_step
            last_step = step
            self.after_step(trainer, step, metrics, rollout)

        num_trained = 0
        started = time.perf_counter()

        def timed() -> Generator[Rollout]:
            nonlocal num_trained, started
            for rollout in source:
                num_trained, started = 0, time.perf_counter()
                yield rollout

        def on_batch(num_tokens: int) -> None:
            nonlocal num_trained
            num_trained += num_tokens
            bar.advance(f"micro-batches  {num_trained / (time.perf_counter() - started):.0f} tok/s")

        with (
            self.writing(steps_done + 1),
            self.console.bar("training", None) as bar,
            closing(self.rollouts(range(steps_done + 1, self.config.run.steps + 1))) as source,
        ):
            try:
                train(
                    trainer,
                    self.reference(trainer),
                    self,
                    timed(),
                    self.config,
                    first_step=steps_done + 1,
                    on_step=on_step,
                    on_batch=on_batch,
                )
            except (Interrupted, RolloutError, EngineError, SyncError, CanaryError):
                self.save(trainer, "train", last_step, waits=True)
                raise

    def after_step(self, trainer: Trainer, step: int, metrics: dict[str, float], rollout: Rollout) -> None:
        settings = self.config.run
        if step == 1:
            self.console.line(
                f"engine against trainer at step 0: mean {metrics['mismatch_mean']:.2e}, max "
                f"{metrics['mismatch_max']:.2e} nats, k3 {metrics['mismatch_k3']:.2e}"
                f" (bound on the mean: {self.config.algorithm.max_mismatch:g})"
            )
        self.console.line(step_line(step, settings.steps, metrics))
        self.write(step, metrics)
        every = settings.log_trajectories_every
        if self.mesh.is_first and every and (step % every == 0 or step == 1):
            path = self.folder / "trajectories" / f"step_{step:06d}.jsonl"
            write_trajectories(path, chain.from_iterable(rollout.episodes), self.parts.tokenizer.decode)
        if step % settings.save_every == 0 or step == settings.steps:
            self.save(trainer, "train", step)
        if self.config.rollout.max_staleness and isinstance(self.parts.engine, RemoteEngine):
            push_weights(self.parts.engine, self.interrupt)  # while they are still those of this step
        if settings.eval_every and step % settings.eval_every == 0 and step < settings.steps:
            self.evaluate(step)
        self.interrupt.check()

    def reference(self, trainer: Trainer) -> GptOss | None:
        """The policy as it was before the first step, frozen; None where no KL asks for it."""
        if trainer.steps_done == 0 or self.config.algorithm.kl_weight == 0:
            return trainer.make_reference()
        first = frozen_copy(self.parts.model, self.mesh)
        load_weights(checkpoint_folder(self.folder, 0), model=first, mesh=self.mesh)
        return trainer.make_reference(first)

    def rollouts(self, steps: Sequence[int]) -> Generator[Rollout]:
        """The rollout of each step."""
        parts = self.parts
        return rollouts(
            parts.engine,
            parts.renderer,
            parts.task,
            self.config,
            steps,
            interrupt=self.interrupt,
            console=self.console,
            mesh=self.mesh,
        )

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of ``evaluations.jsonl`` so far."""
        path = self.folder / EVALUATIONS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result_before(self) -> Mapping[str, float]:
        """The evaluation before the first step: an earlier process of this run may have made it."""
        saved = next((line["metrics"] for line in self.evaluations() if line["step"] == 0), None)
        saved = self.mesh.gather_from_all(saved)[0]
        return self.evaluate(0).metrics if saved is None else saved


@contextmanager
def on_mesh(config: Config, console: Console) -> Iterator[tuple[Mesh, Console]]:
    """The ranks of this command, and where to say things: only the first is heard."""
    with joined(config.parallel, device_of(config.model.device), compute_type(config.model)) as mesh:
        yield mesh, console if mesh.is_first else Console(is_silent=True)


def open_run(config: Config, parts: Parts, console: Console, resume: Path | None) -> Run:
    """The run's folder, a new one unless ``resume``, with its ``config.json``."""
    mesh = parts.mesh
    folder = resume if resume is not None else create_run_folder(config) if mesh.is_first else None
    folder = mesh.gather_from_all(folder)[0]
    assert folder is not None
    if mesh.is_first:
        write_config(folder / CONFIG_FILE, config)
        record_sandbox(folder, parts.walls)
    console.line(f"run folder: {folder}")
    return Run(config, parts, console, folder)


def train_job(config: Config, console: Console, *, resume: Path | None = None) -> Path:
    """Warm start, evaluation, reinforcement learning, evaluation; returns the run folder.

    ``resume``: the run folder to go on with, whose latest checkpoint is loaded and whose ``config.json`` is brought up
    to date. Raises ConfigError for what cannot start, and Interrupted, with everything saved, when asked to stop.
    """
    with on_mesh(config, console) as (mesh, console):
        return _train(config, console, mesh, resume)


def _train(config: Config, console: Console, mesh: Mesh, resume: Path | None) -> Path:
    checkpoint = None if resume is None else latest_checkpoint(resume)
    if resume is not None and checkpoint is None:
        raise ConfigError(f"--resume {resume}: the folder holds no checkpoint to go on from")
    state: dict[str, Any] = {"phase": "warm_start", "step": 0} if checkpoint is None else read_state(checkpoint)
    if state["step"] > config.run.steps:
        raise ConfigError(f"run.steps ({config.run.steps}) is below the {state['step']} steps that {resume} has done")
    parts = assemble(config, console, mesh=mesh)
    require_rows(parts, config, warms_up=state["phase"] == "warm_start")
    run = open_run(config, parts, console, resume)
    kept = kept_by(f"the state was saved, and poise train --resume {run.folder} goes on from it")
    with run.interrupt, kept, connected(parts.engine, run.interrupt):
        is_warm = state["phase"] == "train"
        trainer = policy_trainer(parts, config) if is_warm else warm_start_trainer(parts, config)
        if checkpoint is not None:
            load_checkpoint(
                checkpoint, model=parts.model, optimizer=trainer.optimizer, mesh=mesh, critic=trainer.critic
            )
            console.line(f"resumed from {checkpoint}")
        if not is_warm:
            run.warm_start(trainer)
            trainer = policy_trainer(parts, config)
            run.save(trainer, "train", 0)
        run.new_policy_version(state["step"])
        before = run.result_before()
        run.reinforce(trainer, steps_done=state["step"])
        after = run.evaluate(config.run.steps)
        run.saving.wait()
    title = f"{config.task.name}: {after.num_problems} held-out problems"
    console.table(title, ["", "before training", "after training"], metric_rows(before, after.metrics))
    return run.folder


def sft_job(config: Config, console: Console) -> Path:
    """The supervised warm start alone; returns the checkpoint folder. Raises as ``train_job`` does."""
    if config.warm_start.steps == 0:
        raise ConfigError("warm_start.steps is 0: poise sft needs at least 1 supervised step")
    with on_mesh(config, console) as (mesh, console):
        parts = assemble(config, console, mesh=mesh)
        require_rows(parts, config, warms_up=True)
        run = open_run(config, parts, console, None)
        trainer = warm_start_trainer(parts, config)
        saved = f"the state was saved; poise train --resume {run.folder} goes on, with training after"
        with run.interrupt, kept_by(saved), connected(parts.engine, run.interrupt):
            run.warm_start(trainer)
            run.save(policy_trainer(parts, config), "train", 0, waits=True)
            run.new_policy_version(0)
            run.evaluate(0)
    return checkpoint_folder(run.folder, 0)


def warm_start_trainer(parts: Parts, config: Config) -> Trainer:
    return Trainer(parts.model, config, schedule=warm_start_schedule(config.warm_start), mesh=parts.mesh)


def policy_trainer(parts: Parts, config: Config) -> Trainer:
    """Of the reinforcement learning; a critic begins where the warm start has led."""
    critic = make_critic(parts.model, config, mesh=parts.mesh)
    return Trainer(parts.model, config, mesh=parts.mesh, critic=critic)


def require_rows(parts: Parts, config: Config, *, warms_up: bool) -> None:
    """Raises ConfigError, before a folder is made, where the task has nothing to train on or to imitate."""
    if not parts.task.train_rows:
        raise ConfigError(f"task.data is missing: task {config.task.name} has no rows to train on")
    if warms_up and config.warm_start.steps:
        next(demonstrations(parts.renderer, parts.task, config, skip=0))


def eval_job(config: Config, console: Console, *, trajectories: Path | None = None) -> Evaluation:
    """One episode for each held-out problem with the policy at ``model.path``; prints a table.

    ``trajectories``: the file that gets the episodes, in the order of their problems.
    """
    with on_mesh(config, console) as (mesh, console):
        parts = assemble(config, console, trains=False, mesh=mesh)
        parts.engine.new_policy_version(0)
        kept = kept_by("an evaluation keeps nothing")
        with interrupt_of(mesh) as interrupt, kept, connected(parts.engine, interrupt):
            evaluation = evaluate_parts(parts, config, console, interrupt)
        if trajectories is not None and mesh.is_first:
            write_trajectories(trajectories, chain.from_iterable(evaluation.episodes), parts.tokenizer.decode)
        title = f"{config.task.name}: {evaluation.num_problems} held-out problems"
        console.table(title, ["", config.model.path or "random weights"], metric_rows(evaluation.metrics))
    return evaluation


def evaluate_parts(parts: Parts, config: Config, console: Console, interrupt: Interrupt) -> Evaluation:
    """Held-out reward of the policy as it is now; the same problems and seeds each time."""
    num_problems = min(config.run.eval_problems or len(parts.task.test_rows), len(parts.task.test_rows))
    rewards: list[float] = []
    started, sampled_before = time.perf_counter(), parts.engine.num_sampled_tokens
    with console.bar("held-out problems", num_problems) as bar:

        def on_episode(trajectory: Trajectory) -> None:
            rewards.append(trajectory.reward)
            speed = (parts.engine.num_sampled_tokens - sampled_before) / (time.perf_counter() - started)
            bar.advance(f"reward {sum(rewards) / len(rewards):.3f}  {speed:.0f} tok/s")

        mesh = parts.mesh
        push_before_sampling(parts.engine, interrupt)
        episodes = held_out_episodes(
            parts.engine,
            parts.renderer,
            parts.task,
            num_problems=num_problems,
            limits=parts.limits,
            seed=derive_seed(config.run.seed, EVALUATION_STREAM),
            max_concurrent=config.rollout.num_slots,
            on_episode=on_episode,
            share=slice(mesh.rank, None, mesh.num_ranks),
        )
        mine = interrupt.run(settled(mesh, episodes))
        return Evaluation.of(interleaved(together(mesh, mine)))
