"""`poise train ppo_tiny` under torchrun: its numbers are those of one process, which also goes on from there."""

import pytest
from test_main_job import ARGUMENTS, metrics_of
from torchrun import finished

from poise.cli import run

# A penalty on length, so that episodes of a policy that knows nothing earn differently.
PPO = ["train", "ppo_tiny", *ARGUMENTS, "--overlong=penalty", "--overlong-buffer-tokens=240", "--entropy-weight=0.1"]


def test_two_ranks_then_one_process(tmp_path):
    arguments = [*PPO, "--normalize-returns=popart"]
    assert run([*arguments, "--run.steps=3", f"--run.folder={tmp_path / 'alone'}"]) == 0
    code, printed = finished(2, *arguments, "--run.steps=2", f"--run.folder={tmp_path / 'ranks'}")
    assert code == 0, printed
    (folder,) = (tmp_path / "ranks").iterdir()
    assert run(["train", "--resume", str(folder), "--run.steps=3"]) == 0
    ours, theirs = metrics_of(tmp_path / "ranks"), metrics_of(tmp_path / "alone")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-3, abs=1e-5), f"step {mine['step']}"
    assert theirs[-1]["return_mean"] < 0
    assert theirs[-1]["value_loss"] > 0
