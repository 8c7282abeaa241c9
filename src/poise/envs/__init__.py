"""Environments: what the policy acts in. ``make_task`` turns a configuration into rows and environments."""

from poise.config import ConfigError, TaskConfig
from poise.envs.env import Task


def make_task(config: TaskConfig) -> Task:
    """Raises ``ConfigError`` in one sentence where data or an optional package is missing."""
    if config.name == "reasoning_gym":
        from poise.envs.reasoning_gym import ReasoningGym

        return ReasoningGym(
            config.dataset,
            num_train_rows=config.num_train_rows,
            num_test_rows=config.num_test_rows,
            seed=config.seed,
            describes_tools=config.describes_tools,
            mental_share=config.mental_share,
            tool_time_limit_s=config.tool_time_limit_s,
        )
    if config.name == "gsm8k":
        from poise.envs.gsm8k import Gsm8k

        if config.data is None and config.test_data is None:
            raise ConfigError("task.data is required by task gsm8k: a .jsonl path or a Hugging Face data set id")
        return Gsm8k(
            config.data,
            test_data=config.test_data,
            num_train_rows=config.num_train_rows,
            num_test_rows=config.num_test_rows,
            seed=config.seed,
            describes_tools=config.describes_tools,
            mental_share=config.mental_share,
            tool_time_limit_s=config.tool_time_limit_s,
        )
    raise ConfigError(f"task.name must be reasoning_gym or gsm8k, got {config.name!r}")
