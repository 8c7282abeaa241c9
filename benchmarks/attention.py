"""Attention with sinks, forward and backward: time and peak memory beside other implementations, as ratios.

"eager" is Transformers' attention of GPT-OSS, with sinks. "sdpa" is torch's scaled_dot_product_attention *without*
sinks: what exact sinks cost is the ratio to it. It has no window, so under a window it gets a mask. With --device cuda
also FlashAttention 2, 3, 4 and flex_attention, all without sinks, where they are installed and run.

All run in this one process and take turns; the fastest of a few turns counts. Memory is what the allocator held at
most at once beyond the operands, the gradients included. Cases that would not fit into memory or take too long are left
out and said so. One sequence, causal.

    python benchmarks/attention.py [--device cuda] [--tokens 512 1024 2048 4096 8192 16384] [--threads 2]
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from poise.ops.attention import chosen_kernel, sink_attention, unavailable_reason
from poise.ops.attention_flash import MODULES

EAGER_MATRICES = 3.5  # [H, T, T] tensors that eager attention holds at once


@dataclass(frozen=True)
class Case:
    tokens: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int

    def operand(self, heads: int, *, is_batched: bool) -> torch.Tensor:
        """[T, heads, C], or [1, heads, T, C]."""
        shape = (1, heads, self.tokens, self.head_dim) if is_batched else (self.tokens, heads, self.head_dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def operands(self, *, is_batched: bool) -> tuple[torch.Tensor, ...]:
        return tuple(self.operand(heads, is_batched=is_batched) for heads in (self.heads, self.kv_heads, self.kv_heads))

    def sinks(self) -> torch.Tensor:
        return torch.randn(self.heads, dtype=self.dtype, device=self.device, requires_grad=True)

    def seen(self) -> torch.Tensor:
        """bool [T, T]: which keys a query sees."""
        ones = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=self.device).tril_()
        return ones if self.window is None else ones.triu_(1 - self.window)


# --- what is compared: each makes its operands and returns one forward and backward ---

Run = Callable[[], None]


def differentiated(forward: Callable[[], torch.Tensor], *operands: torch.Tensor) -> Run:
    with torch.no_grad():
        grad = torch.randn_like(forward())

    def run() -> None:
        torch.autograd.grad(forward(), operands, grad)

    return run


def poise(case: Case) -> Run:
    q, k, v = case.operands(is_batched=False)
    sinks = case.sinks()
    cu_seqlens = torch.tensor([0, case.tokens], dtype=torch.int32, device=case.device)
    return differentiated(
        lambda: sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=case.window), q, k, v, sinks
    )


def eager(case: Case) -> Run:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = case.operands(is_batched=True)
    sinks = case.sinks()
    module = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads, sinks=sinks, training=True)
    mask = torch.zeros(case.tokens, case.tokens, dtype=case.dtype, device=case.device)
    mask = mask.masked_fill_(~case.seen(), torch.finfo(case.dtype).min)[None, None]
    scaling = case.head_dim**-0.5
    return differentiated(lambda: eager_attention_forward(module, q, k, v, mask, scaling=scaling)[0], q, k, v, sinks)


def sdpa(case: Case) -> Run:
    q, k, v = case.operands(is_batched=True)
    mask = None if case.window is None else case.seen()
    return differentiated(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ),
        q, k, v,
    )  # fmt: skip


def flash(version: int, case: Case) -> Run:
    if reason := unavailable_reason(f"flash{version}", case.device, case.dtype, case.head_dim):
        raise NotImplementedError(reason)
    module = next(m for name in MODULES[version] if (m := _module(name)) is not None)
    q, k, v = case.operands(is_batched=False)
    cu_seqlens = torch.tensor([0, case.tokens], dtype=torch.int32, device=case.device)
    unlimited = None if version == 4 else -1
    sides = (unlimited, unlimited) if case.window is None else (case.window - 1, 0)

    def forward() -> torch.Tensor:
        result = module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=case.tokens,
            max_seqlen_k=case.tokens, causal=True, window_size=sides,
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    return differentiated(forward, q, k, v)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def flex(case: Case) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window = case.tokens if case.window is None else case.window

    def seen(batch, head, i, j):
        return (i >= j) & (i - j < window)

    q, k, v = case.operands(is_batched=True)
    blocks = create_block_mask(seen, None, None, case.tokens, case.tokens, device=case.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return differentiated(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True), q, k, v)


FLASHES: dict[str, Callable[[Case], Run]] = {f"flash{version}": partial(flash, version) for version in MODULES}
METHODS = {"poise": poise, "eager": eager, "sdpa": sdpa, **FLASHES, "flex": flex}


# --- measuring ---


def seconds_of(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def peak_bytes_of(run: Run, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@dataclass
class Result:
    """``note``: why there are no numbers."""

    seconds: float = 0.0
    peak_bytes: int = 0
    note: str = ""


def why_not(name: str, case: Case, budget: argparse.Namespace, shorter: Result | None) -> str:
    if shorter is not None and shorter.note in ("memory", "time"):
        return shorter.note
    element = torch.empty((), dtype=case.dtype).element_size()
    needed = EAGER_MATRICES * case.heads * case.tokens**2 * element if name == "eager" else 0.0
    if needed > budget.max_gib * 2**30:
        return "memory"
    # Twice the tokens take up to four times as long; each case runs repeats + 3 times.
    if shorter is not None and 4 * shorter.seconds * (budget.repeats + 3) > budget.max_seconds:
        return "time"
    return ""


def measure(case: Case, names: list[str], budget: argparse.Namespace, shorter: dict[str, Result]) -> dict[str, Result]:
    results, runs = {}, {}
    for name in names:
        results[name] = Result(note=why_not(name, case, budget, shorter.get(name)))
        if not results[name].note:
            try:
                runs[name] = METHODS[name](case)
            except ImportError:
                results[name].note = "not installed"
            except NotImplementedError as error:
                results[name].note = str(error)
    for name, run in runs.items():
        run()  # not counted
        results[name].peak_bytes = peak_bytes_of(run, case.device)
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(budget.repeats):
        for name, run in runs.items():
            turns[name].append(seconds_of(run, case.device))
    for name, seconds in turns.items():
        results[name].seconds = min(seconds)
    return results


# --- reporting ---


def row(case: Case, results: dict[str, Result], others: list[str]) -> str:
    poise_result = results["poise"]
    cells = [
        f"{case.tokens}",
        "full" if case.window is None else f"{case.window}",
        str(case.dtype).removeprefix("torch."),
        f"{poise_result.seconds * 1e3:.1f}",
        f"{poise_result.peak_bytes / 2**20:.1f}",
    ]
    for name in others:
        result = results[name]
        if result.note:
            cells += [f"- ({result.note})", "-"]
        else:
            cells += [
                f"{result.seconds / poise_result.seconds:.2f}x",
                f"{result.peak_bytes / poise_result.peak_bytes:.2f}x",
            ]
    return f"| {' | '.join(cells)} |"


def aims(found: dict[tuple[int, int | None, torch.dtype], dict[str, Result]], window: int) -> list[str]:
    """The aims that these cases speak of, in float32: what was wanted and what was measured."""
    lines = []
    for (tokens, seen, dtype), results in found.items():
        if dtype == torch.float32 and seen is None and "sdpa" in results and results["sdpa"].seconds:
            ratio = results["poise"].seconds / results["sdpa"].seconds
            verdict = "met" if ratio <= 1.1 else "MISSED"
            lines.append(f"full, {tokens}: at most 1.1x the time of SDPA without sinks: {ratio:.2f}x, {verdict}")
    at_8k, at_16k = (found.get((tokens, window, torch.float32)) for tokens in (8192, 16384))
    if at_8k and "eager" in at_8k and at_8k["eager"].seconds:
        ratio = at_8k["eager"].seconds / at_8k["poise"].seconds
        verdict = "met" if ratio >= 30 else "MISSED"
        lines.append(f"window {window}, 8192: at least 30x faster than eager: {ratio:.0f}x, {verdict}")
    if at_8k and at_16k:
        ratio = at_16k["poise"].seconds / at_8k["poise"].seconds
        verdict = "met" if ratio <= 2.2 else "MISSED"
        lines.append(f"window {window}: 16384 tokens cost at most 2.2x of 8192: {ratio:.2f}x, {verdict}")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--window", type=int, default=128, help="of the sliding cases")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--others", nargs="*", choices=[n for n in METHODS if n != "poise"], help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="per case and implementation, all turns")
    parser.add_argument("--max-gib", type=float, default=None, help="of one case; default 0.7 of what is free")
    args = parser.parse_args()
    if args.max_gib is None:
        cuda = args.device.startswith("cuda")
        pages = os.sysconf("SC_AVPHYS_PAGES") if not cuda else 0
        free = torch.cuda.mem_get_info(args.device)[0] if cuda else pages * os.sysconf("SC_PAGE_SIZE")
        args.max_gib = 0.7 * free / 2**30
    return args


def main() -> None:
    args = parse()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts the bytes, is chatty
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    on_cuda = [*FLASHES, "flex"] if device.type == "cuda" else []
    others = ["eager", "sdpa", *on_cuda] if args.others is None else args.others
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} threads"
    print(f"{where}; torch {torch.__version__}; {args.heads} query heads, {args.kv_heads} key heads, {args.head_dim}")
    for name in args.dtypes:
        print(f"{name}: poise runs {chosen_kernel(device, getattr(torch, name), args.head_dim)}")
    print("Times and peaks of the others are multiples of poise's: above 1x poise is faster, or holds less.\n")
    titles = [
        "tokens",
        "window",
        "type",
        "poise ms",
        "poise MiB",
        *(f"{o} {x}" for o in others for x in ("time", "peak")),
    ]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    found: dict[tuple[int, int | None, torch.dtype], dict[str, Result]] = {}
    first = Case(0, None, torch.float32, device, args.heads, args.kv_heads, args.head_dim)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for window in (None, args.window):
            shorter: dict[str, Result] = {}
            for tokens in sorted(args.tokens):
                case = replace(first, tokens=tokens, window=window, dtype=dtype)
                shorter = found[tokens, window, dtype] = measure(case, ["poise", *others], args, shorter)
                print(row(case, shorter, others), flush=True)
    print("\n- (memory): would not fit; - (time): would take too long.")
    print("\n".join(aims(found, args.window)))


if __name__ == "__main__":
    main()
