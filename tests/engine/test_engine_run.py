"""A whole run whose engine is a server: it learns what the embedded run learns, also when the server is killed."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading

import pytest
from fake_vllm import FakeVllm
from serving import reserved_port, serving

from poise.assembly import embedded_engine, new_model_config
from poise.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WarmStartConfig,
)
from poise.console import Bar, Console
from poise.engine import EngineError
from poise.engine.http import Outage, ServerGone
from poise.engine.server import EngineServer
from poise.harmony import byte_tokenizer
from poise.jobs import train_job
from poise.model import GptOss, save_model
from poise.train.checkpoint import latest_checkpoint
from poise.train.remote import is_outage
from poise.train.weights import SyncError

EMBEDDED = EngineConfig()


def config_of(folder, engine=EMBEDDED, lead=0, **run):
    return Config(
        model=ModelConfig(
            hidden_size=32, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4,
            sliding_window=16, device="cpu",
        ),
        task=TaskConfig(num_train_rows=6, num_test_rows=2, describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=3, group_size=2, max_turns=2, max_action_tokens=16, max_context_tokens=300, num_slots=8,
            lockstep=True, max_staleness=lead,
        ),
        algorithm=AlgorithmConfig(entropy_weight=0.1),  # a gradient also where all rewards are equal
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0),
        warm_start=WarmStartConfig(steps=3, demonstrations_per_step=4),
        run=RunConfig(**({"steps": 2, "folder": str(folder), "name": "t", "eval_problems": 2,
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
    """What was sampled and learned, step by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= 1]
    sampled = {
        path.name: [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]
        for path in sorted((folder / "trajectories").iterdir())
    }
    return [line["step"] for line in steps], sampled, [line["grad_norm"] for line in steps]


def train(folder, engine=EMBEDDED, console=None, **run):
    return left_behind(train_job(config_of(folder, engine, **run), console or Console()))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("embedded"))


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


def serve_command(tmp_path):
    """A server whose process id is written down."""
    words = f"{sys.executable} -m poise serve {{checkpoint}} --port {{port}} --max-context-tokens 300"
    return f"sh -c 'echo $$ > {tmp_path}/pid; exec {words} --model.device cpu --num-slots 8'"


def pid(tmp_path):
    return int((tmp_path / "pid").read_text())


def kill_in_the_middle(tmp_path, then=lambda: None):
    """The server is stopped before it can answer anything more, and killed when the requests are on their way."""
    os.kill(pid(tmp_path), signal.SIGSTOP)

    def kill():
        os.kill(pid(tmp_path), signal.SIGKILL)
        then()

    threading.Timer(0.7, kill).start()


def test_a_server_that_is_killed_in_the_middle_of_a_step_is_started_again_and_nothing_is_lost(tmp_path, port, embedded):
    console = At(2, lambda: kill_in_the_middle(tmp_path))
    engine = EngineConfig(
        kind="vllm", urls=(f"http://127.0.0.1:{port}",), command=serve_command(tmp_path), max_wait_s=600.0
    )
    # The evaluation after step 1 has brought the weights: what is under way when the server dies are episodes.
    steps, sampled, grad_norms = train(tmp_path / "runs", engine, console, eval_every=1)
    assert steps == [1, 2]
    # The same problems, seeds and weights: the same tokens, also those of the step in which the server died.
    assert sampled == embedded[1]
    assert grad_norms == pytest.approx(embedded[2], rel=1e-3)
    assert any("is not there: engine.command starts it" in line for line in console.lines)
    assert any(
        "came back without the current weights: it gets them before it samples" in line for line in console.lines
    )
    # Nothing of the exchange stays, and the server is gone.
    assert sorted(path.suffix for path in (tmp_path / "runs").iterdir()) == ["", ".log"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid(tmp_path), 0)


def test_a_server_that_is_killed_while_it_gets_weights_and_started_by_hand_from_others_gets_them_again(
    tmp_path, port, embedded
):
    other = new_model_config(config_of(tmp_path).model, byte_tokenizer())
    save_model(GptOss(other).init_weights(5), tmp_path / "other", tokenizer=byte_tokenizer().save)
    words = serve_command(tmp_path).replace("{port}", str(port)).replace("{checkpoint}", str(tmp_path / "other"))
    started = []

    def start():
        for process in started:
            process.wait()  # its port is free then
        # The shell's exec makes it the server itself, in a group of its own.
        started.append(subprocess.Popen(shlex.split(words), stdout=subprocess.DEVNULL, start_new_session=True))

    start()
    console = At(2, lambda: kill_in_the_middle(tmp_path, then=start))
    engine = EngineConfig(kind="vllm", urls=(f"http://127.0.0.1:{port}",), max_wait_s=600.0)
    try:
        steps, sampled, grad_norms = train(tmp_path / "runs", engine, console)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    assert len(started) == 2
    assert (steps, sampled) == embedded[:2]
    assert any("weights of step 1: " in line and "pushing them again" in line for line in console.lines)
    assert grad_norms == pytest.approx(embedded[2], rel=1e-3)


def test_a_server_that_stays_away_ends_the_run_which_can_be_resumed(tmp_path, port, embedded):
    words = serve_command(tmp_path).replace("{port}", str(port)).replace("{checkpoint}", '"$1"')
    script = tmp_path / "start.sh"
    script.write_text(words.removeprefix("sh -c '").removesuffix("'") + "\n")
    engine = EngineConfig(
        kind="vllm", urls=(f"http://127.0.0.1:{port}",), command=f"sh {script} {{checkpoint}}", max_wait_s=600.0
    )

    def end_for_good():
        script.write_text("exit 1\n")
        kill_in_the_middle(tmp_path)

    with pytest.raises(EngineError, match=r"engine.command ended with exit code 1 before"):
        train(tmp_path / "runs", engine, At(2, end_for_good))
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert latest_checkpoint(folder).name == "step_000001"
    # The rest is done by the embedded engine: no step is missing, and none was trained twice.
    resumed = left_behind(train_job(config_of(tmp_path / "runs"), Console(), resume=folder))
    assert resumed[:2] == embedded[:2]
    assert resumed[2] == pytest.approx(embedded[2], rel=1e-3)


def test_a_server_of_another_vocabulary_is_refused_before_the_warm_start(tmp_path):
    with serving(FakeVllm()) as urls, pytest.raises(EngineError, match="another vocabulary"):
        train(tmp_path, EngineConfig(kind="vllm", urls=tuple(urls)))
    assert not any(tmp_path.rglob("metrics.jsonl"))


def test_only_what_a_second_try_may_mend_is_tried_again():
    def raised(error, cause):
        try:
            raise error from cause
        except Exception as raised_error:
            return raised_error

    assert is_outage(raised(SyncError("not loaded"), Outage("gone")))
    assert not is_outage(raised(SyncError("another model"), EngineError("refused")))
    assert not is_outage(raised(SyncError("not loaded"), raised(ServerGone("waited"), Outage("gone"))))


class Served:
    """`poise serve` in a thread, with weights of its own."""

    def __init__(self, folder):
        config, tokenizer = config_of(folder), byte_tokenizer()
        model = GptOss(new_model_config(config.model, tokenizer)).init_weights(9)
        self.server = EngineServer(embedded_engine(model, tokenizer, config), tokenizer, name="other")

    def app(self):
        return self.server.app


def test_servers_sample_ahead_and_each_token_keeps_its_version(tmp_path):
    with serving(Served(tmp_path), Served(tmp_path)) as urls:
        engine = EngineConfig(kind="vllm", urls=tuple(urls), max_wait_s=600.0)
        folder = train_job(config_of(tmp_path / "runs", engine, lead=1, steps=4), Console())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in metrics if line["step"] >= 1]
    assert [line["staleness_max"] for line in metrics] == [0, 1, 1, 1]
    # Tokens that were sampled by the policy itself are the trainer's own; what is older differs, and is corrected.
    assert metrics[0]["mismatch_max"] < 1e-4
    for step in range(1, 5):
        lines = (folder / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert {v for line in lines for v in json.loads(line)["policy_versions"]} <= {step - 2, step - 1}


def test_sglang_cannot_sample_ahead():
    engine = EngineConfig(kind="sglang", urls=("http://a",))
    with pytest.raises(ConfigError, match=r"rollout.max_staleness needs engine.kind"):
        Config(engine=engine, rollout=RolloutConfig(max_staleness=1))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"urls": ("http://a",)}, "engine.urls does nothing with engine.kind"),
        ({"command": "x"}, "engine.command does nothing"),
        ({"kind": "vllm"}, "engine.urls is missing"),
        ({"kind": "sglang", "urls": ("http://a",), "weights": "transfer"}, "needs engine.kind"),
        ({"timeout_s": 0.0}, "engine.timeout_s must be a positive number"),
        ({"max_wait_s": float("inf")}, "engine.max_wait_s must be a positive number"),
        ({"retries": -1}, "engine.retries must be at least 0"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**keys)


def test_prefill_tokens_are_the_servers_own_affair():
    engine = EngineConfig(kind="vllm", urls=("http://a",))
    with pytest.raises(ConfigError, match="max_prefill_tokens does nothing"):
        Config(engine=engine, rollout=RolloutConfig(max_prefill_tokens=100))
