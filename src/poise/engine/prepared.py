"""The model as decode steps multiply with it: matrices laid out once for many products of few rows."""

import copy
from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poise.model import GptOss, GptOssConfig
from poise.model.gpt_oss import Block, Experts
from poise.ops.experts import routed_experts
from poise.ops.prepared import pays, prepared_matrix, prepared_stack

M = TypeVar("M", bound=nn.Module)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class PreparedLinear(nn.Module):
    """``linear`` as it is now, without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, self.matrix = linear.bias, prepared_matrix(linear.weight.t())

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        return self.matrix.product(x, self.bias)


class PreparedExperts(nn.Module):
    """``experts`` as they are now, without gradients."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up, self.down = prepared_stack(experts.gate_up_proj), prepared_stack(experts.down_proj)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        own = self.experts
        weights = (self.gate_up, own.gate_up_proj_bias, self.down, own.down_proj_bias)
        return routed_experts(x, *weights, expert_ids, expert_weights, alpha=own.alpha, limit=own.limit)


def paying_matrices(
    config: GptOssConfig, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[int, int]]:
    """(matrices, elements of one) of the whole model by the name of a module, of those that gain where a decode step
    has ``num_tokens``."""
    hidden, width, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows_of_expert = num_tokens * config.experts_per_token // config.num_experts
    kinds = {
        "experts": (3 * layers * config.num_experts, hidden * width, rows_of_expert),
        "q_proj": (layers, hidden * q, num_tokens),
        "k_proj": (layers, hidden * kv, num_tokens),
        "v_proj": (layers, hidden * kv, num_tokens),
        "o_proj": (layers, hidden * q, num_tokens),
        "lm_head": (1, hidden * config.vocab_size, num_tokens),
    }
    return {
        name: (number, elements)
        for name, (number, elements, rows) in kinds.items()
        if pays(elements, rows, dtype, device)
    }


def prepared_model(model: GptOss, names: Collection[str]) -> GptOss:
    """``model`` with its modules ``names`` of ``paying_matrices`` prepared; all others are the same modules."""
    blocks = []
    for block in model.model.layers:
        assert isinstance(block, Block)
        attention, mlp = block.self_attn, block.mlp
        attention = _with(attention, {n: PreparedLinear(getattr(attention, n)) for n in PROJECTIONS if n in names})
        mlp = _with(mlp, {"experts": PreparedExperts(mlp.experts)} if "experts" in names else {})
        blocks.append(_with(block, {"self_attn": attention, "mlp": mlp}))
    head = {"lm_head": PreparedLinear(model.lm_head)} if "lm_head" in names else {}
    return _with(model, {"model": _with(model.model, {"layers": nn.ModuleList(blocks)}), **head})


def _with(module: M, replaced: Mapping[str, nn.Module]) -> M:
    """The same module, parameters and all, but for some of the modules in it."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **replaced}
    return twin


class SamplingModel:
    """``model`` for decode steps of up to ``num_tokens``, with its matrices prepared where that pays.

    What is prepared is a copy: made when ``current`` is asked for it, again after a parameter moved, and given up with
    ``forget``.
    """

    def __init__(self, model: GptOss, num_tokens: int) -> None:
        self.model = model
        self._parameters = list(model.parameters())  # to walk through the modules takes longer than to look at them
        weight = model.lm_head.weight
        is_plain = all(type(module) is Experts for module in model.modules() if isinstance(module, Experts))
        is_plain = is_plain and not weight.is_inference()  # such parameters have no version to look at
        self._names = paying_matrices(model.config, num_tokens, weight.dtype, weight.device) if is_plain else {}
        self._prepared: GptOss | None = None
        self._state: tuple[int, ...] = ()

    def current(self) -> GptOss:
        if not self._names:
            return self.model
        # What is written in place counts up a version, and other storage has another address.
        state = tuple(number for p in self._parameters for number in (p._version, p.data_ptr()))
        if self._prepared is None or state != self._state:
            self._prepared = None  # before another takes memory
            self._prepared, self._state = prepared_model(self.model, self._names), state
        return self._prepared

    def forget(self) -> None:
        self._prepared = None
