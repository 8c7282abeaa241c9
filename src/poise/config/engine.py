"""The keys of what samples."""

import math
from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples: the trainer's own parameters, or servers that are given the weights after each step."""

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """"embedded" samples inside the trainer; "vllm" (also poise serve) and "sglang" from the servers at urls."""
    urls: tuple[str, ...] = ()
    """Servers, as http://HOST:PORT; each addressed itself, not through a balancer, since each gets the weights."""
    command: str | None = None
    """Starts a server that refuses connections; {url}, {host}, {port} and {checkpoint} are filled in."""
    weights: Literal["folder", "transfer"] = "folder"
    """How weights reach the servers: by a checkpoint "folder" that they can read, or a "transfer" to vLLM's workers."""
    timeout_s: float = 600.0
    """Longest wait for one answer, seconds."""
    retries: int = 5
    """How often a request is sent again after a transport error."""
    max_wait_s: float = 900.0
    """Longest wait for a server that is starting or has died, seconds."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_wait_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"engine.{name} must be a positive number, got {value}")
        require(self.retries >= 0, f"engine.retries must be at least 0, got {self.retries}")
        if self.kind == "embedded":
            for name, field in type(self).__dataclass_fields__.items():
                is_default = getattr(self, name) == field.default
                require(is_default, f'engine.{name} does nothing with engine.kind "embedded"; set it to "vllm"')
        else:
            require(len(self.urls) > 0, f'engine.urls is missing: engine.kind "{self.kind}" needs at least one server')
            require(
                self.weights == "folder" or self.kind == "vllm",
                f'engine.weights "transfer" needs engine.kind "vllm", got "{self.kind}"',
            )
