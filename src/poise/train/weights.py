"""Gives vLLM servers the trainer's weights: by a checkpoint folder, or tensor by tensor over a process group.

Both need poise's plugin in the server (``plugins/vllm``). What arrived is proved by ``poise.train.canary``.
"""

import asyncio
import json
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
from poise.model import GptOss, GptOssConfig
from poise.model.checkpoint import MAX_SHARD_BYTES, Format
from poise.model.config import FULL, SLIDING
from poise.parallel import ALONE, Mesh, draw_all, export_model, full_tensors, held_part, led
from poise.train.diagnosis import Older

_EXPERTS = ".mlp.experts."
_KINDS = {"float32": "fp32", "bfloat16": "bf16"}
_POLL_S = 0.0005
# Of the files that a mesh writes for servers.
SHARD_BYTES = 64 * 2**20


class SyncError(RunError):
    """The servers did not take the weights. What they hold now is unknown until an update succeeds."""


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """What the servers are, all alike. ``dtype``: of their weights; ``device``: "cpu" or "cuda"."""

    dtype: torch.dtype
    device: str


class Route(Protocol):
    """A way for weights. Raises SyncError where they did not arrive.

    ``push``: returns when every server holds ``model``'s; all ranks of a mesh call it. ``give``: the weights pushed
    last to one server, which came back from a restart; a rank calls it alone. ``older``: those of the push before.
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


def served_tensors(model: GptOss, dtype: torch.dtype, mesh: Mesh = ALONE) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters as ``dtype``, in Hugging Face's names but one tensor per expert: the only form of experts
    that a vLLM which is already serving loads. One at a time; on a mesh each is gathered when its turn comes, by all
    ranks together, and is gone before the next where nobody keeps it."""
    for name, whole in full_tensors(model, mesh, dtype):
        for index, part in enumerate(_parts(name, len(whole))):
            yield part, (whole if part == name else whole[index]).contiguous()
        del whole


def served_shapes(model: GptOss, mesh: Mesh = ALONE) -> dict[str, list[int]]:
    """Name and shape of what ``served_tensors`` yields, in its order."""
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        shape = list(held_part(name, parameter, mesh).shape)
        parts = _parts(name, shape[0])
        shapes |= dict.fromkeys(parts, shape if parts == [name] else shape[1:])
    return shapes


def _parts(name: str, length: int) -> list[str]:
    prefix, is_stack, part = name.partition(_EXPERTS)
    return [f"{prefix}{_EXPERTS}{expert}.{part}" for expert in range(length)] if is_stack else [name]


class FolderRoute:
    """Writes a checkpoint that every server then reads, when it is told to by ``tell(url, folder)``, by default as
    poise's plugin for vLLM wants to be told.

    The folder must mean the same to the servers, and on a mesh to all ranks, of which the first holds ``shard_bytes``
    of tensors, or one larger, while it writes. The two newest checkpoints are kept: the current weights, for servers
    that come back from a restart, and those before, for a diagnosis.
    """

    def __init__(
        self,
        servers: Servers,
        kind: ServerKind,
        folder: Path,
        *,
        tell: Callable[[str, Path], Awaitable[None]] | None = None,
        mesh: Mesh = ALONE,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.servers, self.kind, self.folder, self.mesh = servers, kind, folder.resolve(), mesh
        self.shard_bytes = MAX_SHARD_BYTES if mesh.shards is None else shard_bytes
        self.tell = tell or self._tell_plugin
        self._kept: list[Path] = []
        self._count = 0

    async def push(self, model: GptOss) -> None:
        if self.mesh.shards is None:
            await asyncio.to_thread(self._write, model)
        else:
            self._write(model)
        await led(self.mesh, self._give_all)

    async def give(self, url: str) -> None:
        path = self._kept[-1]
        try:
            await self.tell(url, path)
        except (Outage, EngineError) as error:
            raise SyncError(f"{url} did not load {path}: {error}") from error

    def older(self) -> Older | None:
        return stored_parameters(self._kept[-2]) if len(self._kept) > 1 else None

    async def close(self) -> None:
        self._remove_but(0)

    async def _give_all(self) -> None:
        await asyncio.gather(*(self.give(server.url) for server in self.servers.all))

    async def _tell_plugin(self, url: str, path: Path) -> None:
        await _call(self.servers, url, "poise_load_folder", str(path))

    def _write(self, model: GptOss) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while (path := self.folder / f"weights_{self._count:06d}").exists():
            self._count += 1
        path = self.mesh.gather_from_all(path)[0]
        format: Format = "fp32" if self.kind.dtype == torch.float32 else "bf16"
        export_model(model, path, self.mesh, format, max_shard_bytes=self.shard_bytes)
        self._kept.append(path)
        self._remove_but(2)

    def _remove_but(self, num_kept: int) -> None:
        while len(self._kept) > num_kept:
            path = self._kept.pop(0)
            if self.mesh.is_first:
                shutil.rmtree(path)


class TransferRoute:
    """Broadcasts each tensor to the workers of all servers: gloo to CPUs, NCCL to GPUs; nothing is written to disk.

    The servers need ``--weight-transfer-config '{"backend": "poise"}'``. One process keeps copies of the current
    weights and of those before in its memory, in the servers' type. A mesh keeps none: its first rank sends what all
    gather, tensor by tensor, and a server that came back gets weights with the next push. The group is made at the
    first ``push``, and again after one that failed, as it does when a server was restarted. ``timeout_s``: how long a
    worker waits for a tensor.
    """

    def __init__(self, servers: Servers, kind: ServerKind, *, timeout_s: float = 300.0, mesh: Mesh = ALONE) -> None:
        self.servers, self.kind, self.timeout_s, self.mesh = servers, kind, timeout_s, mesh
        self._group: _Group | None = None
        self._kept: list[dict[str, Tensor]] = []

    async def push(self, model: GptOss) -> None:
        shapes = served_shapes(model, self.mesh)
        tensors = served_tensors(model, self.kind.dtype, self.mesh)
        if self.mesh.shards is None:
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
            self._kept = [*self._kept[-1:], weights]
            await self._send(shapes, iter(weights.items()))
            return
        if not self.mesh.is_first:
            draw_all(tensors)
        await led(self.mesh, lambda: self._send(shapes, tensors))

    async def _send(self, shapes: Mapping[str, list[int]], tensors: Iterator[tuple[str, Tensor]]) -> None:
        """To all servers. Draws all ``tensors`` in any case: other ranks help to gather them."""
        try:
            if self._group is None:
                self._group = await _connect([server.url for server in self.servers.all], self.servers, self, shapes)
            await self._group.send(shapes, tensors)
        except (Outage, EngineError, RuntimeError) as error:
            self._group = None
            raise SyncError(f"the weights did not reach the servers: {error}") from error
        finally:
            draw_all(tensors)

    async def give(self, url: str) -> None:
        if self.mesh.shards is not None:
            raise SyncError(
                f"{url} came back without weights, and a mesh keeps no copy to send to it before the next step; with "
                'engine.weights "folder" there is one'
            )
        self._group = None  # the server that came back is not in it any more
        weights = self._kept[-1]
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        try:
            group = await _connect([url], self.servers, self, shapes)
            await group.send(shapes, weights.items())
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
    dtype: torch.dtype

    async def send(self, shapes: Mapping[str, list[int]], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """One whole update. Raises Outage, EngineError or RuntimeError; the group is then of no use any more."""
        dtype = str(self.dtype).removeprefix("torch.")
        info = {"names": list(shapes), "shapes": list(shapes.values()), "dtype": dtype}
        await self._ask("/start_weight_update", {})
        answer = asyncio.create_task(self._ask("/update_weights", {"update_info": info}))
        try:
            await self._broadcast(tensors, answer)
            await answer
        except BaseException:
            if answer.done():
                answer.result()  # a server's error says more than that of the broadcast
            answer.cancel()
            raise
        await self._ask("/finish_weight_update", {})

    async def _ask(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(self.servers.ask(url, "POST", path, json=body) for url in self.urls))

    async def _broadcast(self, tensors: Iterable[tuple[str, Tensor]], answer: "asyncio.Task[None]") -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        for _, tensor in tensors:
            work = self.group.broadcast([tensor.to(self.device)], options)
            while not work.is_completed():
                if answer.done():
                    # Raises where a server failed, which receives no more. Where all have everything, their answer may
                    # be here before the last broadcast is seen to end.
                    answer.result()
                await asyncio.sleep(_POLL_S)
            work.wait()
            del tensor, work  # gone before the next one is gathered


async def _connect(
    urls: Sequence[str], servers: Servers, route: TransferRoute, shapes: Mapping[str, list[int]]
) -> _Group:
    """Makes a new group with the workers behind ``urls``. They are asked first whether they would take ``shapes``: a
    broadcast that nobody receives waits until the time is out."""
    await asyncio.gather(*(_call(servers, url, "poise_prepare_update", dict(shapes)) for url in urls))
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
    device = torch.device("cpu") if backend == "gloo" else route.mesh.device or torch.device("cuda")
    return _Group(urls=tuple(urls), servers=servers, store=store, group=group, device=device, dtype=route.kind.dtype)


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
