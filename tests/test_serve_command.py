"""`poise serve` as a user starts it: a process that listens, and stops when it is told to."""

import signal
import subprocess
import sys

import httpx2
import pytest

from poise.cli import run
from poise.harmony import byte_tokenizer
from poise.model import GptOss, GptOssConfig, save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = byte_tokenizer()
    config = GptOssConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=12, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, num_experts=4, experts_per_token=2, sliding_window=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("serve") / "checkpoint"
    save_model(GptOss(config).init_weights(0), folder, format="fp32", tokenizer=tokenizer.save)
    return folder


def test_it_listens_serves_and_stops(checkpoint):
    command = [sys.executable, "-m", "poise", "serve", str(checkpoint), "--port", "0", "--max-context-tokens", "600"]
    with subprocess.Popen([*command, "--model.device", "cpu"], stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            while "listening on" not in "".join(lines):
                line = process.stdout.readline()
                assert line, f"it ended: {lines}"
                lines.append(line)
            url = lines[-1].split("listening on ")[1].split(";")[0]
            (model,) = httpx2.get(f"{url}/v1/models", timeout=300.0).json()["data"]
            assert model["max_model_len"] == 600
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "seed": 1, "ignore_eos": True}}
            choice = httpx2.post(f"{url}/inference/v1/generate", json=body, timeout=300.0).json()["choices"][0]
            assert len(choice["token_ids"]) == 3
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "70000"], "--port must be a whole number"),
        (["--optimizer.learning-rate", "0.1"], "--optimizer.* does nothing in poise serve"),
        (["--task.seed", "3"], "--task.seed does nothing in poise serve"),
        (["--max-context-tokens", "10000000"], "GiB"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint, capsys, arguments, reason):
    assert run(["serve", str(checkpoint), *arguments]) == 2
    assert reason in capsys.readouterr().err
