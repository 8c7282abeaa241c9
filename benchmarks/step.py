"""Seconds of one GRPO step, rollout and training apart: poise beside TRL's GRPOTrainer with Transformers.

Both start from the same checkpoint folder, take the same prompts, sample completions of exactly the same length (stop
tokens are switched off), in groups of the same size, and do one on-policy update in float32 on the CPU. One system
after the other runs its steps in this one process; the first step is not counted, and medians are printed with the
ratio.

    python benchmarks/step.py [--checkpoint FOLDER] [--steps 4] [--threads 2]

Without --checkpoint the policy has the tiny recipe's shape and random weights; lengths are fixed, so its quality does
not matter. With the checkpoint of a run, the tiny recipe as it is (turns, tool calls) is timed as well.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

from poise.assembly import assemble
from poise.config import Config
from poise.console import Console
from poise.engine import EmbeddedEngine
from poise.envs.env import Observation, Outcome
from poise.harmony import Conversation, HarmonyTokenizer, Renderer, user
from poise.interrupt import Interrupt
from poise.loop import pack_update, roll_out
from poise.model import load_model, save_model
from poise.recipes import arithmetic_tiny
from poise.rollout import Limits, run_group
from poise.train.scoring import scored
from poise.train.trainer import Trainer


def reward_of(token_ids: list[int]) -> float:
    """Any reward that differs within a group will do."""
    return len(set(token_ids)) / len(token_ids)


class OneAnswer:
    """One turn; the reward depends on the sampled tokens alone."""

    def __init__(self, question: str) -> None:
        self.question = question

    async def reset(self) -> Conversation:
        return Conversation(messages=(user(self.question),))

    async def step(self, messages) -> Observation:
        return Observation(is_done=True)

    async def outcome(self) -> Outcome:
        return Outcome(reward=0.0)

    async def close(self) -> None:
        pass


def time_poise(folder: Path, questions: list[str], config: Config, num_steps: int) -> list[tuple[float, float]]:
    """(rollout seconds, training seconds) of each step."""
    from dataclasses import replace

    model = load_model(folder)
    renderer = Renderer(HarmonyTokenizer.load(folder))
    settings = config.rollout
    length = settings.max_action_tokens
    engine = EmbeddedEngine(
        model, stop_ids=(), return_id=-1, num_slots=settings.num_slots, max_context_tokens=settings.max_context_tokens
    )
    trainer = Trainer(model, config)
    limits = Limits(max_turns=1, max_action_tokens=length, max_context_tokens=settings.max_context_tokens)
    seconds = []
    for step in range(num_steps):
        started = time.perf_counter()

        async def rollout(step: int = step):
            groups = [
                run_group(
                    lambda question=question: OneAnswer(question),
                    engine,
                    renderer,
                    group_id=i,
                    group_size=settings.group_size,
                    seed=step,
                    limits=limits,
                )
                for i, question in enumerate(questions)
            ]
            return list(await asyncio.gather(*groups))

        groups = [
            [[replace(t, reward=reward_of(list(t.turns[0].action_ids))) for t in episode] for episode in group]
            for group in asyncio.run(rollout())
        ]
        sampled = time.perf_counter()
        assert all(len(t.turns[0].action_ids) == length for g in groups for e in g for t in e)
        metrics = trainer.step(pack_update(scored(groups, config), config))
        engine.new_policy_version(step + 1)
        seconds.append((sampled - started, time.perf_counter() - sampled))
        assert metrics["grad_norm"] > 0
    return seconds


def time_trl(folder: Path, prompts: list[str], config: Config, num_steps: int) -> list[tuple[float, float]]:
    """The same with TRL; its rollout time is that of _generate_and_score_completions."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = config.rollout
    seconds: list[tuple[float, float]] = []

    class Timed(GRPOTrainer):
        rollout_s = 0.0

        def _generate_and_score_completions(self, inputs):
            started = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            self.rollout_s = time.perf_counter() - started
            return result

        def training_step(self, *args, **kwargs):
            started = time.perf_counter()
            result = super().training_step(*args, **kwargs)
            self.step_started = started
            return result

    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            total = time.perf_counter() - trainer.step_started  # the optimizer's step included
            seconds.append((trainer.rollout_s, total - trainer.rollout_s))

    num_episodes = len(prompts) * settings.group_size
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=num_episodes,
        num_generations=settings.group_size,
        max_completion_length=settings.max_action_tokens,
        generation_kwargs={"min_new_tokens": settings.max_action_tokens},
        max_steps=num_steps,
        learning_rate=config.optimizer.learning_rate,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        router_aux_loss_coef=0.0,
    )
    trainer = Timed(
        model=str(folder),
        args=arguments,
        reward_funcs=lambda completion_ids, **kwargs: [reward_of(list(ids)) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": prompts * num_steps}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Steps()],
    )
    trainer.train()
    return seconds


def time_recipe(checkpoint: Path, num_steps: int) -> None:
    """The tiny recipe as it is, from a trained checkpoint: turns, tool calls, ragged lengths."""
    from dataclasses import replace

    config = arithmetic_tiny()
    config = replace(config, model=replace(config.model, path=str(checkpoint)))
    parts = assemble(config, Console())
    trainer = Trainer(parts.model, config)
    rows = []
    for step in range(1, num_steps + 1):
        rollout = roll_out(
            parts.engine,
            parts.renderer,
            parts.task,
            config,
            step=step,
            interrupt=Interrupt(),
            on_group=lambda group: None,
        )
        started = time.perf_counter()
        batches = pack_update(scored(rollout.groups, config), config)
        trainer.step(batches)
        parts.engine.new_policy_version(step)
        sampled = sum(len(turn.action_ids) for e in rollout.episodes for t in e for turn in t.turns)
        packed = sum(len(batch.input_ids) for batch in batches)
        rows.append((rollout.seconds, sampled, time.perf_counter() - started, packed))
    rollout_s, sampled, train_s, packed = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    print(f"tiny recipe, {config.rollout.groups_per_step} x {config.rollout.group_size} episodes with tool calls:")
    print(f"  rollout  {rollout_s:6.2f} s  {sampled / rollout_s:8.0f} sampled tokens/s")
    print(f"  training {train_s:6.2f} s  {packed / train_s:8.0f} packed tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder of a run of arithmetic_tiny")
    parser.add_argument("--steps", type=int, default=4, help="steps of each system, the first not counted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = arithmetic_tiny()
    if args.checkpoint:
        time_recipe(args.checkpoint, args.steps)
    parts = assemble(config, Console())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        save_model(parts.model, folder, format="fp32")
        parts.tokenizer.save(folder)
        rows = [parts.task.train_rows[i] for i in range(config.rollout.groups_per_step)]
        questions = [row["question"] for row in rows]
        prompts = [
            parts.tokenizer.decode(parts.renderer.prompt(Conversation(messages=(user(question),))))
            for question in questions
        ]
        results = {
            "TRL": time_trl(folder, prompts, config, args.steps),
            "poise": time_poise(folder, questions, config, args.steps),
        }
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    sampled = episodes * config.rollout.max_action_tokens
    total = sampled + config.rollout.group_size * sum(len(parts.tokenizer.encode(p)) for p in prompts)
    print(f"{episodes} episodes x {config.rollout.max_action_tokens} sampled tokens, {args.threads} threads, medians")
    print(f"{'':8}{'rollout s':>12}{'tokens/s':>12}{'training s':>12}{'tokens/s':>12}{'step s':>10}")
    medians = {}
    for name, steps in results.items():
        rollout_s, train_s = (statistics.median(column) for column in zip(*steps[1:], strict=True))
        medians[name] = (rollout_s, train_s, rollout_s + train_s)
        print(
            f"{name:8}{rollout_s:12.2f}{sampled / rollout_s:12.0f}{train_s:12.2f}{total / train_s:12.0f}"
            f"{rollout_s + train_s:10.2f}"
        )
    ratios = [slow / fast for slow, fast in zip(medians["TRL"], medians["poise"], strict=True)]
    print(f"TRL / poise: rollout {ratios[0]:.1f}x, training {ratios[1]:.1f}x, step {ratios[2]:.1f}x")


if __name__ == "__main__":
    main()
