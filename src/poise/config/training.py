"""The keys of the optimizer, the warm start and the run's length and bookkeeping."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require, require_finite


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 5
    """Steps over which the learning rate rises linearly to its peak."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms, biases and sinks are exempt."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        require_finite(self, "optimizer", "learning_rate", "weight_decay", "max_grad_norm")
        require(self.learning_rate >= 0, f"optimizer.learning_rate must be at least 0, got {self.learning_rate}")
        require(self.warmup_steps >= 0, f"optimizer.warmup_steps must be at least 0, got {self.warmup_steps}")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")
        require(self.max_grad_norm > 0, f"optimizer.max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps on the task's demonstrations, before reinforcement learning or by `poise sft`."""

    steps: int = 0
    """Supervised steps; 0 starts from the policy as it is."""
    demonstrations_per_step: int = 64
    """Demonstrations per supervised step."""
    learning_rate: float = 2e-3
    """Peak learning rate of the supervised steps; falls to a tenth along a cosine."""
    warmup_steps: int = 20
    """Supervised steps over which the learning rate rises linearly."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, f"warm_start.steps must be at least 0, got {self.steps}")
        require(
            self.demonstrations_per_step >= 1,
            f"warm_start.demonstrations_per_step must be at least 1, got {self.demonstrations_per_step}",
        )
        require_finite(self, "warm_start", "learning_rate")
        require(self.learning_rate > 0, f"warm_start.learning_rate must be positive, got {self.learning_rate}")
        require(self.warmup_steps >= 0, f"warm_start.warmup_steps must be at least 0, got {self.warmup_steps}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, memory and bookkeeping of a run."""

    steps: int = 100
    """Batches of rollouts."""
    seed: int = 0
    """Seed of weights, sampling and order of the data."""
    folder: str = "runs"
    """A run's folder is made inside this one."""
    name: str = "run"
    """Start of the run folder's name; a number is added, so nothing is overwritten."""
    tokens_per_microbatch: int = 8192
    """Packed tokens per forward and backward."""
    recompute: Literal["none", "experts", "around_attention", "block"] = "none"
    """What the backward pass computes again: each block's "experts", all "around_attention", or the "block"."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    eval_every: int = 0
    """Steps between evaluations on the held-out problems; 0: before and after only."""
    eval_problems: int = 200
    """Held-out problems per evaluation; 0: all."""
    log_trajectories_every: int = 10
    """Steps between trajectory files; 0 writes none."""
    trackers: tuple[Literal["tensorboard"], ...] = ()
    """Loggers beside metrics.jsonl: "tensorboard"."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_microbatch", "save_every"):
            require(getattr(self, name) >= 1, f"run.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_every", "eval_problems", "log_trajectories_every"):
            require(getattr(self, name) >= 0, f"run.{name} must be at least 0, got {getattr(self, name)}")
