"""Attention sinks: exact on CPUs, and set in every place where vLLM holds them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def attend_with_exact_sinks() -> None:
    """Lets vLLM's CPU attention serve float32 models, whose sinks its kernel cannot read: it takes bfloat16 alone.

    Rounded sinks would move log-probabilities by some 1e-4. Instead the kernel runs twice, with the bfloat16 numbers
    below and above each sink, and ``between`` gives what the sink itself would have; once where no sink needs rounding.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    attend = CPUAttentionBackendImpl.forward
    if attend.__module__ == __name__:
        return

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        sinks = self.sinks
        if sinks is None or sinks.dtype == torch.bfloat16:
            return attend(self, *args, **kwargs)
        below, above, share = bracket(sinks.detach())
        try:
            self.sinks = below
            output = attend(self, *args, **kwargs)
            if share.any():
                first = output.clone()
                self.sinks = above
                output = attend(self, *args, **kwargs)
                heads = (*output.shape[:-1], len(sinks), -1) if output.dim() == 2 else output.shape
                output.copy_(between(first.view(heads), output.view(heads), share).view_as(output))
        finally:
            self.sinks = sinks
        return output

    CPUAttentionBackendImpl.forward = forward


def bracket(sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bfloat16 numbers around each sink, and where exp(sink) lies between their exponentials, from 0 to 1."""
    nearest = sinks.bfloat16()
    infinity = torch.full_like(nearest, torch.inf)
    below = torch.where(nearest.float() > sinks, torch.nextafter(nearest, -infinity), nearest)
    above = torch.where(below.float() < sinks, torch.nextafter(below, infinity), below)
    share = torch.expm1(sinks.float() - below.float()) / torch.expm1(above.float() - below.float())
    return below, above, torch.where(above == below, 0.0, share)


def between(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Attention [T, H, C] with sinks s, from that with sinks s1 and s2.

    Each channel is N / (Z + exp(s)) with N and Z that do not depend on s, so its inverse is linear in exp(s):
    1 / O = (1 - share) / O1 + share / O2.
    """
    share = share[:, None]
    blend = (1 - share) * second + share * first
    return torch.where(blend == 0, first, first * second / blend)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each attention of this process that has sinks; ``model.layers.3.attn``."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            yield name, module


@torch.no_grad()
def set_sinks(module: nn.Module, values: Tensor) -> None:
    """Sets the sinks of this process's heads, ``values`` being those of all heads, in each place that holds them.

    Some attention kernels keep a copy in a type of their own. In place: a captured CUDA graph reads the storage that it
    was captured with.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    num_heads = len(module.sinks)
    module.sinks.copy_(values.narrow(0, get_tensor_model_parallel_rank() * num_heads, num_heads))
    held = module.attn.impl.sinks
    if held is not None and held.data_ptr() != module.sinks.data_ptr():
        held.copy_(module.sinks)
