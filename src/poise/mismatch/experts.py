"""Ablations of the experts: their weights or constants are changed for the moment of one layer's product."""

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from poise.mismatch.forward import Forward, with_blocks, with_part
from poise.model import GptOssConfig
from poise.model.gpt_oss import Block, Experts
from poise.ops import mxfp4

Change = Callable[[Experts], Experts]


class ChangedExperts(nn.Module):
    """Experts that ``changes`` alter whenever they are used, so that one layer's altered copy exists at a time."""

    def __init__(self, experts: Any, change: Change) -> None:
        super().__init__()
        is_changed = isinstance(experts, ChangedExperts)
        self.experts: nn.Module = experts.experts if is_changed else experts
        self.changes: tuple[Change, ...] = (*(experts.changes if is_changed else ()), change)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        experts = cast(Experts, self.experts)
        for change in self.changes:
            experts = change(experts)
        return experts(x, expert_ids, expert_weights)


def changing(change: Change) -> Callable[..., Forward]:
    """The ``apply`` of an ablation that changes the experts of its layers."""

    def apply(forward: Forward, layers: Container[int]) -> Forward:
        def changed(layer: int, block: Block) -> Block:
            if layer not in layers:
                return block
            return with_part(block, "mlp.experts", ChangedExperts(block.mlp.experts, change))

        return replace(forward, model=with_blocks(forward.model, changed))

    return apply


def expert_ablations(config: GptOssConfig) -> Iterator[tuple[str, str, Callable[..., Forward]]]:
    """(name, advice, apply) of those that can differ in such a model."""
    layout = "the engine reads gate and up in another order: they are interleaved, gate first"
    yield "gate and up swapped", layout, changing(_on_gate_up(_swapped))
    yield (
        "gate and up swapped, their biases not",
        layout,
        changing(lambda experts: with_part(experts, "gate_up_proj", _swapped(experts.gate_up_proj))),
    )
    yield "gate and up in halves", layout, changing(_on_gate_up(_halves))
    yield (
        "swiglu limit missing",
        "the engine does not clamp gate and up: see swiglu_limit in its config",
        changing(lambda experts: _with_constants(experts, limit=float("inf"))),
    )
    yield (
        "plain silu",
        "the engine's gate is x sigmoid(x) without GPT-OSS's factor in the sigmoid",
        changing(lambda experts: _with_constants(experts, alpha=1.0)),
    )
    yield "up not raised by 1", "the engine multiplies the gate by up, not by up + 1", changing(_on_bias(_up_minus_one))
    yield (
        "expert biases missing",
        "the engine's experts have no biases: they were not loaded",
        changing(_without_biases),
    )
    if config.intermediate_size == config.hidden_size:
        yield (
            "down projection transposed",
            "the engine reads the square down projection the other way around",
            changing(lambda experts: with_part(experts, "down_proj", experts.down_proj.transpose(1, 2).contiguous())),
        )
    if config.hidden_size % mxfp4.BLOCK == 0 and config.intermediate_size % mxfp4.BLOCK == 0:
        yield "experts in MXFP4", "the engine's experts are quantized and the trainer's are not", changing(_quantized)


def _on_gate_up(reorder: Callable[[Tensor], Tensor]) -> Change:
    def change(experts: Experts) -> Experts:
        experts = with_part(experts, "gate_up_proj", reorder(experts.gate_up_proj))
        return with_part(experts, "gate_up_proj_bias", reorder(experts.gate_up_proj_bias))

    return change


def _on_bias(change_bias: Callable[[Tensor], Tensor]) -> Change:
    return lambda experts: with_part(experts, "gate_up_proj_bias", change_bias(experts.gate_up_proj_bias))


def _swapped(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _halves(columns: Tensor) -> Tensor:
    """What is read as gate, up, gate, up where the first half is taken for gates and the second for ups."""
    return columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _up_minus_one(bias: Tensor) -> Tensor:
    """up - 1 + 1 = up; only the clamp of up then lies one off."""
    changed = bias.clone()
    changed[..., 1::2] -= 1
    return changed


def _without_biases(experts: Experts) -> Experts:
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        experts = with_part(experts, name, torch.zeros_like(getattr(experts, name)))
    return experts


def _with_constants(experts: Experts, **constants: float) -> Experts:
    view = with_part(experts, "down_proj", experts.down_proj)
    for name, value in constants.items():
        setattr(view, name, value)
    return view


def _quantized(experts: Experts) -> Experts:
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name)
        quantized = torch.stack(
            [mxfp4.unpack(*mxfp4.pack(expert.transpose(0, 1)), stack.dtype).transpose(0, 1) for expert in stack]
        )
        experts = with_part(experts, name, quantized)
    return experts
