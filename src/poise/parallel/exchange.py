"""Collectives that carry gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of ``x`` to the ranks of ``group``: ``send[r]`` of them, in order, to rank r, ``receive[r]`` from it.

    The gradient of each row goes back to where the row came from.
    """
    return _Exchange.apply(x, list(send), list(receive), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchanged(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchanged(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """``exchange`` without a gradient."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in their order, each of which gives as many.

    For a loss that every rank computes alike from the result: the gradient of this rank's rows is its own slice, not
    the sum over the ranks, so that each row counts once.
    """
    return _GatherRows.apply(x, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_rows = dist.get_rank(group), len(x)
        # As bytes: gloo knows no int16.
        rows = x.contiguous().view(len(x), -1).view(torch.uint8)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows, group=group)
        out = torch.cat(parts)
        return out.view(x.dtype).view(-1, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.rank * ctx.num_rows : (ctx.rank + 1) * ctx.num_rows], None
