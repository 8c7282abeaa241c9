"""A process group of the trainer and the workers of servers, over which one update after another is broadcast."""

import asyncio
import concurrent.futures
import ctypes
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

from poise.engine.http import Servers

_POLL_S = 0.0005
_LAST_WORDS_S = 5.0  # a server whose connection is lost has as long to say, or not, why


@dataclass(frozen=True)
class Group:
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
        except RuntimeError:  # a server's error says more than that of the broadcast
            await asyncio.wait([answer], timeout=_LAST_WORDS_S)
            if answer.done():
                answer.result()
            raise
        finally:
            answer.cancel()
        await self._ask("/finish_weight_update", {})

    async def _ask(self, path: str, body: Mapping[str, Any]) -> None:
        await asyncio.gather(*(self.servers.ask(url, "POST", path, json=body) for url in self.urls))

    async def _broadcast(self, tensors: Iterable[tuple[str, Tensor]], answer: "asyncio.Task[None]") -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        for _, tensor in tensors:
            work = self.group.broadcast([tensor.to(self.device)], options)
            try:
                while not work.is_completed():
                    if answer.done():
                        # Raises where a server failed, which receives no more. Where all have everything, their answer
                        # may be here before the last broadcast is seen to end.
                        answer.result()
                    await asyncio.sleep(_POLL_S)
            except BaseException:
                _keep_alive(self.group, work)
                raise
            work.wait()
            del tensor, work  # gone before the next one is gathered


# Groups that were given up, each with its last broadcast. Python itself never frees the list: the end of the process
# would wait as well.
_unfinished: list[tuple[Any, Any]] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))


def _keep_alive(group: Any, work: Any) -> None:
    """Holds on to a group until its last broadcast has ended, if only because the time is out: to drop it before blocks
    whoever does so, and every request with him, until then."""
    _unfinished[:] = [(group, work), *(pair for pair in _unfinished if not pair[1].is_completed())]


async def connect(
    urls: Sequence[str],
    servers: Servers,
    shapes: Mapping[str, list[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    timeout: timedelta,
) -> Group:
    """Makes a new group with the workers behind ``urls``: gloo to CPUs, NCCL to GPUs. They are asked first whether they
    would take ``shapes``: a broadcast that nobody receives waits until the time is out."""
    await asyncio.gather(*(call(servers, url, "poise_prepare_update", dict(shapes)) for url in urls))
    answers = await asyncio.gather(*(servers.ask(url, "GET", "/get_world_size") for url in urls))
    sizes = [int(answer["world_size"]) for answer in answers]
    backend, host = "gloo" if device.type == "cpu" else "nccl", _address_towards(urls[0])
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    inits = []
    for index, url in enumerate(urls):
        init_info = {
            "backend": backend, "host": host, "port": store.port, "world_size": 1 + sum(sizes),
            "first_rank": 1 + sum(sizes[:index]), "timeout_s": timeout.total_seconds(),
        }  # fmt: skip
        inits.append(servers.ask(url, "POST", "/init_weight_transfer_engine", json={"init_info": init_info}))
    group, *_ = await asyncio.gather(_joined(backend, store, 1 + sum(sizes), timeout), *inits)
    return Group(urls=tuple(urls), servers=servers, store=store, group=group, device=device, dtype=dtype)


async def call(servers: Servers, url: str, method: str, *arguments: Any) -> Any:
    """One of the plugin's methods, on every worker of one server."""
    body = {"method": method, "args": list(arguments)}
    return await servers.ask(url, "POST", "/collective_rpc", json=body)


async def _joined(backend: str, store: TCPStore, world_size: int, timeout: timedelta) -> Any:
    """The group, when all are there. Where one of them will never be, that takes until the time is out: the thread that
    waits for it is one that neither the end of an event loop nor that of the process waits for."""
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    made.set_running_or_notify_cancel()

    def make() -> None:
        try:
            made.set_result(_process_group(backend, store, world_size, timeout))
        except BaseException as error:  # belongs to whoever waits
            made.set_exception(error)

    threading.Thread(target=make, name="process group", daemon=True).start()
    return await asyncio.wrap_future(made)


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
