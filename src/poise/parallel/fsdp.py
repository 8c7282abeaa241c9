"""Fully sharded data parallelism (FSDP2): each rank holds a part of every parameter, gradient and moment.

"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (Zhao et al. 2023, arXiv 2304.11277). Parameters are
float32 and gathered block by block in the type of the computation; gradients are summed, not averaged, in float32: the
loss is divided once, by the number of tokens of all ranks.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from poise.config import ConfigError
from poise.model import GptOss, GptOssConfig
from poise.model.gpt_oss import Block, Experts
from poise.parallel.exchange import gather_rows
from poise.parallel.experts import ShardedExperts, require_experts
from poise.parallel.mesh import Mesh
from poise.parallel.ulysses import require_heads

Split = TypeVar("Split", bound=nn.Module)


def empty_model(config: GptOssConfig, mesh: Mesh, *, has_head: bool = True) -> GptOss:
    """A model whose parameters are split over the mesh, with arbitrary numbers: ``poise.parallel.loading`` fills it.

    Nothing larger than a shard is ever allocated. ``has_head`` False: the backbone alone, without ``lm_head``. Raises
    ConfigError where the degrees do not divide heads or experts.
    """
    try:
        require_heads(config.num_heads, mesh.sequence)
        require_experts(config.num_experts, mesh.expert)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with torch.device("meta"):
        model = GptOss(config)
        if not has_head:
            del model.lm_head
        for block in model.model.layers:
            assert isinstance(block, Block)
            if mesh.expert > 1:
                block.mlp.experts = ShardedExperts(config, mesh)
            block.mlp.experts.num_sharing = mesh.sequence
    assert mesh.shards is not None
    assert mesh.expert_shards is not None
    expert_shards = mesh.expert_shards["shard"]
    # A block recomputes within its forward, so these hooks lie around what is computed again, as they must.
    options = _options(mesh, mesh.compute)
    for block in model.model.layers:
        assert isinstance(block, Block)
        experts = block.mlp.experts
        fully_shard(
            experts, mesh=expert_shards, shard_placement_fn=_placement(experts, expert_shards.size()), **options
        )
        fully_shard(block, mesh=mesh.shards, **options)
    fully_shard(model, mesh=mesh.shards, **options)
    return _emptied(model, mesh)


def empty_linear(num_inputs: int, num_outputs: int, mesh: Mesh, device: torch.device) -> nn.Linear:
    """A float32 linear layer with arbitrary numbers: split over the mesh or, where there is none, on ``device``."""
    if mesh.shards is None:
        return nn.Linear(num_inputs, num_outputs, device=device, dtype=torch.float32)
    with torch.device("meta"):
        linear = nn.Linear(num_inputs, num_outputs)
    fully_shard(linear, mesh=mesh.shards, **_options(mesh, torch.float32))
    return _emptied(linear, mesh)


def _options(mesh: Mesh, compute: torch.dtype) -> dict[str, Any]:
    """Gathered as ``compute``, summed in float32."""
    param_dtype = None if compute is torch.float32 else compute
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    return {"mp_policy": policy} | ({"offload_policy": CPUOffloadPolicy()} if mesh.offload else {})


def _emptied(module: Split, mesh: Mesh) -> Split:
    """From the meta device to this rank's shards; gradients are summed."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    return module.to_empty(device="cpu" if mesh.offload else mesh.device)


def _placement(experts: Experts, num_shards: int) -> Callable[[nn.Parameter], Shard] | None:
    """Whole experts to each rank, or, where they cannot be shared out evenly, slices of each."""
    is_sliced = len(experts.gate_up_proj) % num_shards != 0
    fits = all(p.shape[1] % num_shards == 0 for p in experts.parameters())
    return (lambda parameter: Shard(1)) if is_sliced and fits else None


@dataclass(frozen=True)
class Held:
    """``shape``: of the whole parameter. ``slices``: the part of it that a rank holds, one slice a dimension."""

    shape: tuple[int, ...]
    slices: tuple[slice, ...]


def held_part(name: str, parameter: Tensor, mesh: Mesh) -> Held:
    """Which part of the whole parameter ``name`` this rank holds."""
    shape = list(parameter.shape)
    slices = [slice(0, size) for size in shape]
    if isinstance(parameter, DTensor):
        (placement,) = parameter.placements
        assert isinstance(placement, Shard)
        size = shape[placement.dim]
        chunk = -(-size // parameter.device_mesh.size())
        start = min(size, parameter.device_mesh.get_local_rank() * chunk)
        slices[placement.dim] = slice(start, min(size, start + chunk))
    if ".experts." in name:
        first = mesh.expert_rank * shape[0]
        slices[0] = slice(first + slices[0].start, first + slices[0].stop)
        shape[0] *= mesh.expert
    return Held(tuple(shape), tuple(slices))


def local_part(x: Tensor) -> Tensor:
    """The part of a parameter, gradient or moment that this rank holds, sharing its memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensors(model: nn.Module, mesh: Mesh, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor as ``dtype``) of each parameter on every rank, one at a time; all ranks must draw them all.

    This is how weights leave the mesh, to engines and to files, without a whole model on any rank.
    """
    put_away(model)
    for name, parameter in model.named_parameters():
        yield name, full_tensor(name, parameter.detach(), mesh, dtype)


@torch.no_grad()
def full_tensor(name: str, x: Tensor, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """The whole of what ranks hold parts of: a parameter, or a moment of the parameter ``name``."""
    if not isinstance(x, DTensor):
        return x.to(dtype)
    local = x.to_local().to(device=x.device_mesh.device_type, dtype=dtype)
    whole = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    ).full_tensor()
    return gather_rows(whole, mesh.expert_group) if ".experts." in name and mesh.expert > 1 else whole


def put_away(model: nn.Module) -> None:
    """Frees gathered parameters, so that ``named_parameters`` are shards: a forward without a backward leaves what the
    outermost module has of its own gathered, the embedding and the head."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def split_copy(model: GptOss, mesh: Mesh, *, has_head: bool = True) -> GptOss:
    """A copy, split over the mesh in the same way; ``has_head`` False: of the backbone alone, without ``lm_head``."""
    if mesh.shards is None:
        copy = deepcopy(model)
        if not has_head:
            del copy.lm_head
        return copy
    put_away(model)
    copy, parameters = empty_model(model.config, mesh, has_head=has_head), dict(model.named_parameters())
    for name, parameter in copy.named_parameters():
        local_part(parameter.detach()).copy_(local_part(parameters[name].detach()))
    return copy


def frozen_copy(model: GptOss, mesh: Mesh) -> GptOss:
    """A copy that takes no gradient, split over the mesh in the same way."""
    return split_copy(model, mesh).eval().requires_grad_(False)


def clip_gradient(model: nn.Module, max_norm: float, mesh: Mesh) -> float:
    """Scales the gradient down to ``max_norm``; returns its norm before, over all parameters of all ranks."""
    if mesh.shards is None:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    norm = gradient_norm(model, mesh)
    if norm > max_norm:
        torch._foreach_mul_(_gradients(model), max_norm / (norm + 1e-6))
    return norm


def gradient_norm(model: nn.Module, mesh: Mesh) -> float:
    """The norm of the gradient over all parameters of all ranks.

    Each number of the gradient lives on exactly one rank, so the square is a plain sum.
    """
    norm = nn.utils.get_total_norm(_gradients(model))
    if mesh.shards is None:
        return norm.item()
    square = norm.double().square().to(mesh.shards.device_type)
    dist.all_reduce(square, group=mesh.shards.get_group())
    return square.sqrt().item()


def _gradients(model: nn.Module) -> list[Tensor]:
    """What this rank holds of them."""
    return [local_part(p.grad) for p in model.parameters() if p.grad is not None]
