"""Gives vLLM servers the trainer's weights: by a checkpoint folder, or tensor by tensor over a process group.

Both need poise's plugin in the server (``plugins/vllm``). What arrived is proved by ``poise.train.canary``.
"""

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from poise.config import ConfigError, RunError
from poise.engine.http import EngineError, Outage, Servers
from poise.model import GptOss, GptOssConfig, save_model
from poise.model.config import FULL, SLIDING

_EXPERTS = ".mlp.experts."
_KINDS = {"float32": "fp32", "bfloat16": "bf16"}
_POLL_S = 0.0005


class SyncError(RunError):
    """The servers did not take the weights. What they hold now is unknown until an update succeeds."""


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """What the servers are, all alike. ``dtype``: of their weights; ``device``: "cpu" or "cuda"."""

    dtype: torch.dtype
    device: str


class Route(Protocol):
    """A way for weights. ``push`` returns when every server holds ``model``'s; raises SyncError otherwise."""

    async def push(self, model: GptOss) -> None: ...

    async def close(self) -> None: ...


def require_servable(config: GptOssConfig) -> None:
    """Raises ConfigError where vLLM's GPT-OSS, which has these built in, would be another model than the trainer's."""
    alternating = tuple(FULL if i % 2 else SLIDING for i in range(config.num_layers))
    built_in = {
        "rope kind": (config.rope.kind, "yarn"),
        "rope attention_factor": (config.rope.attention_factor, None),
        "layer_types": (config.layer_types, alternating),
        "rms_norm_eps": (config.rms_norm_eps, 1e-5),
        "swiglu_alpha": (config.swiglu_alpha, 1.702),
        "swiglu_limit": (config.swiglu_limit, 7.0),
        "attention_bias": (config.attention_bias, True),
    }
    for name, (mine, theirs) in built_in.items():
        if mine != theirs:
            raise ConfigError(f"vLLM cannot serve this model: its {name} is {mine}, and vLLM's GPT-OSS has {theirs}")


async def server_kind(servers: Servers) -> ServerKind:
    """Asks every worker. Raises SyncError where the plugin is missing or the servers differ."""
    kinds = set()
    for server in servers.all:
        try:
            answer = await _call(servers, server.url, "poise_describe")
        except (Outage, EngineError) as error:
            raise SyncError(
                f"{server.url} has no poise plugin ({error}): install plugins/vllm beside vLLM and start it with "
                "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls poise_vllm.extension.WorkerExtension"
            ) from error
        kinds |= {(worker["dtype"], worker["device"].partition(":")[0]) for worker in answer["results"]}
    if len(kinds) > 1:
        raise SyncError(f"the servers differ in type or device: {sorted(kinds)}")
    dtype, device = kinds.pop()
    if dtype not in _KINDS:
        raise SyncError(f"the servers compute in {dtype}; poise sends {' or '.join(_KINDS)}")
    return ServerKind(dtype=getattr(torch, dtype), device=device)


def served_shapes(model: GptOss) -> dict[str, list[int]]:
    """Name and shape of each tensor of ``served_tensors``, without touching a weight."""
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        for part in _parts(name, len(parameter)):
            shapes[part] = list(parameter.shape[1:] if part != name else parameter.shape)
    return shapes


def served_tensors(model: GptOss, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters as ``dtype``, in Hugging Face's names but one tensor per expert: the only form of experts
    that a vLLM which is already serving loads. One at a time; a sharded parameter is gathered when its turn comes."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        names = _parts(name, len(whole))
        for part, tensor in zip(names, [whole] if names == [name] else whole.unbind(0), strict=True):
            yield part, tensor.to(dtype).contiguous()


def _parts(name: str, length: int) -> list[str]:
    prefix, is_stack, part = name.partition(_EXPERTS)
    return [f"{prefix}{_EXPERTS}{expert}.{part}" for expert in range(length)] if is_stack else [name]


class FolderRoute:
    """Writes a checkpoint that every server then reads: works with every vLLM that has worker extensions, and across
    machines where ``folder`` is on a file system that they share. Only the newest checkpoint is kept."""

    def __init__(self, servers: Servers, kind: ServerKind, folder: Path) -> None:
        self.servers, self.kind, self.folder = servers, kind, folder.resolve()
        self.current: Path | None = None
        self._count = 0

    async def push(self, model: GptOss) -> None:
        await asyncio.to_thread(self.write, model)
        for server in self.servers.all:
            await self.give(server.url)

    def write(self, model: GptOss) -> Path:
        """The newest checkpoint. The one before goes away only now: a server may have been reading it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while (path := self.folder / f"weights_{self._count:06d}").exists():
            self._count += 1
        save_model(model, path, "fp32" if self.kind.dtype == torch.float32 else "bf16")
        if self.current is not None:
            shutil.rmtree(self.current)
        self.current = path
        return path

    async def give(self, url: str) -> None:
        """The newest checkpoint to one server, as when it came back from a restart. Raises SyncError."""
        try:
            await _call(self.servers, url, "poise_load_folder", str(self.current))
        except (Outage, EngineError) as error:
            raise SyncError(f"{url} did not load {self.current}: {error}") from error

    async def close(self) -> None:
        """Removes the checkpoint."""
        if self.current is not None:
            shutil.rmtree(self.current)
            self.current = None


class TransferRoute:
    """Broadcasts each tensor to the workers of all servers: gloo to CPUs, NCCL to GPUs; nothing is written to disk.

    The servers need ``--weight-transfer-config '{"backend": "poise"}'``. The group is made at the first ``push``, and
    again after one that failed or after a server was restarted. ``timeout_s``: how long a worker waits for a tensor.
    """

    def __init__(self, servers: Servers, kind: ServerKind, *, timeout_s: float = 300.0) -> None:
        self.servers, self.kind, self.timeout_s = servers, kind, timeout_s
        self._group: Any = None
        self._store: TCPStore | None = None
        self._count = 0

    async def push(self, model: GptOss) -> None:
        try:
            if self._group is None:
                await self._connect()
            await self._send(model)
        except (Outage, EngineError, RuntimeError) as error:
            self._group = None
            raise SyncError(f"the weights did not reach the servers: {error}") from error

    async def close(self) -> None:
        self._group = self._store = None

    async def _connect(self) -> None:
        backend = "gloo" if self.kind.device == "cpu" else "nccl"
        answers = await self.servers.ask_all("GET", "/get_world_size")
        sizes = [int(answer["world_size"]) for answer in answers]
        host = _address_towards(self.servers.all[0].url)
        if self._store is None:
            timeout = timedelta(seconds=self.timeout_s)
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._count += 1
        name, world_size = f"poise/{self._count}", 1 + sum(sizes)
        inits = []
        for index, server in enumerate(self.servers.all):
            init_info = {
                "backend": backend, "host": host, "port": self._store.port, "world_size": world_size,
                "first_rank": 1 + sum(sizes[:index]), "timeout_s": self.timeout_s, "name": name,
            }  # fmt: skip
            body = {"init_info": init_info}
            inits.append(self.servers.ask(server.url, "POST", "/init_weight_transfer_engine", json=body))
        open_mine = asyncio.to_thread(_process_group, backend, self._store, name, world_size, self.timeout_s)
        self._group, *_ = await asyncio.gather(open_mine, *inits)

    async def _send(self, model: GptOss) -> None:
        shapes = served_shapes(model)
        info = {
            "names": list(shapes),
            "shapes": list(shapes.values()),
            "dtype": str(self.kind.dtype).removeprefix("torch."),
        }
        await self.servers.ask_all("POST", "/start_weight_update", json={})
        stop = threading.Event()
        sending = asyncio.create_task(asyncio.to_thread(self._broadcast, model, stop))
        try:
            await self.servers.ask_all("POST", "/update_weights", json={"update_info": info})
        except BaseException:
            stop.set()  # nobody receives any more: without this, the thread would wait until the time is out
            await asyncio.gather(sending, return_exceptions=True)
            raise
        await sending
        await self.servers.ask_all("POST", "/finish_weight_update", json={})

    def _broadcast(self, model: GptOss, stop: threading.Event) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        device = torch.device("cpu") if self.kind.device == "cpu" else model.lm_head.weight.device
        for _, tensor in served_tensors(model, self.kind.dtype):
            work = self._group.broadcast([tensor.to(device)], options)
            while not work.is_completed():
                if stop.is_set():
                    raise RuntimeError("a server gave up while it was receiving")
                time.sleep(_POLL_S)
            work.wait()


async def forget_cached_keys(servers: Servers) -> None:
    """After an update: drops the keys and values that the old weights computed, those of running requests too. A
    request that was paused reads its tokens again, so that what it samples from now on is the new policy's alone."""
    parameters = {"reset_running_requests": "true"}
    for answer in await servers.ask_all("POST", "/reset_prefix_cache", params=parameters):
        if not answer["success"]:
            raise SyncError("a server kept cached keys of the old weights: /reset_prefix_cache was refused")


def _process_group(backend: str, store: TCPStore, name: str, world_size: int, timeout_s: float) -> Any:
    prefixed, timeout = PrefixStore(name, store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        return ProcessGroupGloo(prefixed, 0, world_size, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(prefixed, 0, world_size, options)


def _address_towards(url: str) -> str:
    """This machine's address on the way to the server; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]


async def _call(servers: Servers, url: str, method: str, *arguments: str) -> Any:
    """One of the plugin's methods, on every worker of one server."""
    body = {"method": method, "args": list(arguments)}
    return await servers.ask(url, "POST", "/collective_rpc", json=body)
