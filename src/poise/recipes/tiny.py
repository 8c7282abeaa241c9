"""Recipes that learn on a two-core machine without a GPU, in minutes, from random weights."""

from poise.config import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WarmStartConfig,
)


def arithmetic_tiny() -> Config:
    """A byte-level GPT-OSS of a million parameters learns to send sums to the python tool (reasoning-gym chain_sum)."""
    return Config(
        model=ModelConfig(),
        task=TaskConfig(name="reasoning_gym", dataset="chain_sum", describes_tools=False, mental_share=0.5),
        rollout=RolloutConfig(
            groups_per_step=16, group_size=8, max_turns=3, max_action_tokens=72, max_context_tokens=384
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        warm_start=WarmStartConfig(steps=400),
        run=RunConfig(name="arithmetic_tiny", steps=40),
    )


def gsm8k_tiny() -> Config:
    """The same policy on GSM8K: warm start on the solutions, calculator marks as tool calls, then GRPO. Stays weak."""
    return Config(
        model=ModelConfig(sliding_window=64),
        task=TaskConfig(name="gsm8k", describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=8, group_size=8, max_turns=10, max_action_tokens=256, max_context_tokens=2048, num_slots=64
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        warm_start=WarmStartConfig(steps=300, demonstrations_per_step=16),
        run=RunConfig(name="gsm8k_tiny", steps=20),
    )
