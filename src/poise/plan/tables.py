"""What a plan is made for and of: ranks, and bytes by kind and phase."""

from collections.abc import Mapping
from dataclasses import dataclass

from poise.config import ConfigError

GIB = 2**30

Items = dict[str, int]
"""Kind -> bytes."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many ranks share the data, the tokens of a sequence, and the experts; their product is the number of GPUs.

    Every parameter, with its gradient and moments, is split over all ranks, in float32, and gathered block by block in
    the type of the computation; experts stay split over the ranks of their degree. Micro-batches are dealt to ``data``
    times ``expert`` places, whose ``sequence`` ranks share the rows of one. Each rank has an engine of its own.
    """

    data: int = 1
    sequence: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            if degree < 1:
                raise ConfigError(f"the {name} degree must be at least 1, got {degree}")

    @property
    def num_ranks(self) -> int:
        return self.data * self.sequence * self.expert


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank holds at the peak of each phase."""

    phases: Mapping[str, Items]

    @property
    def peak(self) -> int:
        return max(sum(items.values()) for items in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
