"""Environments: what the policy acts in. ``make_task`` turns a configuration into rows and environments."""

from poise.config import ConfigError, TaskConfig
from poise.envs.env import Task


def make_task(config: TaskConfig) -> Task:
    """Raises ``ConfigError`` in one sentence where data or an optional package is missing."""
    if config.name == "reasoning_gym":
        from poise.envs.reasoning_gym import ReasoningGym

        return ReasoningGym(config)
    if config.name == "gsm8k":
        from poise.envs.gsm8k import Gsm8k

        return Gsm8k(config)
    if config.name == "retool":
        from poise.envs.retool import Retool

        return Retool(config)
    if config.name == "verifyif":
        from poise.envs.verifyif import VerifyIf

        return VerifyIf(config)
    raise ConfigError(f"task.name must be reasoning_gym, gsm8k, retool or verifyif, got {config.name!r}")
