"""Recipes that learn on a two-core machine without a GPU, in minutes, from random weights."""

from dataclasses import replace

from poise.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WarmStartConfig,
)

# One sliding and one full layer: the first looks a few tokens back, the second finds where the text goes on in the same
# way, which is all that copying takes. Short wavelengths suit short contexts, and so does plain RoPE.
TINY = ModelConfig(num_layers=2, num_heads=8, num_kv_heads=4, sliding_window=8, rope="default", rope_theta=1000.0)


def arithmetic_tiny() -> Config:
    """A byte-level GPT-OSS of a million parameters learns to send sums to the python tool (reasoning-gym chain_sum)."""
    return Config(
        model=TINY,
        task=TaskConfig(name="reasoning_gym", dataset="chain_sum", describes_tools=False, mental_share=0.45),
        rollout=RolloutConfig(
            groups_per_step=16, group_size=8, max_turns=3, max_action_tokens=72, max_context_tokens=384
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=2e-4),
        warm_start=WarmStartConfig(steps=1600, demonstrations_per_step=32, learning_rate=2e-3, warmup_steps=30),
        run=RunConfig(name="arithmetic_tiny", steps=60),
    )


def ppo_tiny() -> Config:
    """arithmetic_tiny with PPO: a critic of its own values every token, and no problem needs a second episode."""
    recipe = arithmetic_tiny()
    return replace(
        recipe,
        rollout=replace(recipe.rollout, groups_per_step=128, group_size=1),
        algorithm=AlgorithmConfig(normalize_advantages="gae", updates_per_batch=2),
        critic=CriticConfig(learning_rate=1e-3),
        run=replace(recipe.run, name="ppo_tiny"),
    )


def gsm8k_tiny() -> Config:
    """The same policy on GSM8K: warm start on the solutions, calculator marks as tool calls, then GRPO. Stays weak."""
    return Config(
        model=TINY,
        task=TaskConfig(name="gsm8k", describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=8, group_size=8, max_turns=8, max_action_tokens=256, max_context_tokens=1536, num_slots=64
        ),
        algorithm=AlgorithmConfig(),
        # Rewards are rare: Adam scales their faint gradient up to full steps, which must then be small.
        optimizer=OptimizerConfig(learning_rate=3e-5),
        warm_start=WarmStartConfig(steps=400, demonstrations_per_step=16, learning_rate=2e-3, warmup_steps=30),
        run=RunConfig(name="gsm8k_tiny", steps=20),
    )


def retool_tiny() -> Config:
    """The same policy on mathematics with a code interpreter over many turns (AIME, MATH-500). Shows the loop only."""
    return Config(
        model=TINY,
        task=TaskConfig(name="retool", describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=4, group_size=8, max_turns=4, max_action_tokens=128, max_context_tokens=1024, num_slots=32
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-5),
        warm_start=WarmStartConfig(steps=40, demonstrations_per_step=8, learning_rate=2e-3, warmup_steps=10),
        run=RunConfig(name="retool_tiny", steps=5, eval_problems=64),
    )


def verifyif_tiny() -> Config:
    """The same policy learns to follow a few verifiable instructions: a title, quotation marks, a last sentence."""
    return Config(
        model=TINY,
        task=TaskConfig(
            name="verifyif",
            describes_tools=False,
            instructions=(
                "detectable_content:postscript",
                "detectable_format:title",
                "punctuation:no_comma",
                "startend:end_checker",
                "startend:quotation",
            ),
            max_instructions=2,
        ),
        rollout=RolloutConfig(
            groups_per_step=8, group_size=8, max_turns=1, max_action_tokens=112, max_context_tokens=448, num_slots=64
        ),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(learning_rate=2e-4),
        # A third of what it takes to imitate them all: reinforcement learning is to have something to do.
        warm_start=WarmStartConfig(steps=90, demonstrations_per_step=16, learning_rate=2e-3, warmup_steps=20),
        run=RunConfig(name="verifyif_tiny", steps=30),
    )
