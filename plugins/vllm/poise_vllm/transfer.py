"""Weight transfer engine ``poise``: the trainer broadcasts each tensor over a process group of its own.

gloo between CPUs, NCCL between GPUs, both by torch alone: the trainer needs no vLLM. The trainer is rank 0 and keeps
the store; the workers of all servers follow.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from poise_vllm.update import update_model


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer waits. ``first_rank``: the group's rank of this server's worker 0. ``timeout_s``: of each
    broadcast."""

    backend: str
    host: str
    port: int
    world_size: int
    first_rank: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What the trainer will broadcast, in this order. ``dtype``: one of torch's names, for all."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One update is one ``update_weights``: nothing is applied in ``start_weight_update`` or after."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = init_info.first_rank + self.parallel_config.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout)
        self._group = process_group(init_info.backend, store, rank, init_info.world_size, timeout)

    def start_weight_update(self) -> None:
        if self._group is None:
            raise RuntimeError("no group to receive over: init_weight_transfer_engine comes first")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        dtype = getattr(torch, update_info.dtype)
        shapes = {name: tuple(shape) for name, shape in zip(update_info.names, update_info.shapes, strict=True)}

        def received() -> Any:
            for name, shape in shapes.items():
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                broadcast(self._group, tensor)
                yield name, tensor

        update_model(self.model, self.model_config, shapes, received())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would ask for an accelerator to wait for, and a CPU server has none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self._group = None


def process_group(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A group apart from torch's global one, of which a vLLM worker has its own."""
    if backend == "gloo":
        return torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout)
    if backend == "nccl":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, world_size, options)
    raise ValueError(f"backend must be 'gloo' or 'nccl', got {backend!r}")


def broadcast(group: Any, tensor: Tensor) -> None:
    """From rank 0."""
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
