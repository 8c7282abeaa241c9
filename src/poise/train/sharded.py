"""Checkpoints of a mesh: each rank writes its parts, in the background; any number of ranks reads them.

A folder ``shards`` in the format of ``torch.distributed.checkpoint`` holds the parameters in float32 and both moments
of each, by name and whole shape, those of a critic behind ``critic.``; beside it are config.json, the tokenizer's files
and ``trainer_state.pt`` with the rest.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from poise.model import GptOss
from poise.model.checkpoint import write_configs
from poise.parallel import Mesh, fill_part, held_part, local_part, put_away
from poise.train.critic import Critic
from poise.train.optimizer import steps_done

SHARDS = "shards"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Saving:
    """A checkpoint on its way to the disk. ``wait`` returns when it is whole, or raises what went wrong."""

    def __init__(self, future: "Future[Any] | None" = None) -> None:
        self._future = future

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


def start_saving(
    folder: str | os.PathLike[str],
    *,
    model: GptOss,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    rest: dict[str, Any],
    save_tokenizer: Callable[[Path], None],
    publish: Callable[[Path, Path], None],
    critic: Critic | None = None,
) -> Saving:
    """Copies this rank's parts and begins to write them; training may go on at once. All ranks must call it.

    ``rest``: what the first rank saves beside the parts. ``publish(written, folder)`` makes the whole folder appear: it
    runs on the first rank when the parts of all ranks are on the disk, so what is half written never bears the name.
    """
    folder = Path(folder)
    aside = folder.with_name(f".{folder.name}.partial")
    whole = aside / "whole"
    if mesh.is_first:
        if aside.exists():
            shutil.rmtree(aside)
        whole.mkdir(parents=True)
        save_tokenizer(whole)
        write_configs(model.config, "fp32", whole)
        rest = rest | {"steps_done": steps_done(optimizer)}
        if critic is not None:
            rest["critic"] = {"statistics": critic.statistics, "steps_done": steps_done(critic.optimizer)}
        torch.save(rest, whole / "trainer_state.pt")
    mesh.gather_from_all(None)  # the folder is there, and what was written into it before is not
    state = _state(model, optimizer, mesh, critic)
    saved = dcp.async_save(state, checkpoint_id=whole / SHARDS, process_group=mesh.files)
    assert isinstance(saved, Future)
    done: Future[None] = Future()

    def finish(result: "Future[Any]") -> None:
        try:
            result.result()
            if mesh.is_first:
                publish(whole, folder)
            done.set_result(None)
        except BaseException as error:  # belongs to whoever waits
            done.set_exception(error)

    saved.add_done_callback(finish)
    return Saving(done)


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / SHARDS).is_dir()


def load_sharded(
    folder: str | os.PathLike[str],
    *,
    model: GptOss,
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    critic: Critic | None = None,
) -> None:
    """Fills ``model``, ``optimizer`` and ``critic`` from the parts of whichever mesh wrote them.

    Each rank reads its own. Raises ValueError where the parts are not those of this model.
    """
    folder = Path(folder)
    if optimizer is not None:
        rest = torch.load(folder / "trainer_state.pt", map_location="cpu", weights_only=True)
        set_empty_moments(optimizer, rest["steps_done"])
        if critic is not None:
            set_empty_moments(critic.optimizer, rest["critic"]["steps_done"])
            critic.statistics.copy_(rest["critic"]["statistics"])
    state = _state(model, optimizer, mesh, critic)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            dcp.load(state, checkpoint_id=folder / SHARDS, process_group=mesh.files, no_dist=mesh.shards is None)
    except (RuntimeError, ValueError, dcp.CheckpointException) as error:
        raise ValueError(f"{folder} holds another model: {error}") from error


def load_whole_optimizer(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """The optimizer of one process (its ``state_dict``) into one whose moments are split."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    set_empty_moments(optimizer, int(saved["param_groups"][0]["steps_done"]))
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for moment in _MOMENTS:
            if index in saved["state"]:
                fill_part(names[parameter], optimizer.state[parameter][moment], saved["state"][index][moment], mesh)


def set_empty_moments(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """An AdamW that has made ``num_steps``, with moments to be filled."""
    for group in optimizer.param_groups:
        group["steps_done"] = num_steps
        for parameter in group["params"] if num_steps else ():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(num_steps), device=parameter.device if group["fused"] else "cpu"),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }


def _state(
    model: GptOss, optimizer: torch.optim.Optimizer | None, mesh: Mesh, critic: Critic | None
) -> dict[str, Tensor]:
    """What is saved, under its name: tensors that know which part of which whole they are."""
    state = _parts("model", "", model, optimizer, mesh)
    if critic is not None:
        state |= _parts("critic", "critic.", critic, critic.optimizer, mesh)
    return state


def _parts(
    kind: str, prefix: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh
) -> dict[str, Tensor]:
    put_away(model)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"{kind}.{name}"] = _placed(name, parameter.detach(), mesh)
        if optimizer is not None and parameter in optimizer.state:
            for moment in _MOMENTS:
                state[f"{prefix}{moment}.{name}"] = _placed(name, optimizer.state[parameter][moment], mesh)
    return state


def _placed(name: str, x: Tensor, mesh: Mesh) -> Tensor:
    """An expert's part says that it is one of the stack of all ranks."""
    if not isinstance(x, DTensor) or ".experts." not in name:
        return x
    assert mesh.expert_shards is not None
    shape = torch.Size(held_part(name, x, mesh).shape)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0), *x.placements]
    return DTensor.from_local(
        local_part(x), mesh.expert_shards, placements, run_check=False, shape=shape, stride=stride
    )
