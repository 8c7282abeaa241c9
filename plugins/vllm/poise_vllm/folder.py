"""Reads a checkpoint folder as a stream of tensors, stacks of experts one expert at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

EXPERTS = ".mlp.experts."


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that ``checkpoint_tensors`` yields."""
    return {name: tuple(stored.get_shape()[dims:]) for name, stored, _, dims in _entries(folder)}


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Everything in ``folder``; ``mlp.experts.down_proj`` comes as ``mlp.experts.0.down_proj``, ``...1.down_proj``, ...

    Raises FileNotFoundError where the folder or a shard is missing.
    """
    for name, stored, index, _ in _entries(folder):
        yield name, stored[index]


def _entries(folder: Path) -> Iterator[tuple[str, Any, Any, int]]:
    """Name, lazy tensor, the index that selects the named part of it, how many dimensions the index takes away."""
    for shard in _shards(folder):
        with safe_open(shard, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - a handle is no mapping
                stored = file.get_slice(name)
                prefix, is_stack, part = name.partition(EXPERTS)
                if is_stack:
                    for expert in range(stored.get_shape()[0]):
                        yield f"{prefix}{EXPERTS}{expert}.{part}", stored, expert, 1
                else:
                    yield name, stored, slice(None), 0


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    return [single]
