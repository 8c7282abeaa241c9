"""The keys of sampling."""

import math
from dataclasses import dataclass

from poise.config.errors import require


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are sampled."""

    groups_per_step: int = 16
    """Problems per step."""
    group_size: int = 8
    """Episodes per problem."""
    max_turns: int = 4
    """Actions per episode at most."""
    max_action_tokens: int = 128
    """Sampled tokens per action at most."""
    max_context_tokens: int = 512
    """Tokens of an episode at most, prompt and tool results included."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in the trainer alike."""
    top_p: float = 1.0
    """Only 1.0: truncated sampling biases every importance ratio."""
    lockstep: bool = False
    """Sample only while no tool runs: slower, but the last digits then never depend on how long tools take."""
    max_staleness: int = 0
    """Steps by which rollouts may run ahead of the trainer; 0 samples only while nothing is trained."""
    num_slots: int = 128
    """Episodes that the embedded engine samples at once."""
    max_prefill_tokens: int = 8192
    """Prompt tokens that the embedded engine takes in one forward at most."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "max_turns", "max_action_tokens", "num_slots"):
            require(getattr(self, name) >= 1, f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        require(self.max_staleness >= 0, f"rollout.max_staleness must be at least 0, got {self.max_staleness}")
        require(
            self.max_prefill_tokens >= 1,
            f"rollout.max_prefill_tokens must be at least 1, got {self.max_prefill_tokens}",
        )
        require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"rollout.temperature must be a positive number, got {self.temperature}",
        )
        require(
            self.top_p == 1.0,
            f"rollout.top_p must be 1.0 in training, got {self.top_p}: truncated sampling biases every ratio",
        )
        require(
            self.max_context_tokens > self.max_action_tokens,
            f"rollout.max_context_tokens ({self.max_context_tokens}) must exceed rollout.max_action_tokens "
            f"({self.max_action_tokens})",
        )
