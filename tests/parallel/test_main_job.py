"""`poise train` under torchrun: what one process does, and an end for all when one rank ends."""

import json
import os
import signal
from pathlib import Path

import pytest
from torchrun import finished, launched

from poise.cli import run

KEYS = {
    "hidden-size": 16, "intermediate-size": 12, "num-layers": 2, "num-heads": 2, "num-kv-heads": 1, "head-dim": 8,
    "num-experts": 4, "sliding-window": 16, "groups-per-step": 3, "group-size": 2, "max-turns": 1,
    "max-action-tokens": 12, "max-context-tokens": 256, "num-slots": 4, "tokens-per-microbatch": 300,
    "warm-start.steps": 2, "demonstrations-per-step": 5, "eval-problems": 5, "num-train-rows": 5, "num-test-rows": 5,
    "run.name": "t", "model.device": "cpu", "entropy-weight": 0.1, "warm-start.warmup-steps": 1, "save-every": 1,
    "kl-weight": 0.01,
}  # fmt: skip
ARGUMENTS = [f"--{key}={value}" for key, value in KEYS.items()]
FREE = ("_s", "per_s")  # endings of what may differ: times


def metrics_of(folder):
    (inside,) = Path(folder).iterdir()
    lines = [json.loads(line) for line in (inside / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(FREE)} for line in lines]


def evaluations_of(folder):
    (inside,) = Path(folder).iterdir()
    return [json.loads(line) for line in (inside / "evaluations.jsonl").read_text().splitlines()]


def rank_of(launcher, rank):
    """The process id of a local rank."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_child = status.read_text().rsplit(")", 1)[1].split()[1] == str(launcher.pid)
            environment = (status.parent / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if is_child and f"LOCAL_RANK={rank}".encode() in environment:
            return int(status.parent.name)
    raise AssertionError(f"torchrun has no rank {rank}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert run(["train", "arithmetic_tiny", *ARGUMENTS, "--run.steps=3", f"--run.folder={folder}"]) == 0
    return metrics_of(folder), evaluations_of(folder)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank's process in /proc")
def test_a_killed_rank_ends_all_and_one_process_goes_on(tmp_path, alone):
    printed = []
    arguments = ["train", "arithmetic_tiny", *ARGUMENTS, "--run.steps=4000", f"--run.folder={tmp_path}"]
    with launched(2, *arguments) as launcher:
        for line in launcher.stdout:
            printed.append(line)
            if line.startswith("step 2/"):
                os.kill(rank_of(launcher, 1), signal.SIGKILL)
                break
        else:
            pytest.fail("no second step:\n" + "".join(printed))
        printed += launcher.stdout.readlines()
        assert launcher.wait() != 0
    text = "".join(printed)
    assert [line for line in printed if line.startswith("poise:")] == [
        "poise: rank 1 is gone (killed, or out of memory), so all 2 ranks end; --resume goes on from the last "
        "checkpoint\n"
    ], text
    assert text.count("engine against trainer at step 0") == 1, "only one rank prints"
    (folder,) = tmp_path.iterdir()
    # The checkpoint of step 1 was whole before step 2 was saved; later ones may be.
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")]
    assert max(steps) >= 1
    for step in steps:
        if step > 2:  # as if it had been killed exactly there: what is compared are the first three steps
            (folder / "checkpoints" / f"step_{step:06d}").rename(folder / f"later_{step}")
    assert run(["train", "--resume", str(folder), "--run.steps=3"]) == 0
    ours, evaluations = metrics_of(tmp_path), evaluations_of(tmp_path)
    metrics, evaluations_alone = alone
    assert [line["step"] for line in ours] == [line["step"] for line in metrics]
    for mine, theirs in zip(ours, metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6), f"step {mine['step']}"
    for mine, theirs in zip(evaluations, evaluations_alone, strict=True):
        assert mine["metrics"] == pytest.approx(theirs["metrics"])


def test_a_mesh_that_cannot_be_is_refused_once(tmp_path):
    code, text = finished(2, "train", "arithmetic_tiny", *ARGUMENTS, "--sequence-degree=4", f"--run.folder={tmp_path}")
    assert code != 0
    sentence = "poise: parallel: 2 processes cannot be shared by sequence_degree 4 x expert_degree 1 = 4"
    assert [line for line in text.splitlines() if line.startswith("poise:")] == [sentence]
    assert not any(tmp_path.iterdir())


def test_without_torchrun_there_is_one_process(capsys):
    assert run(["train", "arithmetic_tiny", "--sequence-degree=2"]) == 2
    assert "1 process cannot be shared by sequence_degree 2" in capsys.readouterr().err
