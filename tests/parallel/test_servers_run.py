"""`poise train` under torchrun that samples from servers: what one process does with them, and an end for all."""

import json
from dataclasses import replace

import pytest
from ranks import shape
from serving import serving
from starlette.responses import JSONResponse
from torchrun import finished

from poise.assembly import assemble, embedded_engine, new_model_config
from poise.cli import run
from poise.config import AlgorithmConfig, Config, ConfigError, EngineConfig, ModelConfig, RolloutConfig
from poise.console import Console
from poise.engine.server import EngineServer
from poise.harmony import byte_tokenizer
from poise.model import GptOss
from poise.parallel import Mesh
from poise.servers import connect

SHAPE = {
    "hidden_size": 16, "intermediate_size": 12, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 4, "sliding_window": 16, "rope": "default", "rope_theta": 1000.0,
}  # fmt: skip
KEYS = {
    **{key.replace("_", "-"): value for key, value in SHAPE.items()},
    "groups-per-step": 3, "group-size": 2, "max-turns": 2, "max-action-tokens": 12, "max-context-tokens": 256,
    "tokens-per-microbatch": 300, "warm-start.steps": 2, "demonstrations-per-step": 5, "eval-problems": 3,
    "num-train-rows": 5, "num-test-rows": 5, "run.name": "t", "model.device": "cpu", "entropy-weight": 0.1,
    "warm-start.warmup-steps": 1, "log-trajectories-every": 1, "optimizer.learning-rate": 1e-2,
    "optimizer.warmup-steps": 0, "max-mismatch": 1e-4, "engine": "vllm", "engine.max-wait-s": 60,
}  # fmt: skip
RECIPE = ["train", "arithmetic_tiny", *(f"--{key}={value}" for key, value in KEYS.items())]


class Served:
    """`poise serve` in a thread, with weights of its own; it refuses sessions whose name begins with ``refuses``."""

    def __init__(self, refuses=None):
        config = Config(
            model=ModelConfig(**SHAPE, device="cpu"),
            rollout=RolloutConfig(max_action_tokens=12, max_context_tokens=256, num_slots=8),
        )
        tokenizer = byte_tokenizer()
        self.model = GptOss(new_model_config(config.model, tokenizer)).init_weights(9)
        self.server = EngineServer(embedded_engine(self.model, tokenizer, config), tokenizer, name="other")
        self.refuses = refuses

    def app(self):
        async def app(scope, receive, send):
            session = dict(scope.get("headers", ())).get(b"x-session-id", b"").decode()
            if self.refuses is not None and session.startswith(self.refuses):
                await JSONResponse({"error": "not for you"}, status_code=400)(scope, receive, send)
            else:
                await self.server.app(scope, receive, send)

        return app


def on_two_ranks(urls, folder, *arguments):
    return finished(2, *RECIPE, "--engine.urls", *urls, f"--run.folder={folder}", *arguments)


def left_behind(folder):
    (inside,) = (path for path in folder.iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (inside / "metrics.jsonl").read_text().splitlines()]
    sampled = {}
    for path in sorted((inside / "trajectories").iterdir()):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        sampled[path.name] = [(t["token_ids"], t["reward"], t["policy_versions"]) for t in found]
    evaluations = [json.loads(line) for line in (inside / "evaluations.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] >= 1], sampled, evaluations


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    with serving(Served(), Served()) as urls:
        assert run([*RECIPE, "--engine.urls", *urls, f"--run.folder={folder}", "--run.steps=2"]) == 0
    return left_behind(folder)


@pytest.mark.parametrize("degrees", [(), ("--expert-degree=2",)], ids=["data", "expert"])
def test_two_ranks_sample_and_learn_what_one_process_does(degrees, tmp_path, alone):
    with serving(Served(), Served()) as urls:
        code, text = on_two_ranks(urls, tmp_path, "--run.steps=2", *degrees)
    assert code == 0, text
    metrics, sampled, evaluations = left_behind(tmp_path)
    # The same problems and seeds: the same tokens and rewards, of the same versions of the policy.
    assert sampled == alone[1]
    for mine, theirs in zip(metrics, alone[0], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["mismatch_max"] < 1e-4
        assert mine["ratio_min"] == mine["ratio_max"] == 1
    for mine, theirs in zip(evaluations, alone[2], strict=True):
        assert mine["metrics"] == pytest.approx(theirs["metrics"])
    assert [path.name for path in tmp_path.iterdir()] == ["t-001"], "what was written for the servers is gone"


def test_what_one_rank_fails_with_ends_all_once_with_everything_saved(tmp_path):
    # Groups 3, 4 and 5 are those of step 2; the second rank samples group 4.
    with serving(Served(refuses="4/")) as urls:
        code, text = on_two_ranks(urls, tmp_path, "--run.steps=4")
    assert code != 0
    (line,) = (line for line in text.splitlines() if line.startswith("poise:"))
    assert line.startswith("poise: rank 1: http://127.0.0.1:")
    assert "refused: 400" in line
    assert "not for you" in line
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000000", "step_000001"]


def test_servers_that_cannot_be_trained_with_are_refused_once(tmp_path):
    with serving(Served()) as urls:
        code, text = on_two_ranks(urls, tmp_path, "--max-context-tokens=300")
    assert code != 0
    (line,) = (line for line in text.splitlines() if line.startswith("poise:"))
    assert "holds 256 tokens, and rollout.max_context_tokens is 300" in line
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_servers_sample_ahead_of_a_mesh(tmp_path):
    with serving(Served(), Served()) as urls:
        code, text = on_two_ranks(urls, tmp_path, "--run.steps=4", "--max-staleness=1", "--max-action-tokens=40")
    assert code == 0, text
    metrics, sampled, _ = left_behind(tmp_path)
    assert [line["staleness_max"] for line in metrics] == [0, 1, 1, 1]
    assert metrics[0]["mismatch_max"] < 1e-4
    for step in range(1, 5):
        trajectories = sampled[f"step_{step:06d}.jsonl"]
        assert len(trajectories) == 6
        assert {v for _, _, versions in trajectories for v in versions} <= {step - 2, step - 1}


def test_what_a_mesh_cannot_do_with_servers_is_refused():
    engine = EngineConfig(kind="vllm", urls=("http://127.0.0.1:1",), command="x")
    with pytest.raises(ConfigError, match=r"engine.command needs a trainer of one process, not 2"):
        connect(GptOss(shape()), byte_tokenizer(), Config(engine=engine), Console(), Mesh(data=2))
    ahead = RolloutConfig(max_staleness=1)
    with pytest.raises(ConfigError, match=r"algorithm.max_resamples with rollout.max_staleness needs a trainer of one"):
        assemble(
            Config(engine=replace(engine, command=None), rollout=ahead, algorithm=AlgorithmConfig(max_resamples=1)),
            Console(),
            mesh=Mesh(data=2),
        )
    with pytest.raises(ConfigError, match=r"rollout.max_staleness on several ranks needs servers"):
        assemble(Config(rollout=ahead), Console(), mesh=Mesh(data=2))
