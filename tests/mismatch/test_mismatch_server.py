"""``poise mismatch`` against a server: a damaged checkpoint behind ``poise serve``."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from poise.cli import run
from poise.harmony import byte_tokenizer
from poise.model import GptOss, GptOssConfig, save_model

TASK = ["--task=reasoning_gym", "--task.describes-tools=False", "--num-test-rows=4", "--max-turns=2"]
TASK += ["--max-action-tokens=24", "--max-context-tokens=256", "--num-slots=4", "--model.device=cpu"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(the trainer's, the same with other sinks)"""
    tokenizer = byte_tokenizer()
    config = GptOssConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=12, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, num_experts=4, experts_per_token=2, sliding_window=8,
    )  # fmt: skip
    model = GptOss(config).init_weights(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    folder = tmp_path_factory.mktemp("checkpoints")
    save_model(model, folder / "now", format="fp32", tokenizer=tokenizer.save)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.sinks.fill_(3.0)
    save_model(model, folder / "before", format="fp32", tokenizer=tokenizer.save)
    return folder / "now", folder / "before"


@pytest.fixture(scope="module")
def url(checkpoints):
    """A server of the damaged one, at a temperature of its own that requests override."""
    command = [sys.executable, "-m", "poise", "serve", str(checkpoints[1]), "--port", "0", "--model.device", "cpu"]
    with subprocess.Popen([*command, "--max-context-tokens", "300"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while "listening on" not in line:
                line = process.stdout.readline()
                assert line, "the server ended"
            yield line.split("listening on ")[1].split(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=300)


def report_of(tmp_path, *args: str):
    assert run(["mismatch", *args, *TASK, f"--json={tmp_path / 'report.json'}"]) == 0
    return json.loads((tmp_path / "report.json").read_text())


def test_a_server_with_stale_sinks_is_named_so(checkpoints, url, tmp_path):
    now, before = map(str, checkpoints)
    args = ["--engine", url, "--episodes=3", "--temperature=0.7"]
    report = report_of(tmp_path, now, *args, "--previous", before)
    assert report["engine"] == url
    assert report["temperature"] == 0.7
    assert report["diagnosis"]["cause"] == ["old sinks"]
    assert report["routes"]["rows"] > 100
    # Against its own weights nothing is left, experts included.
    same = report_of(tmp_path, before, *args)
    assert same["diagnosis"]["cause"] == []
    assert same["kinds"]["all"]["max"] < 1e-4
    assert same["routes"]["differing"] == [0.0, 0.0]


def test_given_tokens_are_scored_as_a_prompt(checkpoints, url, tmp_path):
    path = tmp_path / "tokens.jsonl"
    mask = [False] * 20 + [True] * 10 + [False] * 5 + [True] * 5
    path.write_text(json.dumps({"token_ids": [(7 * i) % 250 for i in range(40)], "response_mask": mask}))
    now, before = map(str, checkpoints)
    # A prompt's log-probs are those at temperature 1, whatever the run's is.
    report = report_of(tmp_path, before, "--engine", url, f"--tokens={path}", "--temperature=0.7")
    assert report["temperature"] == 1.0
    assert report["kinds"]["all"]["num_tokens"] == 15
    assert report["kinds"]["all"]["max"] < 1e-4
    assert report["routes"] is None
    report = report_of(tmp_path, now, "--engine", url, f"--tokens={path}", "--previous", before)
    assert report["diagnosis"]["cause"] == ["old sinks"]
