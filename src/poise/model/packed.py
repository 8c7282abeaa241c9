"""Models whose expert matrices stay as MXFP4: frozen, 4.25 bits a weight, unpacked one expert at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from poise.model.config import GptOssConfig
from poise.model.gpt_oss import Block, Experts, GptOss
from poise.ops.experts import routed_experts
from poise.ops.mxfp4 import BLOCK, Mxfp4Stack, pack

STACKS = ("gate_up_proj", "down_proj")


class PackedExperts(Experts):
    """``Experts`` whose matrices are buffers, named as in OpenAI's checkpoint; biases stay parameters.

    "OCP Microscaling Formats (MX) Specification v1.0". Gradients reach the input, the routing weights and the biases.
    """

    def __init__(self, config: GptOssConfig) -> None:
        require_packable(config)
        super().__init__(config)
        for name in STACKS:
            experts, inputs, outputs = getattr(self, name).shape
            delattr(self, name)
            groups = (experts, outputs, inputs // BLOCK)
            self.register_buffer(f"{name}_blocks", torch.zeros(*groups, BLOCK // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scales", torch.zeros(groups, dtype=torch.uint8))

    def stack(self, name: str) -> Mxfp4Stack:
        """That of ``STACKS``."""
        return Mxfp4Stack(getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales"))

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        gate_up, down = (self.stack(name) for name in STACKS)
        weights = (gate_up, self.gate_up_proj_bias, down, self.down_proj_bias)
        return routed_experts(x, *weights, expert_ids, expert_weights, alpha=self.alpha, limit=self.limit)


def require_packable(config: GptOssConfig) -> None:
    """Raises ValueError where MXFP4's blocks do not divide the channels."""
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % BLOCK:
            raise ValueError(f"MXFP4 needs a {name} that is a multiple of {BLOCK}, got {getattr(config, name)}")


def empty_packed_model(config: GptOssConfig) -> GptOss:
    """On the meta device."""
    with torch.device("meta"):
        model = GptOss(config)
        for block in model.model.layers:
            assert isinstance(block, Block)
            block.mlp.experts = PackedExperts(config)
    return model


def packed_stacks(model: GptOss) -> Iterator[tuple[str, Mxfp4Stack]]:
    """(name of the parameter that it stands for, stack) of each packed matrix; none of a plain model."""
    for prefix, module in model.named_modules():
        if isinstance(module, PackedExperts):
            for name in STACKS:
                yield f"{prefix}.{name}", module.stack(name)


@torch.no_grad()
def packed_copy(model: GptOss) -> GptOss:
    """A frozen copy of a plain model with its experts packed, to the nearest values, one at a time.

    Raises ValueError as ``require_packable`` does.
    """
    copy = empty_packed_model(model.config)
    for name, _ in list(copy.named_parameters()):
        put(copy, name, nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False))
    device = model.lm_head.weight.device
    for name, stack in list(packed_stacks(copy)):
        weight = model.get_parameter(name)
        blocks, scales = (torch.empty_like(x, device=device) for x in (stack.blocks, stack.scales))
        for expert, matrix in enumerate(weight):
            pack_into(blocks[expert], scales[expert], matrix)
        put(copy, f"{name}_blocks", blocks)
        put(copy, f"{name}_scales", scales)
    return copy.eval()


def pack_into(blocks: Tensor, scales: Tensor, matrix: Tensor) -> None:
    """One expert's matrix [I, O] into its place."""
    new_blocks, new_scales = pack(matrix.t())
    blocks.copy_(new_blocks)
    scales.copy_(new_scales)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """In the place of the parameter or buffer ``name``."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)
