"""The embedded engine of a rank whose trainer holds only a part of the weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from poise.engine.embedded import EmbeddedEngine
from poise.model import GptOss


class GatheredEngine(EmbeddedEngine):
    """An engine with a copy of its own, ``model``, which each new version fills from ``gather``.

    ``gather()`` yields (name, whole tensor) of each parameter of the trainer, one at a time, in the order of the
    model's: all ranks take part, so all of them must call ``new_policy_version``. A version that is known is not
    gathered again.
    """

    def __init__(self, model: GptOss, gather: Callable[[], Iterable[tuple[str, Tensor]]], **options: Any) -> None:
        super().__init__(model, **options)
        self._gather = gather
        self._gathered: int | None = None

    @torch.no_grad()
    def new_policy_version(self, version: int, *, in_flight: bool = False) -> None:
        if version != self._gathered:
            for (name, value), (own, target) in zip(self._gather(), self.model.named_parameters(), strict=True):
                assert name == own
                target.copy_(value)
            self._gathered = version
        super().new_policy_version(version, in_flight=in_flight)
