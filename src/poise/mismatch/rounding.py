"""Ablations of number formats, and what rounding alone does to the trainer's log-probabilities."""

import copy
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poise.mismatch.forward import Forward, with_blocks, with_part
from poise.model import GptOss
from poise.model.gpt_oss import Attend, Block

# Rows of logits that exist at once in the rounded head, times the vocabulary: 64 MiB in float32.
MAX_LOGITS = 2**24


def is_half(model: GptOss) -> bool:
    return model.lm_head.weight.dtype in (torch.float16, torch.bfloat16)


def router_in(dtype: torch.dtype) -> Callable[..., Forward]:
    """The ``apply`` of an ablation: the router's product of operands rounded to ``dtype``, rounded to it."""

    def apply(forward: Forward, layers: Container[int]) -> Forward:
        def changed(layer: int, block: Block) -> Block:
            if layer not in layers:
                return block
            return with_part(block, "mlp.router", _Router(block.mlp.router, dtype))

        return replace(forward, model=with_blocks(forward.model, changed))

    return apply


class _Router(nn.Module):
    def __init__(self, router: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = router.weight, router.bias, dtype

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _rounded(self.bias, self.dtype)
        logits = F.linear(_rounded(x, self.dtype), _rounded(self.weight, self.dtype), bias)
        return _rounded(logits, self.dtype)


def bf16_head(forward: Forward) -> Forward:
    """Operands and logits in bf16, sums and the softmax in float32: what a bf16 matrix product gives."""
    return replace(forward, head=partial(_rounded_head, rounds_logits=True))


def bf16_head_operands(forward: Forward) -> Forward:
    """Operands in bf16, logits in float32."""
    return replace(forward, head=partial(_rounded_head, rounds_logits=False))


@torch.no_grad()
def _rounded_head(
    hidden: Tensor, head: Tensor, target_ids: Tensor, temperature: float, *, rounds_logits: bool
) -> Tensor:
    weight = _rounded(head, torch.bfloat16)
    rows = max(1, MAX_LOGITS // len(weight))
    parts = []
    for states, targets in zip(hidden.split(rows), target_ids.split(rows), strict=True):
        logits = _rounded(states, torch.bfloat16) @ weight.T
        if rounds_logits:
            logits = _rounded(logits, torch.bfloat16)
        parts.append((logits / temperature).log_softmax(dim=-1).gather(1, targets.long()[:, None]).squeeze(1))
    return torch.cat(parts)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To ``dtype`` and back: on the CPU products of half types are slow, and rounding is all that matters here."""
    return x.to(dtype).float()


def bf16_weights(forward: Forward) -> Forward:
    return replace(forward, model=_converted(_converted(forward.model, torch.bfloat16), torch.float32))


def bf16_forward(forward: Forward) -> Forward:
    return replace(forward, model=_converted(forward.model, torch.bfloat16))


def _converted(model: GptOss, dtype: torch.dtype) -> GptOss:
    return copy.deepcopy(model).to(dtype)


def jittered(forward: Forward, *, seed: int) -> Forward:
    """The forward with what attention reads and writes moved by up to one unit in the last place, on every layer.

    Another kernel, batch or order of sums moves the numbers as much, so the difference to ``forward`` is what rounding
    alone can do.
    """
    dtype, device = forward.model.lm_head.weight.dtype, forward.model.lm_head.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, device=device, generator=generator) * 2 - 1
        return (x.float() * (1 + torch.finfo(dtype).eps * noise)).to(x.dtype)

    def wrap(attend: Attend) -> Attend:
        def changed(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
            return moved(attend(layer, moved(q), moved(k), moved(v), sinks, window))

        return changed

    return replace(forward, attend=forward.attended(wrap))
