"""The command line from outside: runs, resumes, refuses, stops."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from poise.cli import run
from poise.cli.keys import for_task_of, full_key
from poise.config import Config, ConfigError, TaskConfig
from poise.train.checkpoint import STATE_FILE, latest_checkpoint

# A policy of a few thousand parameters; five problems and two per step, so that six steps cross two epoch borders.
TINY = [
    "--hidden-size=16", "--intermediate-size=12", "--num-layers=2", "--num-heads=2", "--num-kv-heads=1", "--head-dim=8",
    "--num-experts=4", "--groups-per-step=2", "--group-size=2", "--max-turns=2", "--max-action-tokens=12",
    "--max-context-tokens=256", "--num-slots=4", "--tokens-per-microbatch=300", "--warm-start.steps=2",
    "--demonstrations-per-step=4", "--eval-problems=3", "--num-train-rows=5", "--num-test-rows=3",
    "--log-trajectories-every=3", "--run.name=t", "--device=cpu",
    # So small a policy earns no reward; the entropy bonus gives it a gradient all the same.
    "--entropy-weight=0.1",
]  # fmt: skip
# What depends on the clock, and so differs between any two runs.
TIMES = ("_s", "tokens_per_s")


def train(folder: Path, *args: str) -> int:
    return run(["train", "arithmetic_tiny", *TINY, f"--folder={folder}", *args])


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]


def weights_of(folder: Path):
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return {k: v for file in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_weights(first: Path, second: Path) -> None:
    expected, found = weights_of(first), weights_of(second)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.equal(found[name]), name


INTERRUPTED = """
import os, sys
from poise.cli import run
from poise.metrics import MetricsWriter

class Interrupting(MetricsWriter):
    num_left = int(sys.argv[1])

    def write(self, step, metrics):
        super().write(step, metrics)
        Interrupting.num_left -= 1
        if Interrupting.num_left == 0:
            os.kill(os.getpid(), int(sys.argv[2]))

import poise.jobs
poise.jobs.MetricsWriter = Interrupting
sys.exit(run(sys.argv[3:]))
"""


def interrupt(folder: Path, *args: str, number: int = signal.SIGINT, when_lines: int) -> str:
    """A run in another process that gets a signal when metrics.jsonl has ``when_lines``; returns what it complained.

    It sends the signal itself: one from here could come when the run is over.
    """
    arguments = ["train", "arithmetic_tiny", *TINY, f"--folder={folder}", *args]
    command = [sys.executable, "-c", INTERRUPTED, str(when_lines), str(int(number)), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 130, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--kl-weight=0.1", "--updates-per-batch=2", "--replay-routes=trainer"),
        ("--max-resamples=1", "--replay-routes=engine", "--kl-weight=0.1", "--kl-in=reward", "--lockstep=True"),
        # The penalty on length is the only reward that so small a policy earns, and what its critic learns.
        (
            "--normalize-advantages=gae",
            "--overlong=penalty",
            "--overlong-buffer-tokens=200",
            "--updates-per-batch=2",
            "--normalize-returns=popart",
            "--pretrain-steps=1",
            "--kl-weight=0.1",
            "--kl-in=reward",
            "--lockstep=True",
        ),
        (
            "--normalize-advantages=gae",
            "--overlong=penalty",
            "--overlong-buffer-tokens=200",
            "--backbone=shared",
            "--group-size=1",
            "--lockstep=True",
        ),
    ],
    ids=["plain", "kl, two updates", "resampled, replayed", "critic", "shared critic"],
)
def test_six_steps_equal_three_and_three_more(tmp_path, extra):
    assert train(tmp_path / "whole", "--run.steps=6", *extra) == 0
    assert train(tmp_path / "parts", "--run.steps=3", *extra) == 0
    assert run(["train", "--resume", str(tmp_path / "parts/t-001"), "--run.steps=6"]) == 0
    whole, parts = tmp_path / "whole/t-001", tmp_path / "parts/t-001"
    assert_same_weights(whole, parts)
    assert metrics_of(whole) == metrics_of(parts)
    if "--normalize-advantages=gae" in extra:
        last = metrics_of(whole)[-1]
        assert last["value_loss"] > 0
        assert last["value_mean"] != 0
        saved, resumed = (
            torch.load(latest_checkpoint(folder) / STATE_FILE, weights_only=True)["critic"] for folder in (whole, parts)
        )
        assert saved["model"]["head.weight"].any()
        assert all(value.equal(resumed["model"][name]) for name, value in saved["model"].items())
    # The updates were no trifle: the weights have left the warm start behind.
    warm = load_file(whole / "checkpoints/step_000000/model.safetensors")
    assert not weights_of(whole)["lm_head.weight"].equal(warm["lm_head.weight"])
    assert json.loads((parts / "config.json").read_text())["run"]["steps"] == 6
    assert [line["step"] for line in metrics_of(whole)] == [-1, 0, 1, 2, 3, 4, 5, 6]


def test_a_run_writes_its_folder_and_overwrites_none(tmp_path):
    for _ in range(2):
        assert train(tmp_path, "--run.steps=3") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t-001", "t-002"]
    folder = tmp_path / "t-001"
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["hidden_size"] == 16
    assert config["rollout"]["group_size"] == 2
    last = metrics_of(folder)[-1]
    assert last["ratio_min"] == last["ratio_max"] == 1.0
    assert last["clip_fraction"] == 0.0
    assert last["mismatch_max"] < 1e-4
    for name in ("reward_mean", "reward_std", "equal_groups", "episode_turns", "episode_tokens", "entropy", "grad_norm",
                 "stop_done", "stop_max_tokens", "mismatch_mean", "mismatch_k3"):  # fmt: skip
        assert name in last
    lines = [json.loads(line) for line in (folder / "trajectories/step_000003.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert len(line["token_ids"]) == len(line["response_mask"]) == len(line["rollout_log_probs"])
        assert line["text"].startswith("<|start|>user<|message|>")
        assert line["stop"] in ("done", "max_turns", "max_tokens", "parse_error")
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evaluations] == [0, 3]
    assert (folder / "checkpoints/step_000003/config.json").exists()


def test_sft_then_eval(tmp_path, capsys):
    assert run(["sft", "arithmetic_tiny", *TINY, f"--folder={tmp_path}"]) == 0
    capsys.readouterr()
    episodes = tmp_path / "said/episodes.jsonl"
    to_file = f"--trajectories={episodes}"
    assert run(["eval", str(tmp_path / "t-001"), "--eval-problems=2", to_file]) == 0
    printed = capsys.readouterr().out
    assert "reasoning_gym: 2 held-out problems" in printed
    assert "stopped: max tokens" in printed
    lines = [json.loads(line) for line in episodes.read_text().splitlines()]
    assert [line["episode_id"] for line in lines] == ["eval/0", "eval/1"]
    assert all(line["text"].startswith("<|start|>user<|message|>") for line in lines)
    assert run(["eval", str(tmp_path / "t-001"), to_file]) == 2
    assert f"{episodes} exists: nothing is overwritten" in capsys.readouterr().err
    # A checkpoint folder works as well as a run folder.
    assert run(["eval", str(tmp_path / "t-001/checkpoints/step_000000")]) == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["train", "arithmetic_tiny", "--group-sise", "4"], "unknown key --group-sise; did you mean --group-size"),
        (["train", "arithmetic_tiny", "--steps", "4"], "--steps is ambiguous: --warm-start.steps, --run.steps"),
        (["train", "arithmetic_tiny", "--group-size=1"], "rollout.group_size must be at least 2"),
        (["train", "arithmetic_tiny", "--top-p=0.9"], "rollout.top_p must be 1.0 in training, got 0.9"),
        (["train", "arithmetic_tiny", "--sliding-window=4096"], "model.sliding_window (4096) is larger than"),
        (["train", "arithmetic_tiny", "--num-kv-heads=3"], "must be a multiple of model.num_kv_heads (3)"),
        (["train", "gsm8k_tiny", "--data=/nowhere/train.jsonl"], "/nowhere/train.jsonl"),
        (["train", "arithmetic_tiny", "--model.path=/nowhere"], "model.path /nowhere"),
        (["train", "arithmetic_tiny", "--dataset=no_such_set"], "no_such_set"),
        (["train", "arithmetic_tiny", "--num-slots=100000000"], "GiB"),
        (["train", "nonesuch"], "unknown recipe nonesuch; known are arithmetic_tiny, gsm8k_tiny"),
        (["train"], "name a recipe"),
        (["train", "--resume", "/nowhere"], "/nowhere/config.json does not exist"),
        (["eval", "/nowhere"], "/nowhere does not exist"),
        (["eval"], "needs a checkpoint folder"),
        (["train", "arithmetic_tiny", "--device=gpu"], 'model.device must be "auto", "cpu", "cuda" or "cuda:N"'),
        (["train", "arithmetic_tiny", "--device=cuda:99"], "model.device cuda:99 is not there"),
        (["train", "arithmetic_tiny", "--entropy-weight=nan"], "algorithm.entropy_weight must be a finite number"),
        (["train", "arithmetic_tiny", "--dataset=word_sorting"],
         "offers no demonstration for any of 2000 rows: set warm_start.steps to 0"),
        (["train", "arithmetic_tiny", "--max-context-tokens=30", "--max-action-tokens=20", "--num-train-rows=3"],
         "offers no demonstration that fits rollout.max_context_tokens (30): the shortest of 3 rows takes"),
        (["train", "arithmetic_tiny", "--data=x.jsonl"], "--task.data does nothing for task reasoning_gym"),
        (["train", "arithmetic_tiny", "--model.path=x", "--hidden-size=8"], "does nothing beside model.path"),
        (["train", "gsm8k_tiny"], "task.data is required"),
        (["train", "arithmetic_tiny", "--max-context-tokens=200000", "--tokens-per-microbatch=200000", "--num-slots=1"],
         "exceeds the 131072 positions of the model"),
        (["sft", "arithmetic_tiny", "--warm-start.steps=0"], "warm_start.steps is 0"),
        (["fly"], "unknown command fly"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(args, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(args) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left


def test_folders_that_cannot_be_evaluated_are_refused(tmp_path, capsys):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text("not json")
    assert run(["sft", "arithmetic_tiny", *TINY, f"--folder={tmp_path}"]) == 0
    weightless = tmp_path / "t-001/checkpoints/step_000000"
    for file in weightless.glob("*.safetensors*"):
        file.unlink()
    capsys.readouterr()
    cases = {"run": "holds no checkpoint yet", "text": "model.path", "t-001/checkpoints/step_000000": "safetensors"}
    for name, sentence in cases.items():
        assert run(["eval", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err.strip()
        assert sentence in error
        assert "\n" not in error
    assert run(["eval", str(tmp_path / "t-001"), "--max-resamples=2"]) == 2
    assert "--algorithm.* does nothing in poise eval" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        run(["train", "arithmetic_tiny", "--group-size=many"])
    assert refused.value.code == 2
    assert "group-size" in capsys.readouterr().err


def test_keys():
    assert full_key("--group-size") == "--rollout.group-size"
    assert full_key("--group_size=8") == "--rollout.group-size=8"
    assert full_key("--run.steps=a=b") == "--run.steps=a=b"
    assert full_key("--task") == "--task.name"
    with pytest.raises(ConfigError, match="ambiguous"):
        full_key("--seed")


def test_resume_changes_only_what_can_change(tmp_path, capsys):
    assert train(tmp_path, "--run.steps=2") == 0
    capsys.readouterr()
    for key in ("--hidden-size=32", "--group-size=4", "--beta1=0.5", "--run.seed=3", "--updates-per-batch=2"):
        assert run(["train", "--resume", str(tmp_path / "t-001"), key]) == 2
        name = full_key(key)[2:].split("=")[0].replace("-", "_")
        assert f"--resume cannot change {name}; it can change" in capsys.readouterr().err
    assert run(["train", "--resume", str(tmp_path / "t-001"), "--run.steps=1"]) == 2
    assert "run.steps (1) is below the 2 steps" in capsys.readouterr().err


def test_a_mismatch_above_the_bound_stops_before_the_first_update(tmp_path, capsys):
    assert train(tmp_path, "--max-mismatch=1e-12") == 1
    error = capsys.readouterr().err
    assert "trainer and engine differ by" in error
    assert "the bound on the mean is 1e-12" in error
    assert "Traceback" not in error
    assert latest_checkpoint(tmp_path / "t-001").name == "step_000000"


def test_another_task_has_other_rows():
    task = TaskConfig(name="gsm8k", data="train.jsonl", test_data="test.jsonl", tool="function")
    assert for_task_of(Config(task=task), ["--task=retool"]).task == TaskConfig(name="retool", tool="function")
    assert for_task_of(Config(task=task), ["--task", "gsm8k"]).task == task


def test_prompts_that_do_not_fit_are_said_to_be_the_reason(tmp_path, capsys):
    assert train(tmp_path, "--max-context-tokens=20", "--warm-start.steps=0", "--entropy-weight=0") == 1
    said = "no group with two episodes that can be trained on: of 4, the prompts of 4 do not fit"
    assert f"{said} rollout.max_context_tokens (20)" in " ".join(capsys.readouterr().err.split())


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["train", "arithmetic_tiny", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for key in ("--rollout.temperature", "--algorithm.clip-high", "--warm-start.learning-rate", "--run.save-every"):
        assert key in printed
    assert "Episodes per problem." in printed


def test_recipes_are_listed(capsys):
    assert run(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert "arithmetic_tiny" in printed
    assert "gsm8k_tiny" in printed


@pytest.mark.parametrize("command", ["recipes", "plan arithmetic_tiny", "plan arithmetic_tiny --help", "train"])
def test_a_command_ends_quietly_when_nobody_reads_on(tmp_path, command):
    # As in `poise plan RECIPE | head -3`; a shell says 128 + 13 of a program that SIGPIPE has ended.
    words = command.split() if command != "train" else ["train", "arithmetic_tiny", *TINY, f"--folder={tmp_path}"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "poise", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_exits_130(tmp_path, number):
    folder = tmp_path / "t-001"
    error = interrupt(tmp_path, "--run.steps=100000", "--save-every=100000", number=number, when_lines=5)
    assert f"interrupted; the state was saved, and poise train --resume {folder} goes on" in error
    steps_done = metrics_of(folder)[-1]["step"]
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint.name == f"step_{steps_done:06d}"
    # and it goes on from there
    assert run(["train", "--resume", str(folder), f"--run.steps={steps_done + 1}"]) == 0
    assert metrics_of(folder)[-1]["step"] == steps_done + 1


def test_an_interrupted_warm_start_goes_on_as_if_nothing_had_happened(tmp_path):
    settings = ["--warm-start.steps=200", "--run.steps=2", "--save-every=70"]
    interrupt(tmp_path / "parts", *settings, when_lines=10)
    parts, whole = tmp_path / "parts/t-001", tmp_path / "whole/t-001"
    assert len(metrics_of(parts)) < 200
    assert run(["train", "--resume", str(parts)]) == 0
    assert train(tmp_path / "whole", *settings) == 0
    assert_same_weights(whole, parts)
    assert metrics_of(whole) == metrics_of(parts)


@pytest.mark.parametrize("key", ["--clip-low=0.1", "--clip-high=0.1", "--loss=dual_clip --dual-clip=2"])
def test_a_bound_on_ratios_that_are_all_one_is_refused(key, capsys):
    assert run(["train", "arithmetic_tiny", *key.split()]) == 2
    assert "does nothing with algorithm.updates_per_batch 1: every ratio is exactly 1" in capsys.readouterr().err
