"""The critic's keys."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require, require_finite


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function of PPO; read where algorithm.normalize_advantages is "gae"."""

    backbone: Literal["own", "shared"] = "own"
    """A copy of the policy for the critic alone ("own"), or one backbone with two heads ("shared")."""
    gamma: float = 1.0
    """Discount per sampled token, in [0, 1]."""
    lam: float = 1.0
    """GAE's lambda, in [0, 1]: 1 trusts what was earned, 0 what the critic expects after one token."""
    whiten_advantages: bool = True
    """Shift and scale the step's advantages to mean 0 and deviation 1 over its sampled tokens."""
    learning_rate: float = 3e-4
    """Peak learning rate of the critic ("shared": of its head); rises over optimizer.warmup_steps."""
    pretrain_steps: int = 0
    """Steps at the start in which the critic learns and the policy stays as it is (backbone own)."""
    value_clip: float = 0.2
    """A value learns only within this distance of what it was before the step; 0: no bound."""
    value_weight: float = 0.5
    """Weight of the value loss beside the policy's (backbone shared)."""
    normalize_returns: Literal["none", "popart"] = "none"
    """Units in which the critic learns: those of the reward ("none"), or deviations from a running mean ("popart")."""

    def __post_init__(self) -> None:
        require_finite(self, "critic", "learning_rate", "value_clip", "value_weight")
        for name, is_allowed, allowed in (
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("lam", 0 <= self.lam <= 1, "in [0, 1]"),
            ("learning_rate", self.learning_rate >= 0, "at least 0"),
            ("pretrain_steps", self.pretrain_steps >= 0, "at least 0"),
            ("value_clip", self.value_clip >= 0, "at least 0"),
            ("value_weight", self.value_weight > 0, "positive"),
        ):
            require(is_allowed, f"critic.{name} must be {allowed}, got {getattr(self, name)}")
        require(
            self.backbone == "shared" or "value_weight" not in self.changed,
            'critic.value_weight does nothing without critic.backbone "shared": a loss of its own needs no weight',
        )
        require(
            self.backbone == "own" or self.pretrain_steps == 0,
            'critic.pretrain_steps needs critic.backbone "own": the policy cannot stay where the critic moves it',
        )

    @property
    def changed(self) -> list[str]:
        """Names of the keys that are not at their default."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
