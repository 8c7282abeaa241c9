"""Checkpoints: a Hugging Face folder and one more file, with optimizer, random states and the run's place."""

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from poise.model import GptOss, read_config, save_model
from poise.parallel import ALONE, Mesh, fill_part, load_parts, put_away
from poise.train.critic import Critic
from poise.train.sharded import Saving, is_sharded, load_sharded, load_whole_optimizer, start_saving

STATE_FILE = "trainer_state.pt"


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: GptOss,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    save_tokenizer: Callable[[Path], None],
    mesh: Mesh = ALONE,
    critic: Critic | None = None,
) -> Saving:
    """Write ``folder``: the model in float32 as a Hugging Face folder, and ``trainer_state.pt`` beside it.

    ``state``: the caller's place in the run (step, position in the data, generators): numbers, strings, None, tensors,
    and lists, tuples and dicts of these. ``save_tokenizer`` is called with the folder to write the tokenizer's files
    into. The random states of torch, its CUDA devices, numpy and python travel along, and so does a ``critic`` with its
    optimizer, in its own type.

    Everything is written aside, flushed to disk, then renamed: a folder of this name is whole or absent. An older one
    of the same name is replaced. Raises TypeError, naming the key, for a state that could not be read back.

    On a mesh each rank writes its parts (``poise.train.sharded``) while training goes on: ``wait`` for the result
    before the next one, and before the process ends.
    """
    folder = Path(folder)
    _require_plain(state, "state")
    rest: dict[str, Any] = {"random": _random_state(), "state": state}
    if mesh.shards is not None:
        return start_saving(
            folder,
            model=model,
            optimizer=optimizer,
            mesh=mesh,
            rest=rest,
            save_tokenizer=save_tokenizer,
            publish=_publish,
            critic=critic,
        )
    if critic is not None:
        rest["critic"] = {"model": critic.state_dict(), "optimizer": critic.optimizer.state_dict()}
    aside = folder.with_name(f".{folder.name}.partial")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    whole = aside / "whole"
    save_model(model, whole, format="fp32", tokenizer=save_tokenizer)
    torch.save({"optimizer": optimizer.state_dict(), **rest}, whole / STATE_FILE)
    _publish(whole, folder)
    return Saving()


def _publish(whole: Path, folder: Path) -> None:
    """``whole``, alone in a folder that is put away, becomes ``folder``."""
    for path in (*whole.rglob("*"), whole):
        _flush(path)
    aside = whole.parent
    if folder.exists():
        folder.rename(aside / "replaced")
    whole.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(aside)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: GptOss,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh = ALONE,
    critic: Critic | None = None,
) -> dict[str, Any]:
    """Fill ``model``, ``optimizer`` and ``critic``, set every random state, return the caller's ``state``.

    Whatever mesh, or single process, has written the folder, any other can read it. Call it last before the run goes
    on: whatever draws random numbers in between would shift the sequence. Raises FileNotFoundError for a folder that is
    no checkpoint of a run, and ValueError for one of another model or, where there is a ``critic``, without one.
    """
    folder = Path(folder)
    saved = _read(folder, mmap=mesh.shards is not None)
    if critic is not None and "critic" not in saved:
        raise ValueError(f"{folder} holds no critic to go on with")
    if is_sharded(folder):
        _require_same(folder, model)
        load_sharded(folder, model=model, optimizer=optimizer, mesh=mesh, critic=critic)
    else:
        load_weights(folder, model=model, mesh=mesh)
        if mesh.shards is None:
            optimizer.load_state_dict(saved["optimizer"])
        else:
            load_whole_optimizer(saved["optimizer"], model, optimizer, mesh)
        if critic is not None:
            _load_whole_critic(saved["critic"], critic, mesh)
    _set_random_state(saved["random"])
    return saved["state"]


def _load_whole_critic(saved: dict[str, Any], critic: Critic, mesh: Mesh) -> None:
    """That of one process."""
    if mesh.shards is None:
        critic.load_state_dict(saved["model"])
        critic.optimizer.load_state_dict(saved["optimizer"])
        return
    critic.statistics.copy_(saved["model"]["statistics"])
    put_away(critic)
    for name, parameter in critic.named_parameters():
        fill_part(name, parameter, saved["model"][name], mesh)
    load_whole_optimizer(saved["optimizer"], critic, critic.optimizer, mesh)


def load_weights(folder: str | os.PathLike[str], *, model: GptOss, mesh: Mesh = ALONE) -> None:
    """The parameters alone. Raises ValueError for those of another model."""
    folder = Path(folder)
    _require_same(folder, model)
    if is_sharded(folder):
        load_sharded(folder, model=model, optimizer=None, mesh=mesh)
    else:
        load_parts(model, folder, mesh)


def _require_same(folder: Path, model: GptOss) -> None:
    config = read_config(folder)
    # Stop ids come from the tokenizer when a model is saved; they are no part of what it computes.
    if replace(config, eos_token_ids=model.config.eos_token_ids) != model.config:
        raise ValueError(f"{folder} holds another model: {config} instead of {model.config}")


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The caller's ``state`` alone. Raises FileNotFoundError for a folder that is no checkpoint of a run."""
    return _read(Path(folder), mmap=True)["state"]


def checkpoint_folder(run_folder: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint after ``step`` steps lives."""
    return Path(run_folder) / "checkpoints" / f"step_{step:06d}"


def latest_checkpoint(run_folder: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint of a run with the most steps, or None. A half-written one has another name."""
    found = [
        (int(match.group(1)), path)
        for path in (Path(run_folder) / "checkpoints").glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", path.name)) and (path / STATE_FILE).is_file()
    ]
    return max(found)[1] if found else None


def _read(folder: Path, *, mmap: bool) -> dict[str, Any]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint to resume from: it has no {STATE_FILE}")
    # Mapped, the optimizer's moments stay on disk.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _random_state() -> dict[str, Any]:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": numpy_state | {"state": numpy_state["state"] | {"key": key}},
        "python": random.getstate(),
    }


def _set_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    key = saved["numpy"]["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(saved["numpy"] | {"state": saved["numpy"]["state"] | {"key": key}})
    random.setstate(saved["python"])


def _require_plain(value: Any, name: str) -> None:
    """Only what torch reads back without running code. Exact types, since numpy's floats subclass python's."""
    if isinstance(value, torch.Tensor) or type(value) in (type(None), bool, int, float, str):
        return
    if type(value) is dict:
        for key, item in value.items():
            _require_plain(key, f"{name}, key {key!r}")
            _require_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{name}[{index}]")
    else:
        raise TypeError(
            f"{name} is a {type(value).__name__}: only numbers, strings, None, tensors, lists, tuples, dicts"
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
