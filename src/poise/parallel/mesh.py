"""The ranks of a run as a mesh data x sequence x expert, and what they tell each other outside of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from poise.config import ConfigError, ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """Three degrees, their product the number of ranks, and the groups that follow from them.

    Rank (d, s, e) is number (d sequence + s) expert + e, so that ranks that exchange most are neighbours. Micro-batches
    are dealt to the ``data`` x ``expert`` places; the ``sequence`` ranks of a place share each of them. Every parameter
    is split over all ranks, an expert's over the ranks of its place in ``expert``. Without ``axes`` there is one rank
    and no communication.

    ``device``: where this rank computes; ``compute``: the type in which parameters are gathered and activations live;
    ``offload``: shards and moments live in host memory.
    """

    data: int = 1
    sequence: int = 1
    expert: int = 1
    rank: int = 0
    device: torch.device | None = None
    compute: torch.dtype = torch.float32
    offload: bool = False
    axes: DeviceMesh | None = None  # [data, sequence, expert]
    shards: DeviceMesh | None = None  # all ranks in one line
    expert_shards: DeviceMesh | None = None  # [expert, data x sequence]
    places: DeviceMesh | None = None  # [sequence, data x expert]
    files: dist.ProcessGroup | None = None  # all ranks once more, for what is written in the background

    @property
    def num_ranks(self) -> int:
        return self.data * self.sequence * self.expert

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def num_places(self) -> int:
        return self.data * self.expert

    @property
    def place(self) -> int:
        """Which micro-batches this rank gets, 0..num_places - 1."""
        return self.rank // (self.sequence * self.expert) * self.expert + self.expert_rank

    @property
    def sequence_rank(self) -> int:
        return self.rank // self.expert % self.sequence

    @property
    def expert_rank(self) -> int:
        return self.rank % self.expert

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        assert self.axes is not None
        return self.axes["sequence"].get_group()

    @property
    def expert_group(self) -> dist.ProcessGroup:
        assert self.axes is not None
        return self.axes["expert"].get_group()

    def share(self, items: Sequence[T], filler: T) -> list[T]:
        """Those of this rank's place; ``filler`` where others have one more, so that all ranks go the same way."""
        mine = list(items[self.place :: self.num_places])
        return mine + [filler] * (-(-len(items) // self.num_places) - len(mine))

    def gather(self, value: T) -> list[T]:
        """``value`` of every place, in their order: what one place computed, all ranks know."""
        if self.places is None:
            return [value]
        gathered: list[T | None] = [None] * self.num_places
        dist.all_gather_object(gathered, value, group=self.places["place"].get_group())
        return gathered  # type: ignore[return-value]

    def map(self, function: Callable[[T], T], items: Sequence[T], filler: T) -> list[T]:
        """``function`` of each item, computed by the place that the item is dealt to and known to all."""
        if self.places is None:
            return [function(item) for item in items]
        parts = self.gather([function(item) for item in self.share(items, filler)])
        return [parts[i % self.num_places][i // self.num_places] for i in range(len(items))]

    def gather_from_all(self, value: T) -> list[T]:
        """``value`` of every rank."""
        if self.shards is None:
            return [value]
        gathered: list[T | None] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value, group=self.shards.get_group())
        return gathered  # type: ignore[return-value]


ALONE = Mesh()


def degrees_of(config: ParallelConfig, num_ranks: int) -> tuple[int, int, int]:
    """(data, sequence, expert). Raises ConfigError, with the numbers, where they do not multiply to ``num_ranks``."""
    data, sequence, expert = config.data_degree, config.sequence_degree, config.expert_degree
    shared = sequence * expert
    asked = f"sequence_degree {sequence} x expert_degree {expert}"
    hint = "" if num_ranks > 1 else "; torchrun --nproc-per-node N -m poise train RECIPE starts N processes"
    if data == 0:
        if num_ranks % shared:
            raise ConfigError(f"parallel: {_processes(num_ranks)} cannot be shared by {asked} = {shared}{hint}")
        return num_ranks // shared, sequence, expert
    if data * shared != num_ranks:
        raise ConfigError(
            f"parallel: data_degree {data} x {asked} = {data * shared} does not make {_processes(num_ranks)}{hint}"
        )
    return data, sequence, expert


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def make_mesh(config: ParallelConfig, device: torch.device, compute: torch.dtype = torch.float32) -> Mesh:
    """The mesh of the process group that is already there.

    Raises ConfigError unless the degrees multiply to its size, and for offload without a GPU.
    """
    data, sequence, expert = degrees_of(config, dist.get_world_size())
    if config.offload and device.type == "cpu":
        raise ConfigError("parallel.offload does nothing on the CPU, where parameters are in host memory already")
    ranks = torch.arange(data * sequence * expert).view(data, sequence, expert)
    by_expert = ranks.permute(2, 0, 1).reshape(expert, -1)
    by_sequence = ranks.permute(1, 0, 2).reshape(sequence, -1)
    kind = device.type
    return Mesh(
        data=data,
        sequence=sequence,
        expert=expert,
        rank=dist.get_rank(),
        device=device,
        compute=compute,
        offload=config.offload,
        axes=init_device_mesh(kind, tuple(ranks.shape), mesh_dim_names=("data", "sequence", "expert")),
        shards=DeviceMesh(kind, ranks.flatten(), mesh_dim_names=("shard",)),
        expert_shards=DeviceMesh(kind, by_expert, mesh_dim_names=("expert", "shard")),
        places=DeviceMesh(kind, by_sequence, mesh_dim_names=("sequence", "place")),
        files=dist.new_group(backend="gloo"),
    )
