"""Recipes for dense language models that `poise upcycle` made into GPT-OSS ones."""

from poise.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WarmStartConfig,
)


def verifyif_smollm() -> Config:
    """SmolLM2-135M in GPT-OSS's architecture learns to follow verifiable instructions: see examples/verifyif_smollm."""
    return Config(
        model=ModelConfig(path="smollm2"),
        task=TaskConfig(name="custom", factory="examples.verifyif_smollm.task:instructed"),
        # Answers that are cut earn nothing: short ones, which are cheap here, come with the rest.
        rollout=RolloutConfig(
            groups_per_step=6, group_size=8, max_turns=1, max_action_tokens=64, max_context_tokens=192, num_slots=64
        ),
        optimizer=OptimizerConfig(learning_rate=4e-5, warmup_steps=2),
        # Harmony's format, from the model's own answers; what they say was its own before.
        warm_start=WarmStartConfig(steps=40, demonstrations_per_step=8, learning_rate=2e-4, warmup_steps=5),
        run=RunConfig(
            name="verifyif_smollm",
            steps=30,
            tokens_per_microbatch=2048,
            save_every=10,
            eval_every=15,
            eval_problems=0,
            log_trajectories_every=5,
        ),
    )
