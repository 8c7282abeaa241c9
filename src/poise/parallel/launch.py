"""The processes that torchrun started: how they join to a mesh, and how they end together."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from poise.config import ConfigError, ParallelConfig, RunError
from poise.interrupt import Interrupted
from poise.parallel.mesh import ALONE, Mesh, degrees_of, make_mesh

# Ranks wait for the slowest rollout.
PATIENCE = timedelta(hours=2)
_UNTIL_GONE_S = 10.0

_EXIT_CODES: dict[type[BaseException], int] = {ConfigError: 2, RunError: 1, Interrupted: 130}


@contextmanager
def joined(config: ParallelConfig, device: torch.device, compute: torch.dtype) -> Iterator[Mesh]:
    """The mesh of this process and its siblings; without torchrun, the process alone.

    ``device``: "cuda" becomes the GPU of the local rank. An error in any rank ends all of them, and one of them says
    why: whichever comes first passes it on, the others leave with SystemExit. Raises ConfigError for degrees that do
    not multiply to the number of processes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        degrees_of(config, 1)
        if config.offload:
            raise ConfigError("parallel.offload needs torchrun, also for one process: torchrun --nproc-per-node 1")
        yield ALONE
        return
    device = _device_of_rank(device)
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=PATIENCE))
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE
    )
    reports = dist.PrefixStore("poise", store)
    reports.set(f"process {rank}", f"{socket.gethostname()} {os.getpid()}")
    try:
        yield make_mesh(config, device, compute)
    except BaseException as error:
        # Torchrun asks all to end as soon as one has: whoever has yet to say why would end without a word.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _is_first_to_report(reports, rank):
            raise SystemExit(next((c for kind, c in _EXIT_CODES.items() if isinstance(error, kind)), 1)) from None
        if _is_lost_contact(error):
            raise RunError(_lost(reports, num_ranks)) from error
        raise
    dist.destroy_process_group()


def _device_of_rank(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ConfigError(f"model.device {device} is one GPU for all processes: take cuda, and each takes its own")
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if local.index >= torch.cuda.device_count():
        raise ConfigError(f"local rank {local.index} has no GPU: torch sees {torch.cuda.device_count()} on this node")
    torch.cuda.set_device(local)
    return local


def _is_first_to_report(reports: dist.Store, rank: int) -> bool:
    try:
        return reports.compare_set("ended first", "", str(rank)) == str(rank).encode()
    except (dist.DistError, RuntimeError):  # torchrun is gone with its store: better twice than never
        return True


def _is_lost_contact(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "onnection", "NCCL", "ProcessGroup")
    )


def _lost(reports: dist.Store, num_ranks: int) -> str:
    # Its connections close a little before the process itself has ended, which on a busy machine are seconds.
    deadline = time.monotonic() + _UNTIL_GONE_S
    while not (gone := [str(rank) for rank in range(num_ranks) if _is_gone(reports, rank)]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    who = f"rank {', '.join(gone)} is gone (killed, or out of memory)" if gone else "contact to another rank is lost"
    return f"{who}, so all {num_ranks} ranks end; --resume goes on from the last checkpoint"


def _is_gone(reports: dist.Store, rank: int) -> bool:
    """Whether a rank of this node no longer runs; of other nodes nobody here can tell."""
    try:
        host, pid = reports.get(f"process {rank}").decode().rsplit(" ", 1)
    except (dist.DistError, RuntimeError):
        return False
    if host != socket.gethostname():
        return False
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    return False
