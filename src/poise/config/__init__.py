"""Every knob of a run. A recipe is a function that returns a ``Config``; the command line overrides its fields.

Field comments become the help text of the command line: one line each, with the unit.
"""

from poise.config.algorithm import AlgorithmConfig
from poise.config.critic import CriticConfig
from poise.config.engine import EngineConfig
from poise.config.errors import ConfigError, RunError
from poise.config.model import ModelConfig
from poise.config.parallel import ParallelConfig
from poise.config.rollout import RolloutConfig
from poise.config.sandbox import SandboxConfig
from poise.config.task import TaskConfig
from poise.config.training import OptimizerConfig, RunConfig, WarmStartConfig
from poise.config.whole import Config

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "RunError",
    "SandboxConfig",
    "TaskConfig",
    "WarmStartConfig",
]
