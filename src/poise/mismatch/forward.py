"""The trainer's log-probabilities as a composition whose parts can be exchanged, and views of a model that differ."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from poise.model import GptOss, GptOssConfig, packed_attend, top_k_route
from poise.model.gpt_oss import Attend, Block, Route
from poise.model.rope import inverse_frequencies
from poise.ops.log_probs import token_log_probs
from poise.train.packing import pack
from poise.train.replay import recording_route
from poise.types import Batch, Trajectory

MAX_ROWS = 4096

M = TypeVar("M", bound=nn.Module)
# (hidden [T, D], head [V, D], target_ids [T], temperature) -> log-probs [T]
Head = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def trainer_head(
    hidden: Float[Tensor, "T D"], head: Float[Tensor, "V D"], target_ids: Int[Tensor, " T"], temperature: float
) -> Float[Tensor, " T"]:
    return token_log_probs(hidden, head, target_ids, temperature=temperature)[0]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Tokens to log-probabilities: by default exactly as ``poise.train.trainer.Trainer.log_probs`` does it.

    ``attend`` and ``route`` wrap the trainer's attention and routing; what else can differ is in ``model``.
    """

    model: GptOss
    temperature: float
    attend: Callable[[Attend], Attend] = lambda attend: attend
    route: Callable[[Route], Route] = lambda route: route
    head: Head = trainer_head

    def routed(self, wrap: Callable[[Route], Route]) -> Callable[[Route], Route]:
        """``wrap`` around the routing that is already there."""
        return lambda route: wrap(self.route(route))

    def attended(self, wrap: Callable[[Attend], Attend]) -> Callable[[Attend], Attend]:
        """``wrap`` around the attention that is already there."""
        return lambda attend: wrap(self.attend(attend))


@torch.no_grad()
def log_probs(
    forward: Forward, batches: Sequence[Batch], recorded: list[NDArray[np.int16]] | None = None
) -> NDArray[np.float64]:
    """Of the batches' response tokens, one after the other; ``recorded`` gets the experts, [T, layers, A] a batch."""
    device = forward.model.lm_head.weight.device
    values = []
    for batch in batches:
        experts: list[Tensor] = []
        route = recording_route(forward.route(top_k_route(forward.model.config.experts_per_token)), experts)
        attend = forward.attend(packed_attend(batch.cu_seqlens.to(device)))
        hidden = forward.model(batch.input_ids.to(device), batch.position_ids.to(device), attend, route)
        mask = batch.response_mask.to(device)
        targets = batch.target_ids.to(device)[mask]
        log_p = forward.head(hidden[mask], forward.model.lm_head.weight, targets, forward.temperature)
        values.append(log_p.double().cpu().numpy())
        if recorded is not None:
            recorded.append(torch.stack(experts, dim=1).cpu().numpy())
    return np.concatenate(values)


def batches_of(trajectories: Sequence[Trajectory]) -> list[Batch]:
    """Packed in their order; of at most ``MAX_ROWS`` rows unless a single stream has more."""
    groups: list[list[Trajectory]] = []
    for trajectory in trajectories:
        if groups and _rows([*groups[-1], trajectory]) <= MAX_ROWS:
            groups[-1].append(trajectory)
        else:
            groups.append([trajectory])
    # Where all fit into one batch, packing keeps the order in which they are given.
    return [
        batch for group in groups for batch in pack(group, torch.zeros(len(group)), tokens_per_microbatch=_rows(group))
    ]


def _rows(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(trajectory.token_ids) - 1 for trajectory in trajectories)


# --- views: other models that share every tensor they do not change ---


def with_config(model: GptOss, config: GptOssConfig) -> GptOss:
    """The same weights under another configuration of rotary positions."""
    view = _view(model)
    view.config = config
    view._frequencies = inverse_frequencies(config.rope, config.head_dim)
    return view


def with_blocks(model: GptOss, change: Callable[[int, Block], Block]) -> GptOss:
    """``change(layer, block)`` gives the view's block: the same one, or one from ``with_parts``."""
    view, trunk = _view(model), _view(model.model)
    blocks = cast(Iterable[Block], model.model.layers)
    trunk.layers = nn.ModuleList(change(layer, block) for layer, block in enumerate(blocks))
    view.model = trunk
    return view


def with_part(module: M, path: str, part: nn.Module | Tensor | None) -> M:
    """A view of ``module`` with another module or tensor at ``path`` ("mlp.router.bias"); None takes a bias away.

    A tensor takes the type of the one that it replaces.
    """
    view = _view(module)
    name, _, rest = path.partition(".")
    if rest:
        view._modules[name] = with_part(module.get_submodule(name), rest, part)
    elif isinstance(part, nn.Module):
        view._modules[name] = part
    else:
        old = module._parameters[name]
        of_same_type = part if part is None or old is None else part.to(old.dtype)
        view._parameters[name] = None if of_same_type is None else nn.Parameter(of_same_type, requires_grad=False)
    return view


def _view(module: M) -> M:
    view = copy.copy(module)
    view._modules, view._parameters = dict(module._modules), dict(module._parameters)
    return view
