"""How long a grade takes: real answers through the graders of the tasks, one after another and all at once.

python benchmarks/grading.py [--data FOLDER]   # with gsm8k/, math/ and ifeval/ inside
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from poise.envs.grading import is_right, number_in
from poise.envs.math_grading import find_answer, grade_math
from poise.envs.verifyif import grader_of

CHECKERS = "lm_eval.tasks.ifeval.instructions_registry"
Grade = Callable[[], Awaitable[object]]


async def measure(name: str, grades: Sequence[Grade]) -> None:
    await grades[0]()  # starts the graders and imports what they need
    seconds = []
    for grade in grades:
        started = time.perf_counter()
        await grade()
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    await asyncio.gather(*(grade() for grade in grades))
    at_once = len(grades) / (time.perf_counter() - started)
    quantiles = statistics.quantiles(seconds, n=100)
    print(
        f"| {name} | {len(grades)} | {1e3 * quantiles[49]:.2f} | {1e3 * quantiles[98]:.1f} | "
        f"{1e3 * max(seconds):.0f} | {at_once:.0f} |",
        flush=True,
    )


def gsm8k(folder: Path) -> list[Grade]:
    return [partial(is_right, answer, number_in(answer)) for answer in texts(folder)]


def expressions(folder: Path) -> list[Grade]:
    numbers = [number_in(answer) for answer in texts(folder)[:300]]
    return [partial(is_right, f"\\boxed{{{number} \\cdot 2 - {number}}}", number) for number in numbers]


def texts(folder: Path) -> list[str]:
    return [row["answer"] for row in read(folder / "test.jsonl")]


def math500(folder: Path) -> list[Grade]:
    # The sum keeps equal texts from being right without math-verify.
    return [
        partial(grade_math, f"{find_answer(row['solution']).text} + 0", row["answer"])
        for row in read(folder / "math500.jsonl")
    ]


def ifeval(folder: Path) -> list[Grade]:
    rows = {row["prompt"]: row for row in read(folder / "input_data.jsonl")}
    asked = [(rows[line["prompt"]], line["response"]) for line in read(folder / "gpt4_responses.jsonl")]
    probes = {n: k for row in rows.values() for n, k in zip(row["instruction_id_list"], row["kwargs"], strict=True)}
    pool = grader_of(CHECKERS, probes)
    return [
        partial(pool, CHECKERS, row["prompt"], row["instruction_id_list"], row["kwargs"], response)
        for row, response in asked
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    data = parser.parse_args().data
    print("| grade | answers | median, ms | 99%, ms | slowest, ms | at once, 1/s |\n|---|---|---|---|---|---|")
    await measure("gsm8k, a number", gsm8k(data / "gsm8k"))
    await measure("gsm8k, an expression", expressions(data / "gsm8k"))
    await measure("retool, MATH-500 by math-verify", math500(data / "math"))
    await measure("verifyif, a response of GPT-4", ifeval(data / "ifeval"))


if __name__ == "__main__":
    asyncio.run(main())
