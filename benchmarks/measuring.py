"""What the benchmarks of experts and log-probs share: bytes held at most, seconds by turns, what would not fit."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
Clock = Callable[[], float]
# CPU seconds of all threads together: what counts on a machine that others use too, with one thread.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Result:
    """``note``: why there are no numbers."""

    seconds: float = 0.0
    peak_bytes: int = 0
    note: str = ""


def peak_bytes_of(run: Run) -> int:
    """Bytes that the CPU's allocator held at most at once, beyond those held before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts the bytes, is chatty
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    del result
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def seconds_by_turns(runs: dict[str, Run], repeats: int, clock: Clock) -> dict[str, float]:
    """The fastest of ``repeats`` turns each; all take turns, so that a slow moment of the machine meets all."""
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = clock()
            run()
            turns[name].append(clock() - started)
    return {name: min(seconds) for name, seconds in turns.items()}


def measured(
    runs: dict[str, Run],
    needed_bytes: dict[str, float],
    expected_seconds: dict[str, float],
    *,
    repeats: int,
    max_gib: float,
    max_seconds: float,
    clock: Clock,
) -> dict[str, Result]:
    """Time and peak of each run; left out, with the reason, what would need more than ``max_gib`` or ``max_seconds``.

    The first run of each counts its memory and warms it up; where it alone takes more than its share of
    ``max_seconds``, its own time stands (the profiler's cost is per operator and small).
    """
    results = {name: Result() for name in runs}
    turns = {}
    for name, run in runs.items():
        if needed_bytes.get(name, 0) > max_gib * 2**30:
            results[name].note = f"memory, about {needed_bytes[name] / 2**30:.0f} GiB"
        elif expected_seconds.get(name, 0) > max_seconds:
            results[name].note = f"time, about {expected_seconds[name]:.0f} s"
        else:
            started = clock()
            results[name].peak_bytes = peak_bytes_of(run)
            results[name].seconds = clock() - started
            if results[name].seconds * (repeats + 1) <= max_seconds:
                turns[name] = run
    for name, seconds in seconds_by_turns(turns, repeats, clock).items():
        results[name].seconds = seconds
    return results


def free_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def cells(result: Result, base: Result) -> list[str]:
    """Seconds and MiB with their ratios to ``base``."""
    if result.note:
        return [f"- ({result.note})", "-"]
    ratios = "" if result is base else f" ({result.seconds / base.seconds:.2f}x)"
    leaner = "" if result is base else f" ({result.peak_bytes / max(1, base.peak_bytes):.2f}x)"
    return [f"{result.seconds:.3f}{ratios}", f"{result.peak_bytes / 2**20:.0f}{leaner}"]


def where(threads: int, clock: str) -> str:
    machine = f"CPU, {threads} threads; torch {torch.__version__}"
    return f"{machine}; {clock} seconds; load before {os.getloadavg()[0]:.1f}; {time.strftime('%Y-%m-%d')}"
