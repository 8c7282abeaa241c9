"""The keys of runs on more than one process."""

from dataclasses import dataclass

from poise.config.errors import require


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes that torchrun started share the work; their number is data x sequence x expert."""

    data_degree: int = 0
    """Ranks that train on different micro-batches; 0: as many as the other two degrees leave."""
    sequence_degree: int = 1
    """Ranks that share the tokens of a micro-batch and split the heads; divides the query heads."""
    expert_degree: int = 1
    """Ranks that split the experts among them, each with micro-batches of its own; divides the experts."""
    offload: bool = False
    """Keep parameters and optimizer states in host memory between uses (GPUs only)."""

    def __post_init__(self) -> None:
        for name, least in (("data_degree", 0), ("sequence_degree", 1), ("expert_degree", 1)):
            value = getattr(self, name)
            require(value >= least, f"parallel.{name} must be at least {least}, got {value}")
