"""The tables and the curve of docs/smollm.md, from a run's folder and the files of `poise eval --trajectories`.

    python -m examples.verifyif_smollm.figures RUN EVALUATIONS docs/smollm.svg

EVALUATIONS holds NAME_mix.jsonl and NAME_ifeval.jsonl for NAME in upcycled, warm, grpo.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.verifyif_smollm.task import instructed

POINTS = {"upcycled": "upcycled", "warm": "after the warm start", "grpo": "after GRPO"}
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 48, 16


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def summary(episodes: Sequence[Mapping[str, Any]], *, by_instruction: bool = True) -> dict[str, float]:
    metrics = [episode["metrics"] for episode in episodes]
    row = {}
    for kind in ("strict", "loose"):
        row[f"prompts followed, {kind}"] = mean([m[f"{kind}_prompt_accuracy"] for m in metrics])
        if by_instruction:
            name = f"{kind}_instruction_accuracy"
            followed, given = (sum(m[f"{name}/{of}"] for m in metrics) for of in ("part", "whole"))
            row[f"instructions followed, {kind}"] = followed / given
    row["ended with a message"] = mean([episode["stop"] == "done" for episode in episodes])
    row["tokens of an answer"] = mean([sum(episode["response_mask"]) for episode in episodes])
    return row


def print_table(columns: Mapping[str, Mapping[str, float]], title: str) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in next(iter(columns.values())):
        digits = 1 if "tokens" in name else 3
        print(f"| {name} | {' | '.join(f'{column[name]:.{digits}f}' for column in columns.values())} |")


def by_instruction(episodes: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = defaultdict[str, list[float]](list)
    for episode in episodes:
        found[rows[episode["group_id"]]["instructions"][0]].append(episode["reward"])
    return {f"`{name}` ({len(found[name])})": mean(found[name]) for name in sorted(found)}


def curve(steps: Sequence[Mapping[str, float]], held_out: Sequence[tuple[int, float]]) -> str:
    last = max(step["step"] for step in steps)

    def at(step: float, value: float) -> str:
        return f"{LEFT + step / last * (WIDTH - LEFT - 16):.1f},{TOP + (1 - value) * (HEIGHT - TOP - 40):.1f}"

    def line(name: str, color: str) -> str:
        points = " ".join(at(step["step"], step[name]) for step in steps)
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        x1, y = at(0, tenth / 10).split(",")
        x2 = at(last, 0).split(",")[0]
        parts.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for step in range(0, int(last) + 1, 5):
        x, y = at(step, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{step}</text>')
    parts += [line("reward_mean", "#1f77b4"), line("stop_done", "#999")]
    for step, value in held_out:
        x, y = at(step, value).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#d62728"/>')
    legend = (("#1f77b4", "reward of the rollouts"), ("#999", "share that ended by itself"), ("#d62728", "held out"))
    for i, (color, text) in enumerate(legend):
        parts.append(f'<text x="{LEFT + 190 * i}" y="{HEIGHT - 6}" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(run: Path, evaluations: Path, image: Path) -> None:
    rows = instructed().test_rows
    mix = {title: read(evaluations / f"{name}_mix.jsonl") for name, title in POINTS.items()}
    columns = {title: summary(episodes, by_instruction=False) for title, episodes in mix.items()}
    print_table(columns, f"{len(rows)} held-out prompts")
    print_table({title: by_instruction(episodes, rows) for title, episodes in mix.items()}, "by instruction (prompts)")
    ifeval = {title: read(evaluations / f"{name}_ifeval.jsonl") for name, title in POINTS.items()}
    number = len(next(iter(ifeval.values())))
    print_table({title: summary(episodes) for title, episodes in ifeval.items()}, f"{number} prompts of IFEval")
    steps = [step for step in read(run / "metrics.jsonl") if "reward_mean" in step]
    held_out = [(line["step"], line["metrics"]["reward_mean"]) for line in read(run / "evaluations.jsonl")]
    image.write_text(curve(steps, held_out), encoding="utf-8")
    print("\n| steps | reward | ended with a message | tokens of an answer | groups of equal rewards | entropy |")
    print("|---|---|---|---|---|---|")
    names = ("reward_mean", "stop_done", "response_tokens_per_episode", "equal_groups", "entropy")
    for first in range(0, len(steps), 5):
        part = steps[first : first + 5]
        values = " | ".join(f"{mean([step[name] for step in part]):.2f}" for name in names)
        print(f"| {part[0]['step']:.0f}..{part[-1]['step']:.0f} | {values} |")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
