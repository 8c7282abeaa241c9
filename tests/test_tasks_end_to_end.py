"""Every task that reads files, from the command line to its metrics, on the real rows; the policy earns nothing."""

import json
import os
from pathlib import Path

import pytest

from poise.cli import run
from poise.train.checkpoint import latest_checkpoint

DATA = Path(os.environ.get("POISE_DATA", Path(__file__).parents[2] / "shared" / "data"))
TINY = {
    "hidden-size": 16, "intermediate-size": 12, "num-layers": 2, "num-heads": 2, "num-kv-heads": 1, "head-dim": 8,
    "num-experts": 4, "groups-per-step": 2, "group-size": 2, "max-turns": 2, "max-action-tokens": 8, "num-slots": 4,
    "tokens-per-microbatch": 9000, "max-context-tokens": 4000, "warm-start.steps": 1, "demonstrations-per-step": 2,
    "eval-problems": 3, "log-trajectories-every": 1, "model.device": "cpu", "run.steps": 1,
}  # fmt: skip
TASKS = {
    "gsm8k_tiny": ("gsm8k/train.jsonl", "gsm8k/test.jsonl", ("--tool=none",)),
    "retool_tiny": ("math/aime_1983_2023.json", "math/math500.jsonl", ("--no-code-penalty=0.5",)),
    "verifyif_tiny": ("gsm8k/train.jsonl", "ifeval/input_data.jsonl", ("--score=share",)),
}


@pytest.mark.parametrize("recipe", TASKS)
def test_train_then_eval(tmp_path, capsys, recipe):
    data, test_data, more = TASKS[recipe]
    if not all((DATA / name).is_file() for name in (data, test_data)):
        pytest.skip(f"the data is not here: set POISE_DATA to a folder with {data} and {test_data}")
    files = [f"--data={DATA / data}", f"--test-data={DATA / test_data}", *more]
    arguments = [*(f"--{key}={value}" for key, value in TINY.items()), f"--run.folder={tmp_path}", *files]
    assert run(["train", recipe, *arguments]) == 0
    (folder,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["num_problems"] == 3
        assert line["metrics"]["stop_env_error"] == 0.0
    if recipe == "retool_tiny":
        assert lines[1]["metrics"]["reward/no_code"] == -0.5
    if recipe == "verifyif_tiny":
        assert {"strict_prompt_accuracy", "loose_instruction_accuracy"} <= set(lines[1]["metrics"])
    assert run(["eval", str(latest_checkpoint(folder)), "--eval-problems=2"]) == 0
    assert "2 held-out problems" in capsys.readouterr().out
