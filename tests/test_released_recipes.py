"""The recipes for clusters: their plans, and the whole of each, shrunk, run through on the CPU."""

import json
import math
from dataclasses import replace

import pytest
from torchrun import finished

from poise.cli import run
from poise.recipes import RECIPES
from poise.recipes.released import RELEASED
from poise.recipes.shrink import shrunk

# Parameters of the released checkpoints, as their index files count them.
PARAMETERS = {"20b": 20_914_757_184, "120b": 116_829_156_672}


def size_of(recipe):
    return "120b" if "120b" in recipe.__name__ else "20b"


@pytest.mark.parametrize("recipe", RELEASED, ids=lambda recipe: recipe.__name__)
def test_a_recipe_is_planned_before_its_checkpoint_is_there(recipe, capsys):
    size = size_of(recipe)
    gpus = {"20b": 8, "120b": 64}[size]
    arguments = ["plan", recipe.__name__, f"--gpus={gpus}", "--gpu-memory=80GB", "--model.device=cpu"]
    assert run(arguments) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    degrees = {"20b": "data 1 x sequence 2 x expert 4", "120b": "data 2 x sequence 4 x expert 8"}[size]
    assert any(degrees in line for line in lines)
    (parameters,) = [line.split() for line in lines if line.startswith("parameters")]
    # Float32 shards: 4 bytes a parameter, over all GPUs.
    assert float(parameters[1]) == pytest.approx(4 * PARAMETERS[size] / gpus / 2**30, abs=6e-4)


@pytest.mark.parametrize("recipe", RELEASED, ids=lambda recipe: recipe.__name__)
def test_shrinking_keeps_all_but_sizes(recipe):
    whole, small = recipe(), shrunk(recipe())
    assert RECIPES[recipe.__name__] is recipe
    assert small.algorithm == whole.algorithm
    assert replace(small.task, num_train_rows=0 + whole.task.num_train_rows, num_test_rows=200) == whole.task
    assert small.run.recompute == whole.run.recompute == "block"
    assert (small.parallel.sequence_degree, small.parallel.expert_degree) == (2, 2)
    assert small.model.num_heads // small.model.num_kv_heads == 64 // 8


def rows_in(folder):
    path = folder / "rows.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_in(folder):
    (inside,) = folder.iterdir()
    return [json.loads(line) for line in (inside / "metrics.jsonl").read_text().splitlines()]


def printed_by(num_ranks, *arguments):
    code, printed = finished(num_ranks, *arguments)
    assert code == 0, printed
    return printed


def test_the_shrunk_recipe_runs_on_its_mesh(tmp_path):
    arguments = [f"--task.data={rows_in(tmp_path)}", f"--run.folder={tmp_path}/runs"]
    printed = printed_by(4, "train", "gpt_oss_20b", "--shrink", *arguments)
    assert "mesh: data 1 x sequence 2 x expert 2" in printed
    steps = metrics_in(tmp_path / "runs")
    assert [step["step"] for step in steps] == [1, 2]
    # Random weights over the bytes: trainer and engine agree on a nearly even distribution.
    assert steps[0]["mismatch_mean"] < 1e-6
    assert steps[0]["entropy"] == pytest.approx(math.log(262), abs=0.05)


@pytest.mark.parametrize(
    ("recipe", "degrees"),
    [
        ("gpt_oss_20b_retool", {"data": 2, "sequence": 1, "expert": 1}),
        ("gpt_oss_120b_verifyif", {"data": 1, "sequence": 2, "expert": 1}),
    ],
    ids=["20b_retool, data 2", "120b_verifyif, sequence 2"],
)
def test_a_shrunk_recipe_gives_two_ranks_the_numbers_of_one_process(tmp_path, recipe, degrees):
    arguments = ["train", recipe, "--shrink", "--run.steps=1"]
    if "verifyif" not in recipe:
        arguments.append(f"--task.data={rows_in(tmp_path)}")
    one = ["--sequence-degree=1", "--expert-degree=1", f"--run.folder={tmp_path}/one"]
    assert run([*arguments, *one]) == 0
    two = [f"--{name}-degree={degree}" for name, degree in degrees.items()]
    printed = printed_by(2, *arguments, *two, f"--run.folder={tmp_path}/two")
    assert "mesh: " + " x ".join(f"{name} {degree}" for name, degree in degrees.items()) in printed
    (ours,), (theirs,) = metrics_in(tmp_path / "two"), metrics_in(tmp_path / "one")
    assert ours["mismatch_mean"] < 1e-6
    for name, value in theirs.items():
        if not name.endswith("_s"):  # times
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def test_shrink_belongs_to_a_recipe(capsys, tmp_path):
    assert run(["train", "--resume", str(tmp_path), "--shrink"]) == 2
    assert "--shrink does nothing with --resume" in capsys.readouterr().err
