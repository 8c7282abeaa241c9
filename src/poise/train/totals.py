"""Numbers of one optimizer step, gathered over its micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Totals:
    """Detached numbers of the micro-batches of one step, read once at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()

    def lower(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._extremes[name] = torch.minimum(self._extremes.get(name, value), value)

    def raise_(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._extremes[name] = torch.maximum(self._extremes.get(name, value), value)

    def cpu(self) -> "Totals":
        self._sums = {name: value.cpu() for name, value in self._sums.items()}
        self._extremes = {name: value.cpu() for name, value in self._extremes.items()}
        return self

    @classmethod
    def merged(cls, parts: "Sequence[Totals]") -> "Totals":
        """Those of several places together; what a place never counted is nothing there."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for part in parts:
            whole.add(**part._sums)
            for name, value in part._extremes.items():
                (whole.lower if name.endswith("_min") else whole.raise_)(**{name: value})
        return whole

    def per_token(self, num_tokens: int) -> dict[str, float]:
        means = {name: value.item() / num_tokens for name, value in self._sums.items()}
        return means | {name: value.item() for name, value in self._extremes.items()}


def correction_means(means: dict[str, float]) -> dict[str, float]:
    """Sums over tokens and sequences, each divided by the number of tokens, become means of their own kind.

    ``effective_samples``: (sum r)^2 / (n sum r^2) over the tokens' ratios trainer / engine, from 1 / n to 1.
    """
    num_sequences = means.pop("num_sequences")
    del means["rejected_sequences"], means["vetoed_sequences"]
    return means | {
        "effective_samples": means.pop("ratio_sum") ** 2 / means.pop("ratio_square_sum"),
        "mismatch_chi2": means.pop("chi2_sum"),
        "mismatch_chi2_sequence": means.pop("chi2_sequence_sum") / num_sequences,
        "perplexity_gap": means.pop("perplexity_gap_sum") / num_sequences,
        "correction_limited": means.pop("limited_tokens"),
    }
