"""The policy's keys."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require, require_finite


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a checkpoint folder, or the shape of a new model with random weights."""

    path: str | None = None
    """Hugging Face checkpoint folder to start from; None makes a new model of the shape below with a byte tokenizer."""
    hidden_size: int = 128
    """Channels of the residual stream."""
    intermediate_size: int = 128
    """Channels inside each expert."""
    num_layers: int = 4
    """Blocks; even ones slide, odd ones see the whole sequence."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key/value heads; divides num_heads."""
    head_dim: int = 32
    """Channels per head; even."""
    num_experts: int = 8
    """Experts per layer."""
    experts_per_token: int = 2
    """Experts that each token is routed to."""
    sliding_window: int = 32
    """Tokens that a sliding layer sees, the token itself included."""
    rope: Literal["yarn", "default"] = "yarn"
    """Rotary positions: "yarn" as in the released models, "default" without its scaling."""
    rope_theta: float = 150_000.0
    """Base of the rotary wavelengths; the longest is about six times as many tokens."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:N"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "num_experts"):
            require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads ({self.num_kv_heads})",
        )
        require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            f"model.head_dim must be an even number of at least 2, got {self.head_dim}",
        )
        require(
            1 <= self.experts_per_token <= self.num_experts,
            f"model.experts_per_token must be 1..{self.num_experts} (num_experts), got {self.experts_per_token}",
        )
        require_finite(self, "model", "rope_theta")
        require(self.rope_theta > 1, f"model.rope_theta must exceed 1, got {self.rope_theta}")
        require(self.sliding_window >= 1, f"model.sliding_window must be at least 1, got {self.sliding_window}")
