"""The benchmarks of memory and speed that need a quiet machine, one after the other: about 12 minutes on 2 cores.

    python benchmarks/quiet.py                     # all but the long ones
    python benchmarks/quiet.py experts-512 phases  # some
    python benchmarks/quiet.py --list

Each part is a command that also runs by itself; its output is printed as it comes, and its seconds after it.
"""

import subprocess
import sys
import time
from pathlib import Path

EXPERTS, LOG_PROBS = ("experts.py", "--threads", "2"), ("log_probs.py", "--threads", "2")
PARTS = {
    "experts-512": (*EXPERTS, "--sizes", "512", "--tokens", "64", "256", "1024", "4096", "16384", "--repeats", "5"),
    # batched_mm holds about 17 GiB here: the one size at which all four fit beside each other.
    "experts-batched": (*EXPERTS, "--sizes", "512", "--tokens", "512", "1024", "--repeats", "1", "--backward-only",
                        "--max-gib", "18"),
    # At 16,384 tokens only poise's own run counts: the others would take minutes.
    "experts-20b": (*EXPERTS, "--sizes", "2880", "--tokens", "1024", "4096", "16384", "--repeats", "1",
                    "--backward-only", "--max-seconds", "100"),
    "log-probs-256": (*LOG_PROBS, "--hidden", "256", "--tokens", "2048", "4096", "16384", "--repeats", "1"),
    "log-probs-2880": (*LOG_PROBS, "--hidden", "2880", "--tokens", "2048", "--repeats", "1"),
    "phases": ("phases.py",),
    "plan": ("plan.py",),
}  # fmt: skip
LONG = {
    "experts-20b-forward": (*EXPERTS, "--sizes", "2880", "--tokens", "1024", "4096", "16384", "--repeats", "1"),
    "log-probs-2880-16k": (*LOG_PROBS, "--hidden", "2880", "--tokens", "4096", "16384", "--repeats", "1",
                           "--max-seconds", "900"),
}  # fmt: skip


def main(names: list[str]) -> None:
    every = PARTS | LONG
    if "--list" in names:
        for name, command in every.items():
            print(f"{name:20} {' '.join(command)}{'   (long)' if name in LONG else ''}")
        return
    if unknown := [name for name in names if name not in every]:
        sys.exit(f"unknown part {unknown[0]}; known are {', '.join(every)}")
    for name in names or PARTS:
        script, *options = every[name]
        print(f"\n## {name}: python benchmarks/{script} {' '.join(options)}\n", flush=True)
        started = time.perf_counter()
        code = subprocess.run([sys.executable, str(Path(__file__).parent / script), *options], check=False).returncode
        print(f"\n{name}: {time.perf_counter() - started:.0f} s, exit code {code}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
