"""Gives vLLM servers the trainer's weights: by a checkpoint folder, or tensor by tensor over a process group.

Both need poise's plugin in the server (``plugins/vllm``). What arrived is proved by ``poise.train.canary``.
"""

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

from poise.config import ConfigError, RunError
from poise.engine.http import EngineError, Outage, Servers
from poise.model import GptOss, GptOssConfig, save_model
from poise.model.config import FULL, SLIDING
from poise.train.diagnosis import Older

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
    """A way for weights. Raises SyncError where they did not arrive.

    ``push``: returns when every server holds ``model``'s. ``give``: the weights pushed last to one server, which came
    back from a restart. ``older``: those of the push before the last.
    """

    async def push(self, model: GptOss) -> None: ...

    async def give(self, url: str) -> None: ...

    def older(self) -> Older | None: ...

    async def close(self) -> None: ...


def require_servable(config: GptOssConfig) -> None:
    """Raises ConfigError where vLLM's GPT-OSS, which has these built in, would be another model than the trainer's."""
    alternating = tuple(FULL if i % 2 else SLIDING for i in range(config.num_layers))
    built_in = {
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
        if quantization := next(
            (worker["quantization"] for worker in answer["results"] if worker["quantization"]), None
        ):
            raise SyncError(
                f"{server.url} serves a model packed as {quantization}: start it from a bfloat16 checkpoint"
            )
        kinds |= {(worker["dtype"], worker["device"].partition(":")[0]) for worker in answer["results"]}
    if len(kinds) > 1:
        raise SyncError(f"the servers differ in type or device: {sorted(kinds)}")
    dtype, device = kinds.pop()
    if dtype not in _KINDS:
        raise SyncError(f"the servers compute in {dtype}; poise sends {' or '.join(_KINDS)}")
    return ServerKind(dtype=getattr(torch, dtype), device=device)


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
    machines where ``folder`` is on a file system that they share. The two newest checkpoints are kept: the current
    weights, for servers that come back from a restart, and those before, for a diagnosis."""

    def __init__(self, servers: Servers, kind: ServerKind, folder: Path) -> None:
        self.servers, self.kind, self.folder = servers, kind, folder.resolve()
        self._kept: list[Path] = []
        self._count = 0

    async def push(self, model: GptOss) -> None:
        await asyncio.to_thread(self._write, model)
        await asyncio.gather(*(self.give(server.url) for server in self.servers.all))

    async def give(self, url: str) -> None:
        path = self._kept[-1]
        try:
            await _call(self.servers, url, "poise_load_folder", str(path))
        except (Outage, EngineError) as error:
            raise SyncError(f"{url} did not load {path}: {error}") from error

    def older(self) -> Older | None:
        return stored_parameters(self._kept[-2]) if len(self._kept) > 1 else None

    async def close(self) -> None:
        for path in self._kept:
            shutil.rmtree(path)
        self._kept.clear()

    def _write(self, model: GptOss) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while (path := self.folder / f"weights_{self._count:06d}").exists():
            self._count += 1
        save_model(model, path, "fp32" if self.kind.dtype == torch.float32 else "bf16")
        self._kept.append(path)
        while len(self._kept) > 2:
            shutil.rmtree(self._kept.pop(0))


class TransferRoute:
    """Broadcasts each tensor to the workers of all servers: gloo to CPUs, NCCL to GPUs; nothing is written to disk.

    The servers need ``--weight-transfer-config '{"backend": "poise"}'``. Copies of the current weights and of those
    before stay in this machine's memory, in the servers' type. The group is made at the first ``push``, and again after
    one that failed, as it does when a server was restarted. ``timeout_s``: how long a worker waits for a tensor.
    """

    def __init__(self, servers: Servers, kind: ServerKind, *, timeout_s: float = 300.0) -> None:
        self.servers, self.kind, self.timeout_s = servers, kind, timeout_s
        self._group: _Group | None = None
        self._kept: list[dict[str, Tensor]] = []

    async def push(self, model: GptOss) -> None:
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in served_tensors(model, self.kind.dtype)}
        self._kept = [*self._kept[-1:], weights]
        try:
            if self._group is None:
                self._group = await _connect([server.url for server in self.servers.all], self.servers, self, weights)
            await self._group.send(weights)
        except (Outage, EngineError, RuntimeError) as error:
            self._group = None
            raise SyncError(f"the weights did not reach the servers: {error}") from error

    async def give(self, url: str) -> None:
        self._group = None  # the server that came back is not in it any more
        try:
            group = await _connect([url], self.servers, self, self._kept[-1])
            await group.send(self._kept[-1])
        except (Outage, EngineError, RuntimeError) as error:
            raise SyncError(f"the weights did not reach {url}: {error}") from error

    def older(self) -> Older | None:
        if len(self._kept) < 2:
            return None
        weights = self._kept[-2]

        def parameter(name: str) -> Tensor:
            if name in weights:
                return weights[name]
            prefix, _, part = name.partition(_EXPERTS)
            stack = list[Tensor]()
            while (one := weights.get(f"{prefix}{_EXPERTS}{len(stack)}.{part}")) is not None:
                stack.append(one)
            return torch.stack(stack)

        return parameter

    async def close(self) -> None:
        self._group = None
        self._kept.clear()


@dataclass(frozen=True)
class _Group:
    """The trainer, rank 0, and the workers of the servers at ``urls``."""

    urls: tuple[str, ...]
    servers: Servers
    store: TCPStore
    group: Any
    device: torch.device

    async def send(self, weights: Mapping[str, Tensor]) -> None:
        """One whole update. Raises Outage, EngineError or RuntimeError; the group is then of no use any more."""
        info = {
            "names": list(weights),
            "shapes": [list(tensor.shape) for tensor in weights.values()],
            "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
        }
        await self._ask("/start_weight_update", {})
        stop = threading.Event()
        sending = asyncio.create_task(asyncio.to_thread(self._broadcast, weights, stop))
        try:
            await self._ask("/update_weights", {"update_info": info})
        except BaseException:
            stop.set()  # nobody receives any more: without this, the thread would wait until the time is out
            await asyncio.gather(sending, return_exceptions=True)
            raise
        await sending
        await self._ask("/finish_weight_update", {})

    async def _ask(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(self.servers.ask(url, "POST", path, json=body) for url in self.urls))

    def _broadcast(self, weights: Mapping[str, Tensor], stop: threading.Event) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        for tensor in weights.values():
            work = self.group.broadcast([tensor.to(self.device)], options)
            while not work.is_completed():
                if stop.is_set():
                    raise RuntimeError("a server gave up while it was receiving")
                time.sleep(_POLL_S)
            work.wait()


async def _connect(
    urls: Sequence[str], servers: Servers, route: TransferRoute, weights: Mapping[str, Tensor]
) -> _Group:
    """Makes a new group with the workers behind ``urls``. They are asked first whether they would take ``weights``: a
    broadcast that nobody receives waits until the time is out."""
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    await asyncio.gather(*(_call(servers, url, "poise_require_shapes", shapes) for url in urls))
    answers = await asyncio.gather(*(servers.ask(url, "GET", "/get_world_size") for url in urls))
    sizes = [int(answer["world_size"]) for answer in answers]
    backend = "gloo" if route.kind.device == "cpu" else "nccl"
    host, timeout = _address_towards(urls[0]), timedelta(seconds=route.timeout_s)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    inits = []
    for index, url in enumerate(urls):
        init_info = {
            "backend": backend, "host": host, "port": store.port, "world_size": 1 + sum(sizes),
            "first_rank": 1 + sum(sizes[:index]), "timeout_s": route.timeout_s,
        }  # fmt: skip
        inits.append(servers.ask(url, "POST", "/init_weight_transfer_engine", json={"init_info": init_info}))
    group, *_ = await asyncio.gather(asyncio.to_thread(_process_group, backend, store, 1 + sum(sizes), timeout), *inits)
    device = torch.device("cpu" if backend == "gloo" else "cuda")
    return _Group(urls=tuple(urls), servers=servers, store=store, group=group, device=device)


async def forget_cached_keys(servers: Servers, urls: Sequence[str]) -> None:
    """After an update: drops the keys and values that the old weights computed, those of running requests too. A
    request that was paused reads its tokens again, so that what it samples from now on is the new policy's alone."""
    parameters = {"reset_running_requests": "true"}
    for url in urls:
        answer = await servers.ask(url, "POST", "/reset_prefix_cache", params=parameters)
        if not answer["success"]:
            raise SyncError(f"{url} kept cached keys of the old weights: /reset_prefix_cache was refused")


def stored_parameters(folder: Path) -> Older:
    """Reads single parameters of a checkpoint that is not packed in MXFP4. Raises KeyError for a name it has not."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.is_file() else {}

    def parameter(name: str) -> Tensor:
        with safe_open(folder / files.get(name, "model.safetensors"), framework="pt", device="cpu") as file:
            if name not in file.keys():  # noqa: SIM118 - a handle is no mapping
                raise KeyError(name)
            return file.get_tensor(name)

    return parameter


def _process_group(backend: str, store: TCPStore, world_size: int, timeout: timedelta) -> Any:
    """Apart from torch's global group, which the trainer may have for itself."""
    if backend == "gloo":
        return ProcessGroupGloo(store, 0, world_size, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, 0, world_size, options)


def _address_towards(url: str) -> str:
    """This machine's address on the way to the server; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]


async def _call(servers: Servers, url: str, method: str, *arguments: Any) -> Any:
    """One of the plugin's methods, on every worker of one server."""
    body = {"method": method, "args": list(arguments)}
    return await servers.ask(url, "POST", "/collective_rpc", json=body)
