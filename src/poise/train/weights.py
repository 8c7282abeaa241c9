"""Gives vLLM servers the trainer's weights: by a checkpoint folder, or tensor by tensor over a process group.

Both need poise's plugin in the server (``plugins/vllm``). What arrived is proved by ``poise.train.canary``.
"""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from poise.config import ConfigError, RunError
from poise.engine.http import EngineError, Outage, Servers
from poise.model import GptOss, GptOssConfig
from poise.model.checkpoint import MAX_SHARD_BYTES, Format
from poise.model.config import FULL, SLIDING
from poise.parallel import ALONE, Mesh, draw_all, export_model, full_tensors, held_part, led
from poise.train.broadcast import Group, call, connect
from poise.train.diagnosis import Older

_EXPERTS = ".mlp.experts."
_KINDS = {"float32": "fp32", "bfloat16": "bf16"}
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
            answer = await call(servers, server.url, "poise_describe")
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
            writing = asyncio.create_task(asyncio.to_thread(self._write, model))
            try:
                await asyncio.shield(writing)
            finally:  # cancelled: the thread goes on, and nobody may remove the folder below it
                await asyncio.wait([writing])
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
        await call(self.servers, url, "poise_load_folder", str(path))

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
        self._group: Group | None = None
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
        group, self._group = self._group, None  # one whose update breaks off, or is cancelled, is of no use any more
        try:
            if group is None:
                group = await self._connect([server.url for server in self.servers.all], shapes)
            await group.send(shapes, tensors)
            self._group = group
        except (Outage, EngineError, RuntimeError) as error:
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
            group = await self._connect([url], shapes)
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

    async def _connect(self, urls: Sequence[str], shapes: Mapping[str, list[int]]) -> Group:
        device = torch.device("cpu") if self.kind.device == "cpu" else self.mesh.device or torch.device("cuda")
        return await connect(
            urls, self.servers, shapes, device=device, dtype=self.kind.dtype, timeout=timedelta(seconds=self.timeout_s)
        )


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
