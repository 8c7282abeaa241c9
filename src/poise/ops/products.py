"""Float32 matrix products on the CPU, by the library that is fast there.

torch gives them to MKL, which on other makers' CPUs than Intel's does without AVX-512. oneDNN, which torch ships too,
does not: it takes half the time. But torch hands it float32 products only where they may be rounded to bfloat16, a
permission that oneDNN can use on CPUs with AMX alone. So on CPUs with AVX-512 and without AMX it is given for the
length of one call, once trial products have shown that nothing is rounded.

oneDNN compiles a kernel for each shape it meets, which takes half a millisecond, and the number of an expert's rows is
never the same. So it gets 1024, 512, 256, 128 and 64 rows at a time, and MKL the few that are left.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_ROWS, MIN_ROWS = 1024, 64
# Matrices of fewer elements are done before a choice pays.
MIN_ELEMENTS = 2**14
# Of trial products, as a part of their largest number: float32 makes 5e-7, bfloat16 3e-3.
MAX_ERROR = 1e-5


def rows_times(
    rows: Float[Tensor, "R I"],
    matrix: Float[Tensor, "I O"],
    bias: Float[Tensor, " O"] | None = None,
    *,
    out: Float[Tensor, "R O"],
    is_added: bool = False,
) -> Tensor:
    """out = rows @ matrix + bias, or out += rows @ matrix where ``is_added``."""
    if not _is_onednns(rows, matrix.numel()):  # of few rows, as when sampling, what surrounds a product counts
        _rows_times(rows, matrix, bias, out, is_added, is_onednn=False)
        return out
    for part, is_onednn in _parts(rows, matrix.numel()):
        _rows_times(rows[part], matrix, bias, out[part], is_added, is_onednn=is_onednn)
    return out


def _rows_times(
    rows: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, is_added: bool, *, is_onednn: bool
) -> None:
    if is_added:
        _run(is_onednn, out.addmm_, rows, matrix)
    elif bias is None:
        _run(is_onednn, torch.mm, rows, matrix, out=out)
    else:
        _run(is_onednn, torch.addmm, bias, rows, matrix, out=out)


def sum_over_rows(
    left: Float[Tensor, "R I"], right: Float[Tensor, "R O"], *, out: Float[Tensor, "I O"], is_added: bool = False
) -> Tensor:
    """out = left^T right, or out += left^T right where ``is_added``."""
    for part, is_onednn in _parts(left, out.numel()):
        if is_added:
            _run(is_onednn, out.addmm_, left[part].t(), right[part])
        else:
            _run(is_onednn, torch.mm, left[part].t(), right[part], out=out)
        is_added = True
    return out


def linear(x: Float[Tensor, "T I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> Tensor:
    """``torch.nn.functional.linear`` with these products where they are the faster ones."""
    if not _is_onednns(x, weight.numel()):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():  # an autograd function costs as much as a small product
        return rows_times(x, weight.t(), bias, out=x.new_empty(len(x), len(weight)))
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rows_times(x, weight.t(), bias, out=x.new_empty(len(x), len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            rows_times(grad, weight, out=torch.empty_like(x)) if needs_x else None,
            sum_over_rows(grad, x, out=torch.empty_like(weight)) if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )


def _is_onednns(rows: Tensor, num_elements: int) -> bool:
    return (
        rows.shape[0] >= MIN_ROWS
        and num_elements >= MIN_ELEMENTS
        and rows.dtype == torch.float32
        and rows.device.type == "cpu"
        and why_not_onednn() is None
    )


def _parts(rows: Tensor, num_elements: int) -> Iterator[tuple[slice, bool]]:
    """(rows, whether oneDNN multiplies them); one part without rows where there are none."""
    start, num_rows = 0, len(rows)
    if _is_onednns(rows, num_elements):
        size = MAX_ROWS
        while size >= MIN_ROWS:
            if start + size <= num_rows:
                yield slice(start, start + size), True
                start += size
            else:
                size //= 2
    if start < num_rows or not num_rows:
        yield slice(start, num_rows), False


def _run(is_onednn: bool, function: Any, *operands: Tensor, **out: Tensor) -> None:
    if not is_onednn:
        function(*operands, **out)
        return
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        function(*operands, **out)
    finally:
        matmul.fp32_precision = before


@cache
def why_not_onednn() -> str | None:
    """Why float32 products stay with the library that torch takes; None where oneDNN gets the large ones.

    ``POISE_ONEDNN=0`` in the environment, read once, is a reason too.
    """
    if os.environ.get("POISE_ONEDNN") == "0":
        return "POISE_ONEDNN=0"
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return "torch was built without MKL or oneDNN"
    if reason := _of_cpu(Path("/proc/cpuinfo")):
        return reason
    if largest_error(partial(_run, True, torch.mm)) > MAX_ERROR:
        return "oneDNN rounds float32 products to bfloat16"
    return None


def _of_cpu(cpuinfo: Path) -> str | None:
    """What of the CPU speaks against oneDNN."""
    if not cpuinfo.exists():
        return "the CPU is unknown"
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    flags = fields.get("flags", "").split()
    if fields.get("vendor_id") in (None, "GenuineIntel"):
        return "MKL is made for this CPU"
    if "avx512f" not in flags:
        return "this CPU has no AVX-512"
    if any(flag.startswith("amx") for flag in flags):
        return "this CPU has AMX, with which oneDNN may round to bfloat16"
    return None


def largest_error(multiply: Callable[..., object]) -> float:
    """Of trial products by ``multiply(left, right, out=...)`` beside float64, as a part of their largest number."""
    generator = torch.Generator().manual_seed(0)
    rows, matrix = (torch.randn(shape, generator=generator) for shape in ((64, 256), (256, 128)))
    exact = rows.double() @ matrix.double()
    errors = []
    for left, right in ((rows, matrix), (rows, matrix.t().contiguous().t()), (rows.t().contiguous().t(), matrix)):
        out = torch.empty(64, 128)
        multiply(left, right, out=out)
        errors.append((out.double() - exact).abs().max() / exact.abs().max())
    return torch.stack(errors).max().item()
