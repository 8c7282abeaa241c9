"""Whole runs of ``poise train`` that sample from vLLM."""

import contextlib
import json
import os
import shlex
import signal
import threading

import pytest
from conftest import ENVIRONMENT, FLAGS, PYTHON
from serving import reserved_port

from poise.config import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WarmStartConfig,
)
from poise.console import Bar, Console
from poise.jobs import train_job


def config_of(folder, engine, **run):
    return Config(
        model=ModelConfig(
            hidden_size=64, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=4,
            sliding_window=16, rope="default", device="cpu",
        ),
        task=TaskConfig(num_train_rows=6, num_test_rows=2, describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=3, group_size=2, max_turns=2, max_action_tokens=16, max_context_tokens=300, num_slots=8,
            lockstep=True,
        ),
        algorithm=AlgorithmConfig(entropy_weight=0.1, max_mismatch=1e-4),  # a gradient also where all rewards are equal
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0),
        warm_start=WarmStartConfig(steps=3, demonstrations_per_step=4),
        run=RunConfig(**({"steps": 3, "folder": str(folder), "name": "t", "eval_problems": 2,
                          "log_trajectories_every": 1, "save_every": 50, "tokens_per_microbatch": 600} | run)),
        engine=engine,
    )  # fmt: skip


class At(Console):
    """Calls ``act`` when the rollout of ``step`` begins."""

    def __init__(self, step, act):
        super().__init__()
        self.step, self.act, self.lines = step, act, []

    def line(self, text):
        self.lines.append(text)

    @contextlib.contextmanager
    def bar(self, description, total):
        if description == f"step {self.step} rollout":
            self.act()
        yield Bar()


def left_behind(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= 1]
    prompts = {}
    for path in sorted((folder / "trajectories").iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        prompts[path.name] = [row["text"].split("<|start|>assistant")[0] for row in rows]
    return [line["step"] for line in steps], prompts, steps


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return left_behind(train_job(config_of(tmp_path_factory.mktemp("embedded"), EngineConfig()), Console()))


def command(tmp_path):
    """As a user would give it; the process id is written down."""
    flags = " ".join(shlex.quote(flag) for flag in FLAGS)
    script = tmp_path / "serve.sh"
    script.write_text(
        f"echo $$ > {tmp_path}/pid\n"
        + "".join(f"export {key}={value}\n" for key, value in ENVIRONMENT.items())
        + f'exec {PYTHON} -m vllm.entrypoints.openai.api_server --model "$1" --host 127.0.0.1 --port "$2" {flags}\n'
    )
    return f"sh {script} {{checkpoint}} {{port}}"


def pid(tmp_path):
    return int((tmp_path / "pid").read_text())


def test_a_run_samples_from_vllm_also_when_the_server_is_killed_in_the_middle_of_a_step(tmp_path, embedded):
    """Step 2's server gets SIGKILL with its engine: the run waits, starts another, gives it weights, and goes on."""

    def kill():
        threading.Timer(0.3, lambda: os.killpg(pid(tmp_path), signal.SIGKILL)).start()

    console = At(2, kill)
    with reserved_port() as port:
        engine = EngineConfig(
            kind="vllm", urls=(f"http://127.0.0.1:{port}",), command=command(tmp_path), weights="transfer",
            max_wait_s=3600.0,
        )  # fmt: skip
        steps, prompts, metrics = left_behind(train_job(config_of(tmp_path / "runs", engine), console))
    assert steps == embedded[0] == [1, 2, 3]
    assert prompts == embedded[1]  # the same problems in the same order
    for line in metrics:
        assert line["mismatch_max"] < 1e-4
        assert line["ratio_min"] == line["ratio_max"] == 1
    assert sum("engine.command starts it" in text for text in console.lines) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(pid(tmp_path), 0)
