"""Recipes for the released models on GPU clusters. Where they were not run in full, docs/cluster.md says so.

Sizes are meant for GPUs of 80 GB or more; ``poise plan RECIPE --gpus N --gpu-memory 80GB`` shows of what. Step sizes
are those of the literature on reinforcement learning of models of this size, not tuned on these models.
"""

from collections.abc import Callable
from dataclasses import replace

from poise.config import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
)

# One policy loss per token, a wider range above (DAPO), truncated ratios between trainer and engine, and no KL. The
# mean difference between a bfloat16 trainer and engine is a few thousandths of a nat; more is a bug.
OBJECTIVE = AlgorithmConfig(
    clip_high=0.28,
    normalize_advantages="none",
    correction="truncate",
    max_mismatch=0.02,
)


def gpt_oss_20b() -> Config:
    """gpt-oss-20b on GSM8K with the python tool: 8 GPUs (data 1 x sequence 2 x expert 4)."""
    return Config(
        model=ModelConfig(path="gpt-oss-20b", device="cuda", dtype="bfloat16"),
        task=TaskConfig(name="gsm8k", tool_time_limit_s=10.0),
        rollout=RolloutConfig(
            groups_per_step=32,
            group_size=8,
            max_turns=8,
            max_action_tokens=4096,
            max_context_tokens=16384,
            num_slots=32,
        ),
        algorithm=OBJECTIVE,
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        run=RunConfig(
            name="gpt_oss_20b",
            steps=200,
            tokens_per_microbatch=16384,
            recompute="block",
            save_every=20,
            eval_every=20,
        ),
        parallel=ParallelConfig(sequence_degree=2, expert_degree=4),
    )


def gpt_oss_120b() -> Config:
    """gpt-oss-120b on GSM8K with the python tool: 64 GPUs (data 2 x sequence 4 x expert 8).

    A rank's embedded engine holds a whole copy of the weights, 218 GiB here, which is more than a GPU has: sample from
    servers (``--engine vllm --engine.urls ...``).
    """
    config = gpt_oss_20b()
    return replace(
        config,
        model=replace(config.model, path="gpt-oss-120b"),
        rollout=replace(config.rollout, groups_per_step=64),
        run=replace(config.run, name="gpt_oss_120b"),
        parallel=ParallelConfig(sequence_degree=4, expert_degree=8),
    )


def gpt_oss_20b_retool() -> Config:
    """gpt-oss-20b on mathematics with a code interpreter over many turns: 8 GPUs."""
    return _retool(gpt_oss_20b())


def gpt_oss_120b_retool() -> Config:
    """gpt-oss-120b on mathematics with a code interpreter over many turns: 64 GPUs."""
    return _retool(gpt_oss_120b())


def gpt_oss_20b_verifyif() -> Config:
    """gpt-oss-20b on instructions that a program can verify: 8 GPUs."""
    return _verifyif(gpt_oss_20b())


def gpt_oss_120b_verifyif() -> Config:
    """gpt-oss-120b on instructions that a program can verify: 64 GPUs."""
    return _verifyif(gpt_oss_120b())


def _retool(config: Config) -> Config:
    return replace(
        config,
        task=TaskConfig(name="retool", tool_time_limit_s=10.0),
        rollout=replace(config.rollout, max_turns=16, group_size=16),
        run=replace(config.run, name=f"{config.run.name}_retool"),
    )


def _verifyif(config: Config) -> Config:
    return replace(
        config,
        task=TaskConfig(name="verifyif"),
        rollout=replace(config.rollout, max_turns=1),
        run=replace(config.run, name=f"{config.run.name}_verifyif"),
    )


RELEASED: tuple[Callable[[], Config], ...] = (
    gpt_oss_20b, gpt_oss_20b_retool, gpt_oss_20b_verifyif, gpt_oss_120b, gpt_oss_120b_retool, gpt_oss_120b_verifyif,
)  # fmt: skip
