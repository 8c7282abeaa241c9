"""Routing replay: experts of an earlier pass, weights of this one."""

import torch
from jaxtyping import Int
from torch import Tensor

from poise.model.gpt_oss import Route


def replay_route(routes: Int[Tensor, "T layers A"], drifted: list[Tensor] | None = None) -> Route:
    """Routes row t of layer l to the experts ``routes[t, l]``, weighted by the softmax over their router logits now.

    Only the choice is replayed (R3: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
    Routers", Ma et al. 2025; R2: Zheng et al. 2025), so the router keeps its gradient and an expert that has fallen out
    of its top-k still works. ``drifted`` collects, for each layer, which rows would have chosen other experts.
    Raises ValueError for rows or layers that are not those of the forward pass, and, with the row, for experts that the
    model does not have.
    """

    def route(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        if len(router_logits) != len(routes) or layer >= routes.shape[1]:
            raise ValueError(f"routes of {list(routes.shape)} cannot route {len(router_logits)} rows of layer {layer}")
        expert_ids = routes[:, layer].long()
        is_unknown = (expert_ids < 0) | (expert_ids >= router_logits.shape[1])
        if is_unknown.any():
            row = int(is_unknown.any(dim=-1).nonzero()[0])
            raise ValueError(
                f"row {row} of {len(routes)}, layer {layer}: routed to experts {expert_ids[row].tolist()} of a model "
                f"with {router_logits.shape[1]}"
            )
        if drifted is not None:
            own = router_logits.detach().topk(routes.shape[2], dim=-1).indices
            drifted.append((own.sort(dim=-1).values != expert_ids.sort(dim=-1).values).any(dim=-1))
        return expert_ids, router_logits.gather(1, expert_ids).softmax(dim=-1)

    return route


def recording_route(route: Route, recorded: list[Tensor]) -> Route:
    """``route``, whose experts are appended to ``recorded``, one int16 [T, A] a layer."""

    def record(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        expert_ids, expert_weights = route(layer, router_logits)
        recorded.append(expert_ids.to(torch.int16))
        return expert_ids, expert_weights

    return record
