"""Sampled tokens per second: poise's embedded engine beside Transformers' generate and, where there is one, vLLM.

Two workloads on one random policy of the same checkpoint, with prescribed lengths, so that every system samples as many
tokens whatever it draws:

- "single": one turn, equal prompts' lengths, equal answers' lengths.
- "tools": ragged episodes of several turns; the tool's answer is appended and the policy goes on. poise and vLLM sample
  each episode at its own pace. `generate` takes the episodes as one batch, turn by turn: it prefills the whole history
  again, and each turn lasts as long as its longest action. Only tokens that an episode asked for count.

The systems take turns within a round; what is printed is each one's median and the median of the ratios of each round,
since the speed of a shared machine drifts.

    python benchmarks/rollout.py [--episodes 32 128] [--rounds 5] [--threads 2] [--vllm PYTHON_OF_ITS_ENVIRONMENT]
        [--clock wall|cpu]

vLLM is started from .venv-vllm (`make vllm`) where that is there; while others have their turn its processes are
stopped (SIGSTOP), since a server that waits still takes time from them.
`--clock cpu` counts the CPU seconds of all threads and processes of a system: what counts on a machine that others use
too, with one thread.
"""

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from poise.engine import EmbeddedEngine
from poise.engine.http import Servers
from poise.engine.vllm import VllmEngine
from poise.harmony import byte_tokenizer
from poise.model import GptOss, GptOssConfig, load_model, save_model
from poise.types import Policy

PROMPT_TOKENS, ACTION_TOKENS = 32, 128
MAX_TURNS, MAX_CONTEXT = 4, 1024
VLLM_FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", str(MAX_CONTEXT),
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "512", "--enable-scale-out",
    "--generation-config", "vllm", "--distributed-executor-backend", "uni", "--max-num-seqs", "128",
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "131072",
)  # fmt: skip
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Episode:
    """Turns of (tokens added before the action, tokens to sample)."""

    observations: tuple[tuple[int, ...], ...]
    action_lengths: tuple[int, ...]


Run = Callable[[Sequence[Episode]], int]


def single_turns(num_episodes: int, rng: np.random.Generator) -> list[Episode]:
    return [Episode((_ids(rng, PROMPT_TOKENS),), (ACTION_TOKENS,)) for _ in range(num_episodes)]


def with_tools(num_episodes: int, rng: np.random.Generator) -> list[Episode]:
    """One to ``MAX_TURNS`` turns; actions are mostly short, some long (log-normal around 30, at most 160)."""
    episodes = []
    for _ in range(num_episodes):
        num_turns = int(rng.integers(1, MAX_TURNS + 1))
        lengths = np.clip(np.exp(rng.normal(np.log(30), 0.8, num_turns)), 4, 160).astype(int)
        added = [PROMPT_TOKENS, *rng.integers(8, 48, num_turns - 1).tolist()]
        episodes.append(Episode(tuple(_ids(rng, n) for n in added), tuple(lengths.tolist())))
    return episodes


def _ids(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, 256, length).tolist())


async def play(policy: Policy, episodes: Sequence[Episode]) -> int:
    """Every episode at its own pace; returns the number of sampled tokens."""

    async def one(index: int, episode: Episode) -> int:
        stream: list[int] = []
        for turn, (observation, length) in enumerate(zip(episode.observations, episode.action_lengths, strict=True)):
            stream += observation
            action = await policy(stream, episode_id=str(index), seed=index * 100 + turn, max_tokens=length)
            assert len(action.token_ids) == length
            stream += action.token_ids
        return sum(episode.action_lengths)

    return sum(await asyncio.gather(*(one(index, episode) for index, episode in enumerate(episodes))))


@torch.no_grad()
def generate(model, episodes: Sequence[Episode], pad: int) -> int:
    """Turn by turn, as one left-padded batch of the episodes that have such a turn."""
    streams: list[list[int]] = [[] for _ in episodes]
    for turn in range(max(len(episode.action_lengths) for episode in episodes)):
        rows = [index for index, episode in enumerate(episodes) if turn < len(episode.action_lengths)]
        for index in rows:
            streams[index] += episodes[index].observations[turn]
        longest = max(len(streams[index]) for index in rows)
        input_ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(input_ids)
        for row, index in enumerate(rows):
            input_ids[row, longest - len(streams[index]) :] = torch.tensor(streams[index])
            mask[row, longest - len(streams[index]) :] = 1
        lengths = [episodes[index].action_lengths[turn] for index in rows]
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            min_new_tokens=max(lengths),
            max_new_tokens=max(lengths),
            pad_token_id=pad,
        )
        for row, index in enumerate(rows):
            streams[index] += output[row, longest : longest + lengths[row]].tolist()
    return sum(sum(episode.action_lengths) for episode in episodes)


def cpu_seconds(session: int) -> float:
    """Of all processes of a session, from /proc."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class VllmServer:
    """vLLM's server on a checkpoint, for a ``with`` block."""

    def __init__(self, python: Path, checkpoint: Path, log: Path, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), *VLLM_FLAGS]
        environment = {**os.environ, **VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.log = log

    def __enter__(self) -> "VllmServer":
        deadline = time.monotonic() + 400
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise SystemExit(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-3000:]}") from None
                time.sleep(1)

    def signal(self, number: int) -> None:
        """To all of its processes."""
        os.killpg(self.process.pid, number)

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()


def poise_run(model: GptOss, num_episodes: int) -> Run:
    engine = EmbeddedEngine(model, stop_ids=(), return_id=-1, num_slots=num_episodes, max_context_tokens=MAX_CONTEXT)

    def run(episodes: Sequence[Episode]) -> int:
        engine.new_policy_version(engine.policy_version + 1)  # nothing is cached from the turn before
        return asyncio.run(play(engine, episodes))

    return run


def vllm_run(server: VllmServer, vocab_size: int) -> Run:
    def run(episodes: Sequence[Episode]) -> int:
        async def main() -> int:
            engine = VllmEngine(Servers([server.url]), stop_ids=(), vocab_size=vocab_size)
            await engine.post("/reset_prefix_cache")
            try:
                return await play(engine, episodes)
            finally:
                await engine.close()

        server.signal(signal.SIGCONT)
        try:
            return asyncio.run(main())
        finally:
            server.signal(signal.SIGSTOP)

    return run


def measure(
    runs: dict[str, Run], episodes: Sequence[Episode], rounds: int, clocks: dict[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Tokens per second of each system in each round; a round before them warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            clock = clocks[name]
            started = clock()
            num_tokens = run(episodes)
            if number:
                speeds[name].append(num_tokens / (clock() - started))
    return speeds


def row_of(title: str, speeds: dict[str, list[float]], episodes: Sequence[Episode]) -> list[str]:
    cells = [title, str(sum(sum(episode.action_lengths) for episode in episodes))]
    for name, values in speeds.items():
        ratios = [own / other for own, other in zip(speeds["poise"], values, strict=True)]
        ratio = "" if name == "poise" else f" ({statistics.median(ratios):.2f}x)"
        cells.append(f"{statistics.median(values):.0f}{ratio}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one that warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"), help="python of vLLM's environment")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the server is ended all the same
    torch.set_num_threads(args.threads)
    from transformers import GptOssForCausalLM

    tokenizer = byte_tokenizer()
    config = GptOssConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=args.hidden, intermediate_size=args.hidden, num_layers=args.layers,
        num_heads=8, num_kv_heads=4, head_dim=32, num_experts=args.experts, experts_per_token=2, sliding_window=32,
        pad_token_id=tokenizer.pad,
    )  # fmt: skip
    table = Table(
        title=f"sampled tokens per {args.clock} second (poise: so many times more); {args.threads} threads, hidden "
        f"{args.hidden}, {args.layers} layers, {args.experts} experts, load {os.getloadavg()[0]:.1f}, "
        f"{time.strftime('%Y-%m-%d')}",
        title_justify="left",
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        save_model(GptOss(config).init_weights(0), folder, format="fp32", tokenizer=tokenizer.save)
        model = load_model(folder)
        theirs = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        theirs.generation_config.eos_token_id = None  # nothing stops before the prescribed length
        servers = (
            [VllmServer(args.vllm, folder, Path(temporary) / "vllm.log", args.threads)] if args.vllm.exists() else []
        )
        for column in ("workload", "tokens", "poise", "Transformers", *(["vLLM"] if servers else [])):
            table.add_column(column, justify="left" if column == "workload" else "right")
        try:
            for server in servers:
                server.__enter__()
                server.signal(signal.SIGSTOP)
            own = time.perf_counter if args.clock == "wall" else time.process_time
            clocks: dict[str, Callable[[], float]] = {"poise": own, "Transformers": own, "vLLM": own}
            if args.clock == "cpu":
                clocks["vLLM"] = lambda: own() + sum(cpu_seconds(server.process.pid) for server in servers)
            for num_episodes in args.episodes:
                runs: dict[str, Run] = {"poise": poise_run(model, num_episodes)}
                runs["Transformers"] = lambda episodes: generate(theirs, episodes, tokenizer.pad or 0)
                for server in servers:
                    runs["vLLM"] = vllm_run(server, config.vocab_size)
                for title, workload in (("single", single_turns), ("tools", with_tools)):
                    episodes = workload(num_episodes, np.random.default_rng(0))
                    row = row_of(f"{title}, {num_episodes}", measure(runs, episodes, args.rounds, clocks), episodes)
                    print(*row, sep="  ", flush=True)
                    table.add_row(*row)
        finally:
            for server in servers:
                server.__exit__()
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
