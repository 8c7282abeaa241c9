"""Weights into a model that is split over a mesh, and out of it, without a whole model on any rank."""

import resource
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from poise.model import GptOss, initial_weights, read_parts, save_model
from poise.model.checkpoint import MAX_SHARD_BYTES, Format, Tokenizer
from poise.parallel.fsdp import full_tensors, held_part, local_part
from poise.parallel.mesh import Mesh


@torch.no_grad()
def load_parts(model: GptOss, folder: str | Path, mesh: Mesh) -> None:
    """Fills ``model`` from a Hugging Face folder: each rank reads its slices of the safetensors files, and MXFP4 is
    unpacked expert by expert. Raises CheckpointError as ``poise.model.load_model`` does."""
    read_parts(
        folder,
        (
            (name, held_part(name, parameter, mesh).slices, local_part(parameter))
            for name, parameter in model.named_parameters()
        ),
    )


@torch.no_grad()
def init_parts(model: GptOss, seed: int, mesh: Mesh) -> None:
    """Fills ``model`` with the numbers that ``GptOss.init_weights(seed)`` gives one device, a tensor at a time."""
    with torch.device("meta"):
        whole = GptOss(model.config)
    for (name, values), parameter in zip(initial_weights(whole, seed), model.parameters(), strict=True):
        fill_part(name, parameter, values, mesh)


@torch.no_grad()
def fill_part(name: str, parameter: Tensor, whole: Tensor, mesh: Mesh) -> None:
    """This rank's part of ``whole`` into a parameter, or a moment of the parameter ``name``."""
    local_part(parameter).copy_(whole[held_part(name, parameter, mesh).slices])


def export_model(
    model: GptOss,
    path: str | Path,
    mesh: Mesh,
    format: Format = "bf16",
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """``poise.model.save_model`` of a model that is split: the first rank writes, tensor by tensor, what all gather.

    All ranks must call it. The first holds one file's tensors at a time, so at most ``max_shard_bytes`` of them or a
    single larger one. Raises as ``save_model`` does.
    """
    if mesh.shards is None:
        save_model(model, path, format, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)
        return
    if any(mesh.gather_from_all(Path(path).exists())):
        raise FileExistsError(f"{path} exists: a checkpoint never overwrites another")
    # What is packed is rounded once, from float32.
    tensors = full_tensors(model, mesh, torch.bfloat16 if format == "bf16" else torch.float32)
    if mesh.is_first:
        save_model(model, path, format, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, tensors=tensors)
    else:
        draw_all(tensors)


def draw_all(tensors: Iterable[object]) -> None:
    """Takes part in gathering, and keeps nothing."""
    deque(tensors, maxlen=0)


def peak_host_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
