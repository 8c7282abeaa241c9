"""The commands, whole: train, supervised warm start, evaluate."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from poise.assembly import Parts, assemble
from poise.config import Config, ConfigError
from poise.console import Console, metric_rows, step_line
from poise.evaluate import Evaluation, evaluate
from poise.interrupt import Interrupt, Interrupted
from poise.loop import Group, Rollout, roll_out, train
from poise.metrics import MetricsWriter
from poise.model import GptOss, load_model
from poise.runfolder import create_run_folder, write_trajectories
from poise.seeding import derive_seed
from poise.train.checkpoint import checkpoint_folder, latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from poise.train.trainer import Trainer, warm_start_schedule
from poise.warmstart import warm_start

EVALUATION_STREAM = 1  # part of a seed: keeps evaluation's numbers apart from training's
EVALUATIONS_FILE = "evaluations.jsonl"


class Run:
    """One training run and its folder: writes what happened, saves what is needed to go on."""

    def __init__(self, config: Config, parts: Parts, console: Console, folder: Path) -> None:
        self.config, self.parts, self.console, self.folder = config, parts, console, folder
        self.interrupt = Interrupt()
        self.writer: MetricsWriter | None = None

    # The steps of reinforcement learning count from 1, so those of the warm start end at 0: one axis for both.
    def warm_start_step(self, step: int) -> int:
        return step - self.config.warm_start.steps

    def save(self, trainer: Trainer, phase: str, step: int) -> None:
        save_checkpoint(
            checkpoint_folder(self.folder, step),
            model=self.parts.model,
            optimizer=trainer.optimizer,
            state={"phase": phase, "step": step},
            save_tokenizer=self.parts.tokenizer.save,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.writer is not None
        self.writer.write(step, metrics)

    def warm_start(self, trainer: Trainer) -> None:
        total = self.config.warm_start.steps
        with self.console.bar("warm start", total) as bar:

            def on_step(step: int, metrics: Mapping[str, float]) -> None:
                self.write(self.warm_start_step(step), {f"warm_start_{k}": v for k, v in metrics.items()})
                bar.advance(f"loss {metrics['loss']:.3f}  {metrics['tokens_per_s']:.0f} tok/s")
                if step % 50 == 0 or step == total:
                    self.console.line(
                        f"warm start {step}/{total}  loss {metrics['loss']:.4f}  entropy {metrics['entropy']:.3f}"
                        f"  grad {metrics['grad_norm']:.2f}  {metrics['tokens_per_s']:.0f} tok/s"
                    )
                self.interrupt.check()

            parts = self.parts
            try:
                warm_start(trainer, parts.renderer, parts.task, self.config, on_step=on_step)
            except Interrupted:
                self.save(trainer, "warm_start", 0)
                raise

    def evaluate(self, step: int) -> Evaluation:
        evaluation = evaluate_parts(self.parts, self.config, self.console, self.interrupt)
        self.parts.engine.new_policy_version(self.parts.engine.policy_version)  # leave no trace in the next rollout
        with (self.folder / EVALUATIONS_FILE).open("a") as file:
            line = {"step": step, "num_problems": evaluation.num_problems, "metrics": evaluation.metrics}
            file.write(json.dumps(line) + "\n")
        self.console.line(f"held out after step {step}: reward {evaluation.metrics['reward_mean']:.3f}")
        return evaluation

    def reinforce(self, trainer: Trainer) -> None:
        with MetricsWriter(
            self.folder, self.config.run.trackers, first_step=self.steps_done(trainer) + 1
        ) as self.writer:
            try:
                train(
                    trainer,
                    self.reference(trainer),
                    self.parts.engine,
                    self.rollouts(self.steps_done(trainer) + 1),
                    self.config,
                    on_step=lambda step, metrics, rollout: self.after_step(trainer, step, metrics, rollout),
                )
            except Interrupted:
                self.save(trainer, "train", self.steps_done(trainer))
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
        if every and (step % every == 0 or step == 1):
            trajectories = [trajectory for episode in rollout.episodes for trajectory in episode]
            write_trajectories(self.folder, step, trajectories, self.parts.tokenizer.decode)
        if step % settings.save_every == 0 or step == settings.steps:
            self.save(trainer, "train", step)
        if settings.eval_every and step % settings.eval_every == 0 and step < settings.steps:
            self.evaluate(step)
        self.interrupt.check()

    def steps_done(self, trainer: Trainer) -> int:
        return trainer.steps_done // self.config.algorithm.updates_per_batch

    def reference(self, trainer: Trainer) -> GptOss | None:
        """The policy as it was before the first step, frozen; None where no KL asks for it."""
        if trainer.steps_done == 0 or self.config.algorithm.kl_weight == 0:
            return trainer.make_reference()
        weight = self.parts.model.lm_head.weight
        model = load_model(checkpoint_folder(self.folder, 0), dtype=weight.dtype, device=weight.device)
        return model.eval().requires_grad_(False)

    def rollouts(self, first_step: int) -> Iterator[Rollout]:
        return (self.rollout(step) for step in range(first_step, self.config.run.steps + 1))

    def rollout(self, step: int) -> Rollout:
        """The rollout of one step, under a bar that shows reward and speed."""
        engine, rewards = self.parts.engine, list[float]()
        started, sampled_before = time.perf_counter(), engine.num_sampled_tokens
        with self.console.bar(f"step {step} rollout", self.config.rollout.groups_per_step) as bar:

            def on_group(group: Group) -> None:
                rewards.extend(episode[0].reward for episode in group)
                speed = (engine.num_sampled_tokens - sampled_before) / (time.perf_counter() - started)
                bar.advance(f"reward {sum(rewards) / len(rewards):.3f}  {speed:.0f} tok/s")

            return roll_out(
                engine,
                self.parts.renderer,
                self.parts.task,
                self.config,
                step=step,
                interrupt=self.interrupt,
                on_group=on_group,
            )

    def saved_evaluation(self, step: int) -> dict[str, float] | None:
        """Metrics of an evaluation that an earlier process of this run wrote."""
        path = self.folder / EVALUATIONS_FILE
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return next((line["metrics"] for line in reversed(lines) if line["step"] == step), None)

    def print_result(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        title = f"{self.config.task.name}: {self.config.run.eval_problems} held-out problems"
        self.console.table(title, ["", "after warm start", "after training"], metric_rows(before, after))


def train_job(config: Config, console: Console, *, resume: Path | None = None) -> Path:
    """Warm start, evaluation, reinforcement learning, evaluation; returns the run folder.

    ``resume``: the run folder to go on with, whose latest checkpoint is loaded. Raises ConfigError for what cannot
    start, and Interrupted, with everything saved, when asked to stop.
    """
    folder, checkpoint, phase = resume, None, "warm_start"
    if resume is not None:
        checkpoint = latest_checkpoint(resume)
        if checkpoint is None:
            raise ConfigError(f"--resume {resume}: the folder holds no checkpoint to go on from")
        phase = read_state(checkpoint)["phase"]
    parts = assemble(config, console)
    if folder is None:
        folder = create_run_folder(config)
    run = Run(config, parts, console, folder)
    console.line(f"run folder: {folder}")
    with run.interrupt:
        if phase == "warm_start":
            trainer = Trainer(parts.model, config, schedule=warm_start_schedule(config.warm_start))
            if checkpoint is not None:
                load_checkpoint(checkpoint, model=parts.model, optimizer=trainer.optimizer)
            first_metrics_step = run.warm_start_step(trainer.steps_done + 1)
            with MetricsWriter(folder, config.run.trackers, first_step=first_metrics_step) as run.writer:
                run.warm_start(trainer)
            trainer = Trainer(parts.model, config)
            run.save(trainer, "train", 0)
            parts.engine.new_policy_version(0)
        else:
            assert checkpoint is not None
            trainer = Trainer(parts.model, config)
            load_checkpoint(checkpoint, model=parts.model, optimizer=trainer.optimizer)
            console.line(f"resumed from {checkpoint}")
        before = run.saved_evaluation(0)
        if before is None:
            before = run.evaluate(0).metrics
        run.reinforce(trainer)
        run.print_result(before, run.evaluate(config.run.steps).metrics)
    return folder


def sft_job(config: Config, console: Console) -> Path:
    """The supervised warm start alone; returns the checkpoint folder. Raises as ``train_job`` does."""
    if config.warm_start.steps == 0:
        raise ConfigError("warm_start.steps is 0: poise sft needs at least 1 supervised step")
    parts = assemble(config, console)
    run = Run(config, parts, console, create_run_folder(config))
    console.line(f"run folder: {run.folder}")
    trainer = Trainer(parts.model, config, schedule=warm_start_schedule(config.warm_start))
    with run.interrupt:
        with MetricsWriter(run.folder, config.run.trackers, first_step=run.warm_start_step(1)) as run.writer:
            run.warm_start(trainer)
        run.save(Trainer(parts.model, config), "train", 0)
        run.evaluate(0)
    return checkpoint_folder(run.folder, 0)


def eval_job(config: Config, console: Console) -> Evaluation:
    """One episode for each held-out problem with the policy at ``model.path``; prints a table."""
    parts = assemble(config, console, trains=False)
    with Interrupt() as interrupt:
        evaluation = evaluate_parts(parts, config, console, interrupt)
    title = f"{config.task.name}: {evaluation.num_problems} held-out problems"
    console.table(title, ["", config.model.path or "random weights"], metric_rows(evaluation.metrics))
    return evaluation


def evaluate_parts(parts: Parts, config: Config, console: Console, interrupt: Interrupt) -> Evaluation:
    """Held-out reward of the policy as it is now; the same problems and seeds each time."""
    with console.bar("held-out problems", config.run.eval_problems) as bar:
        return interrupt.run(
            evaluate(
                parts.engine,
                parts.renderer,
                parts.task,
                num_problems=config.run.eval_problems,
                limits=parts.limits,
                seed=derive_seed(config.run.seed, EVALUATION_STREAM),
                max_concurrent=config.rollout.num_slots,
                on_episode=lambda trajectory: bar.advance(),
            )
        )
