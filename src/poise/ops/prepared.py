"""Matrices laid out once for the many small products of sampling.

A decode step multiplies a few rows with every matrix of the model, and so does the next. MKL and oneDNN bring a matrix
into the order that they want whenever they are called, which for a few rows is most of the work. Here oneDNN does it
once: from a few rows on, its products then take between two thirds and a third of the time.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from poise.ops.products import MAX_ERROR, largest_error, rows_times, why_not_onednn

# Multiplications of one product (rows x inputs x outputs) from which on it pays, with matrices that do not stay in the
# nearest caches anyway, ...
MIN_WORK = 2**19
MIN_ELEMENTS = 2**16
# ... and rows up to which: oneDNN compiles a kernel for each number of rows that it meets.
MAX_ROWS = 128


@dataclass(frozen=True)
class PreparedMatrix:
    """``plain`` [I, O], and a copy in oneDNN's layout, which does not follow what becomes of ``plain``.

    ``min_rows``: from so many on the copy is used.
    """

    plain: Tensor
    laid_out: Tensor
    min_rows: int

    def product(self, rows: Float[Tensor, "R I"], bias: Float[Tensor, " O"] | None) -> Float[Tensor, "R O"]:
        """rows @ plain + bias, without gradients."""
        num_rows = rows.shape[0]  # len() of a tensor takes a microsecond, here as often as there are experts
        if self.min_rows <= num_rows <= MAX_ROWS:
            return _product(rows, self.laid_out, bias)
        return rows_times(rows, self.plain, bias, out=rows.new_empty(num_rows, self.plain.shape[1]))


@dataclass(frozen=True)
class PreparedStack:
    """One ``PreparedMatrix`` an expert; ``shape`` [E, I, O]."""

    shape: torch.Size
    matrices: tuple[PreparedMatrix, ...]


@torch.no_grad()
def prepared_matrix(plain: Float[Tensor, "I O"]) -> PreparedMatrix:
    """As it is now."""
    return PreparedMatrix(plain.detach(), _laid_out(plain), min_rows=-(-MIN_WORK // plain.numel()))


def prepared_stack(stack: Float[Tensor, "E I O"]) -> PreparedStack:
    """As it is now."""
    return PreparedStack(stack.shape, tuple(map(prepared_matrix, stack.detach())))


def pays(num_elements: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of ``num_rows`` rows with a matrix of ``num_elements`` gain."""
    is_float32 = dtype == torch.float32 and device.type == "cpu"
    is_large = num_elements >= MIN_ELEMENTS and num_rows * num_elements >= MIN_WORK
    return is_float32 and is_large and is_exact()


@cache
def is_exact() -> bool:
    """Whether this CPU is one of those whose products oneDNN gets, and trial products are float32's."""

    def multiply(left: Tensor, right: Tensor, *, out: Tensor) -> None:
        out.copy_(_product(left.contiguous(), _laid_out(right), None))

    return why_not_onednn() is None and largest_error(multiply) <= MAX_ERROR


def _laid_out(matrix: Tensor) -> Tensor:
    # The number of rows is a hint: from 8 on the same layout comes out, and it takes any number of rows.
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), 32)
    return laid_out


def _product(rows: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, laid_out, bias, "none", [], "")
    return out
