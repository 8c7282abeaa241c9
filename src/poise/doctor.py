"""What ``poise doctor`` prints: versions, devices, kernels, sandbox and extras of this machine."""

import os
import platform
import re
import time
from collections.abc import Iterator
from importlib import metadata

import torch

from poise.ops import experts
from poise.ops.attention import KERNELS, chosen_kernel, unavailable_reason
from poise.ops.prepared import is_exact
from poise.ops.products import MIN_ROWS, why_not_onednn
from poise.sandbox import SandboxError, protection

HEAD_DIM = 64  # of the released GPT-OSS models
PACKAGES = ("poise", "torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "transformers", "trl", "numpy")

Row = tuple[str, str]


def diagnose() -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of each section, as soon as it is known."""
    yield "versions", versions()
    yield "devices", devices()
    for device in _devices():
        yield f"attention kernels, {_operands(device)}, head dim {HEAD_DIM}", kernels(device)
        yield f"expert kernels, {_operands(device)}", expert_kernels(device)
        yield f"log-prob kernels, {_operands(device)}", [("tiles", "runs: torch's products in float32, tile by tile")]
    yield "products on the CPU", [products(), number_types()]
    yield "sandbox", [sandbox()]
    yield "extras", extras()


def versions() -> list[Row]:
    return [("python", platform.python_version()), *((name, _version(name) or "not installed") for name in PACKAGES)]


def devices() -> list[Row]:
    rows = [("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for tensors, {_memory_gib():.0f} GiB")]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability = f"compute capability {properties.major}.{properties.minor}"
        rows.append((f"cuda:{i}", f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"))
    if len(rows) == 1:
        rows.append(("cuda", f"none; torch {torch.__version__} was built for {torch.version.cuda or 'the CPU alone'}"))
    return rows


def kernels(device: torch.device) -> list[Row]:
    """Each attention kernel with "runs", or why it does not; then what "auto" takes."""
    dtype = _dtype(device)
    reasons = {kernel: unavailable_reason(kernel, device, dtype, HEAD_DIM) for kernel in KERNELS}
    rows = [(kernel, "runs" if reason is None else f"no: {reason}") for kernel, reason in reasons.items()]
    return [*rows, ("auto", f"takes {chosen_kernel(device, dtype, HEAD_DIM)}")]


def expert_kernels(device: torch.device) -> list[Row]:
    """As ``kernels``, for the routed experts."""
    dtype = _dtype(device)
    reasons = {kernel: experts.unavailable_reason(kernel, device, dtype) for kernel in experts.KERNELS[1:]}
    rows = [(kernel, "runs" if reason is None else f"no: {reason}") for kernel, reason in reasons.items()]
    chosen = experts.chosen_kernel(device, dtype)
    why = "" if chosen == "grouped" else "; grouped is for bfloat16 on GPUs of compute capability 8.0 or higher"
    return [*rows, ("auto", f"takes {chosen}{why}; packed weights take loop")]


def products() -> Row:
    """Who multiplies float32 matrices."""
    if reason := why_not_onednn():
        return "float32", f"torch's choice of library: {reason}"
    sampling = ", and of few rows while sampling, with matrices laid out for it" if is_exact() else ""
    return "float32", f"oneDNN from {MIN_ROWS} rows on{sampling}; else MKL, which does without AVX-512 on this CPU"


def number_types() -> Row:
    """Times one matrix product in float32 and in bfloat16, which CPUs without AVX512-bf16 or AMX emulate."""
    seconds = {dtype: _matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    speed = "slower, as without instructions for it" if ratio > 1 else "this CPU has instructions for it"
    return "bfloat16", (
        f"a matrix product takes {ratio:.3g}x the time of float32's ({speed}); poise computes in float32 on any CPU, "
        f"where bfloat16 parameters save memory and no time"
    )


def sandbox() -> Row:
    try:
        return "protection", protection()
    except SandboxError as error:
        return "protection", f"NONE, snippets cannot run: {error}"


def extras() -> list[Row]:
    """What each optional extra of poise needs and whether it is installed."""
    needed: dict[str, list[str]] = {}
    for requirement in metadata.requires("poise") or []:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", requirement)
        if match and match[1] != "poise":
            needed.setdefault(match[2], []).append(match[1])
    rows = []
    for extra, packages in needed.items():
        missing = [package for package in packages if _version(package) is None]
        advice = f"missing {', '.join(missing)}: pip install 'poise[{extra}]'"
        rows.append((extra, advice if missing else f"installed ({', '.join(packages)})"))
    return rows


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _operands(device: torch.device) -> str:
    return f"{device}, {str(_dtype(device)).removeprefix('torch.')}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _matmul_seconds(dtype: torch.dtype, size: int = 384, repeats: int = 3) -> float:
    """The fastest of a few, the first not counted."""
    x = torch.ones(size, size, dtype=dtype)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
