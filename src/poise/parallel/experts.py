"""Expert parallelism: each rank owns some experts, and tokens travel to those they are routed to.

"GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (Lepikhin et al. 2020, arXiv
2006.16668), section 3, without its capacity: counts are exchanged first, so every token arrives, however uneven they
are.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poise.model.config import GptOssConfig
from poise.model.gpt_oss import Experts
from poise.ops.experts import routed_experts
from poise.parallel.exchange import exchange, exchanged
from poise.parallel.mesh import Mesh


class ShardedExperts(Experts):
    """``Experts`` of which this rank holds E / P: rank e of P those from e E/P on, for the tokens of all P ranks.

    A row travels for each expert of each token, with its weight; the weighted result travels back and is summed where
    the token lives. Every rank of the group must call it equally often. Raises ValueError where P does not divide E.
    """

    def __init__(self, config: GptOssConfig, mesh: Mesh) -> None:
        require_experts(config.num_experts, mesh.expert)
        super().__init__(replace(config, num_experts=config.num_experts // mesh.expert, experts_per_token=1))
        self.mesh = mesh

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        num_tokens, num_active = expert_ids.shape
        group, num_mine = self.mesh.expert_group, len(self.gate_up_proj)
        flat_ids = expert_ids.reshape(-1)
        order = torch.argsort(flat_ids, stable=True)  # by expert, and so by rank
        send, receive = _counts(flat_ids // num_mine, group)
        # Not x[order // A]: on GPUs the gradient of repeated indices has no fixed order of its sum.
        rows = x[:, None].expand(-1, num_active, -1).reshape(-1, x.shape[1]).index_select(0, order)
        rows = exchange(rows, send, receive, group)
        weights = exchange(expert_weights.reshape(-1, 1).index_select(0, order), send, receive, group)
        ids = exchanged((flat_ids % num_mine)[order][:, None], send, receive, group)
        stacks = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        options: dict[str, Any] = {"alpha": self.alpha, "limit": self.limit, "num_sharing": self.num_sharing}
        out = routed_experts(rows, *stacks, ids, weights, **options)
        back = exchange(out, receive, send, group)
        return back.index_select(0, torch.argsort(order)).view(num_tokens, num_active, -1).sum(dim=1)


def require_experts(num_experts: int, degree: int) -> None:
    """Raises ValueError for an expert degree that does not divide the experts."""
    if num_experts % degree:
        raise ValueError(f"the expert degree ({degree}) must divide the {num_experts} experts")


def _counts(ranks: Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Rows to and from each rank."""
    counts = torch.bincount(ranks, minlength=dist.get_world_size(group))
    ones = [1] * len(counts)
    return counts.tolist(), exchanged(counts, ones, ones, group).tolist()
