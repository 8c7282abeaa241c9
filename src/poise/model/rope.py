"""Rotary position embedding: plain, or stretched by YaRN."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """``kind`` "yarn" stretches the context by ``factor``; "default" leaves the frequencies as they are.

    ``beta_fast``, ``beta_slow``: rotations within ``original_context`` tokens above which a frequency is kept, and
    below which it is divided by ``factor``. ``truncate`` rounds the borders of that ramp to whole channels.
    ``attention_factor`` scales cos and sin; None: 0.1 ln(factor) + 1.
    """

    kind: Literal["yarn", "default"] = "yarn"
    theta: float = 150000.0
    factor: float = 32.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 4096
    truncate: bool = False
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("yarn", "default"):
            raise ValueError(f"RopeConfig.kind must be 'yarn' or 'default', got {self.kind!r}")
        if not self.theta > 1:
            raise ValueError(f"RopeConfig.theta must be above 1, got {self.theta}")
        if not self.factor >= 1:
            raise ValueError(f"RopeConfig.factor must be at least 1, got {self.factor}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"RopeConfig.beta_fast must be above beta_slow, above 0; got {self.beta_fast}, {self.beta_slow}"
            )
        if self.original_context < 1:
            raise ValueError(f"RopeConfig.original_context must be at least 1, got {self.original_context}")

    @property
    def cos_sin_scale(self) -> float:
        if self.kind == "default":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float[Tensor, " C2"]:
    """Radians per token of each pair of channels, float32.

    Plain: theta**(-2i / C). YaRN divides the slow ones by ``factor`` and keeps the fast ones, with a linear ramp
    between ("YaRN", arXiv 2309.00071, section 3.2).
    """
    wavelengths = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if config.kind == "default":
        return 1.0 / wavelengths

    def channel_of(rotations: float) -> float:
        """Channel (of C) that turns ``rotations`` times within the original context."""
        return head_dim * math.log(config.original_context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = channel_of(config.beta_fast), channel_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept, stretched = 1.0 / wavelengths, 1.0 / (config.factor * wavelengths)
    return stretched * ramp + kept * (1 - ramp)


def rotation(
    position_ids: Int[Tensor, " T"], frequencies: Float[Tensor, " C2"], scale: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "T 1 C"], Float[Tensor, "T 1 C"]]:
    """cos and signed sin of each token's angles, scaled, for ``rotate``: once per forward. Angles are float32."""
    angles = position_ids[:, None, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(
    x: Float[Tensor, "T N C"], cos: Float[Tensor, "T 1 C"], signed_sin: Float[Tensor, "T 1 C"]
) -> Float[Tensor, "T N C"]:
    """Turns channel pairs (i, i + C/2): (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)
