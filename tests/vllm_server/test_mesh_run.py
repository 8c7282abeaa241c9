"""``poise train`` on two ranks that sample from one vLLM server, by each way for weights."""

import json

import pytest
from conftest import serving_vllm
from torchrun import finished

from poise.assembly import new_model_config
from poise.config import ModelConfig
from poise.harmony import byte_tokenizer
from poise.model import GptOss, save_model

SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "num_experts": 4, "sliding_window": 16, "rope": "default", "rope_theta": 1000.0,
    "device": "cpu",
}  # fmt: skip
KEYS = {
    **{f"model.{key.replace('_', '-')}": value for key, value in SHAPE.items()},
    "groups-per-step": 3, "group-size": 2, "max-turns": 2, "max-action-tokens": 16, "max-context-tokens": 300,
    "tokens-per-microbatch": 600, "warm-start.steps": 3, "demonstrations-per-step": 4, "eval-problems": 2,
    "num-train-rows": 6, "num-test-rows": 2, "run.name": "t", "entropy-weight": 0.1, "log-trajectories-every": 1,
    "optimizer.learning-rate": 3e-3, "optimizer.warmup-steps": 0, "max-mismatch": 1e-4, "run.steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Started from random weights of the run's shape."""
    folder, tokenizer = tmp_path_factory.mktemp("server"), byte_tokenizer()
    model = GptOss(new_model_config(ModelConfig(**SHAPE), tokenizer)).init_weights(5)
    save_model(model, folder / "start", "fp32", tokenizer=tokenizer.save)
    with serving_vllm(folder / "start", folder / "log") as process:
        yield process.wait()


@pytest.mark.parametrize(
    ("weights", "degrees"), [("transfer", ["--expert-degree=2"]), ("folder", ["--sequence-degree=2"])]
)
def test_two_ranks_train_with_the_tokens_of_one_vllm_server(started, tmp_path, weights, degrees):
    arguments = ["train", "arithmetic_tiny", *(f"--{key}={value}" for key, value in KEYS.items()), *degrees]
    arguments += ["--engine=vllm", f"--engine.urls={started.url}", f"--engine.weights={weights}"]
    code, printed = finished(2, *arguments, f"--run.folder={tmp_path}")
    assert code == 0, printed
    (folder,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= 1]
    assert [line["step"] for line in steps] == [1, 2, 3]
    # Each step's tokens have the log-probs that the sharded trainer gives them after the update before.
    for line in steps:
        assert line["mismatch_max"] < 1e-4
        assert line["ratio_min"] == line["ratio_max"] == 1
        assert line["grad_norm"] > 0
