"""One real vLLM server for all tests of this folder: ``make test-vllm``."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from serving import reserved_port

from poise.model import GptOss, GptOssConfig, RopeConfig, save_model

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_S = 900  # a minute on a quiet machine
VOCAB, WINDOW, CONTEXT = 512, 16, 2048
STOP_IDS = (1, 2)
FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", str(CONTEXT),
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "512", "--enable-return-routed-experts",
    "--enable-scale-out", "--generation-config", "vllm", "--distributed-executor-backend", "uni",
    "--worker-extension-cls", "poise_vllm.extension.WorkerExtension",
    "--weight-transfer-config", '{"backend": "poise"}',
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    reason = None
    if not PYTHON.exists():
        reason = "no .venv-vllm: make vllm builds it"
    elif "PYTEST_XDIST_WORKER" in os.environ:
        reason = "these tests share one server: make test-vllm runs them"
    if reason:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def random_model(seed: int) -> GptOss:
    """Large sinks, biases and router weights: what is stale or wrong must show."""
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
        num_experts=8, experts_per_token=2, sliding_window=WINDOW, rope=RopeConfig(), eos_token_ids=STOP_IDS,
        pad_token_id=0,
    )  # fmt: skip
    model = GptOss(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks", "router.weight", "norm.weight")):
                parameter.add_(noise * (0.1 if "router.bias" in name else 0.4))
            elif name.endswith("lm_head.weight"):
                parameter.copy_(noise * 0.15)
    return model


class Process:
    """A server and everything that it started."""

    def __init__(self, checkpoint: Path, log: Path, port: int, *flags: str) -> None:
        self.port, self.url, self.log = port, f"http://127.0.0.1:{port}", log
        module = "vllm.entrypoints.openai.api_server"
        self.command = [
            str(PYTHON),
            "-m",
            module,
            "--model",
            str(checkpoint),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        self.command += [*FLAGS, *flags]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self) -> "Process":
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                tail = self.log.read_text(errors="replace")[-3000:]
                assert self.process.poll() is None, f"the server ended:\n{tail}"
                assert time.monotonic() < deadline, f"the server did not start within {START_S} s:\n{tail}"
                time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to the server and to the engine that it runs in a process of its own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving_vllm(checkpoint, log):
    """A server that has just been started, and is gone afterwards."""
    with reserved_port() as port:
        process = Process(checkpoint, log, port)
        try:
            yield process
        finally:
            if process.process.poll() is None:
                process.kill()


@pytest.fixture(scope="session")
def model_a():
    return random_model(1)


@pytest.fixture(scope="session")
def model_b():
    return random_model(2)


@pytest.fixture(scope="session")
def processes(tmp_path_factory, model_a, model_b):
    """Servers that were started with A and with B, both at once: starting takes most of the time of these tests."""
    folder = tmp_path_factory.mktemp("servers")
    started = {}
    with contextlib.ExitStack() as stack:
        for name, model in (("a", model_a), ("b", model_b)):
            save_model(model, folder / name, "fp32")
            started[name] = stack.enter_context(serving_vllm(folder / name, folder / f"{name}.log"))
        yield started


@pytest.fixture(scope="session")
def server(processes):
    """Started with A."""
    return processes["a"].wait()


@pytest.fixture(scope="session")
def fresh_b(processes):
    """Started with B; nobody updates it."""
    return processes["b"].wait()
