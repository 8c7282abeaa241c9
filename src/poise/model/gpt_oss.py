"""GPT-OSS for one device. Attention and routing are parameters: trainer, engine and replay share this one model."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poise.model.config import GptOssConfig
from poise.model.rope import inverse_frequencies, rotate, rotation
from poise.ops.attention import sink_attention
from poise.ops.experts import routed_experts
from poise.ops.products import linear
from poise.ops.remembered import Memory

# attend(layer, q [T,H,C], k [T,K,C], v [T,K,C], sinks [H], window | None) -> [T,H,C]; q and k are rotated already.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, int | None], Tensor]
# route(layer, router_logits [T,E]) -> (expert_ids [T,A], expert_weights [T,A])
Route = Callable[[int, Tensor], tuple[Tensor, Tensor]]
# What the backward pass computes again instead of keeping: nothing; each block's router and experts; each block around
# its attention, whose result is kept; each whole block.
Recompute = Literal["none", "experts", "around_attention", "block"]


def packed_attend(cu_seqlens: Int[Tensor, " N1"], kernel: str = "auto") -> Attend:
    """Attention over packed sequences whose borders are ``cu_seqlens``."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        return sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=window, kernel=kernel)

    return attend


def top_k_route(num_active: int) -> Route:
    """The experts of the ``num_active`` largest router logits, weighted by the softmax over those logits."""

    def route(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        top_logits, expert_ids = router_logits.topk(num_active, dim=-1)
        return expert_ids, top_logits.softmax(dim=-1)

    return route


def remembered_route(route: Route) -> Route:
    """The experts that ``route`` chooses the first time it is asked, weighted by the softmax over their logits.

    For one layer of one forward: a recomputed forward asks again, and may not take another route than the first.
    ``route`` must weigh its experts in the same way, as every route of GPT-OSS does.
    """
    remembered: list[Tensor] = []

    def remembering(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        if not remembered:
            remembered.append(route(layer, router_logits.detach())[0])
        return remembered[0], router_logits.gather(1, remembered[0].long()).softmax(dim=-1)

    return remembering


# Large embeddings drown what the first blocks write, and a small model then takes far longer to learn to copy.
_EMBEDDING_STD = 0.3


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 for half types (arXiv 1910.07467)."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        if x.dtype in (torch.float16, torch.bfloat16):
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """``nn.Linear`` with the products of ``poise.ops.products``."""

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        return linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Grouped-query attention with a sink per head."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.windows[layer], config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        projection = partial(Linear, bias=config.attention_bias)
        self.q_proj = projection(config.hidden_size, width)
        self.k_proj = projection(config.hidden_size, kv_width)
        self.v_proj = projection(config.hidden_size, kv_width)
        self.o_proj = projection(width, config.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads))

    def forward(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        heads = (len(x), -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads), cos, signed_sin)
        k = rotate(self.k_proj(x).view(heads), cos, signed_sin)
        v = self.v_proj(x).view(heads)
        return self.o_proj(attend(self.layer, q, k, v, self.sinks, self.window).reshape(len(x), -1))


class Experts(nn.Module):
    """The stacks of expert weights, in the layout of ``poise.ops.experts.routed_experts``."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        experts, channels, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, channels, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.zeros(experts, width, channels))
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, channels))
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.num_sharing = 1  # ranks that share the rows of a micro-batch

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        options: dict[str, Any] = {"alpha": self.alpha, "limit": self.limit, "num_sharing": self.num_sharing}
        return routed_experts(x, *weights, expert_ids, expert_weights, **options)


class Mlp(nn.Module):
    """Router and experts."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = nn.Linear(config.hidden_size, config.num_experts)
        self.experts = Experts(config)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        expert_ids, expert_weights = route(self.layer, self.router(x))
        return self.experts(x, expert_ids, expert_weights)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = Mlp(config, layer)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        attend: Attend,
        route: Route,
        recompute: Recompute = "none",
    ) -> Tensor:
        if recompute == "none" or not torch.is_grad_enabled():
            return self._add_mlp(self._add_attention(x, cos, signed_sin, attend), route)
        # No kernel draws random numbers, so there is no state of a generator to keep.
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        route = remembered_route(route)
        if recompute == "experts":
            return recomputed(self._add_mlp, self._add_attention(x, cos, signed_sin, attend), route)
        if recompute == "around_attention":
            memory = Memory()
            recomputed = partial(recomputed, context_fn=lambda: (memory.recording, memory.replaying))
        return recomputed(self.forward, x, cos, signed_sin, attend, route)

    def _add_attention(self, x: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x), cos, signed_sin, attend)

    def _add_mlp(self, x: Tensor, route: Route) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x), route)


class Trunk(nn.Module):
    """Embedding, blocks and final norm; named ``model`` in the checkpoint."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class GptOss(nn.Module):
    """The policy. Parameters carry Hugging Face's names, so a state dict is a checkpoint.

    "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), section 2. New models hold arbitrary numbers until
    ``init_weights`` or a checkpoint fills them.
    """

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # No buffer: a buffer would be lost on the meta device and rounded by `model.to(bfloat16)`.
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)

    def forward(
        self,
        input_ids: Int[Tensor, " T"],
        position_ids: Int[Tensor, " T"],
        attend: Attend,
        route: Route | None = None,
        *,
        recompute: Recompute = "none",
    ) -> Float[Tensor, "T D"]:
        """Hidden states after the final norm; logits are ``hidden @ lm_head.weight.T``. ``route`` None: top-k.

        ``recompute``: what the backward pass computes again instead of keeping ("Training Deep Nets with Sublinear
        Memory Cost", arXiv 1604.06174); the experts of each token stay those of the first pass, and the gradients are
        the same. "around_attention" keeps what the attention kernel returned, so that it runs once (kernel "reference",
        which is no kernel, runs again).
        """
        if input_ids.shape != position_ids.shape or input_ids.dim() != 1:
            shapes = f"{list(input_ids.shape)} and {list(position_ids.shape)}"
            raise ValueError(f"input_ids and position_ids must be [T], got {shapes}")
        route = route or top_k_route(self.config.experts_per_token)
        if self._frequencies.device != position_ids.device:
            self._frequencies = self._frequencies.to(position_ids.device)
        x = self.model.embed_tokens(input_ids)
        cos, signed_sin = rotation(position_ids, self._frequencies, self.config.rope.cos_sin_scale, x.dtype)
        for block in self.model.layers:
            x = block(x, cos, signed_sin, attend, route, recompute)
        return self.model.norm(x)

    @torch.no_grad()
    def init_weights(self, seed: int) -> "GptOss":
        """Fills every parameter with ``initial_weights``: the same numbers on every device, rounded to its type."""
        for parameter, (_, values) in zip(self.parameters(), initial_weights(self, seed), strict=True):
            parameter.copy_(values)
        return self


def initial_weights(model: GptOss, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 values on the CPU) of each parameter of ``model``, which may be on the meta device.

    Embedding N(0, 0.3^2); head and router N(0, initializer_range^2); other matrices N(0, 1 / fan_in), and those
    that write to the residual stream divided by sqrt(2 layers); norms 1; biases and sinks 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        if name.endswith("norm.weight"):
            yield name, values.fill_(1)
        elif name.endswith(("bias", "sinks")):
            yield name, values.zero_()
        else:
            yield name, values.normal_(0, _initial_std(model.config, name, parameter), generator=generator)


def _initial_std(config: GptOssConfig, name: str, parameter: Tensor) -> float:
    if name.endswith("embed_tokens.weight"):
        return _EMBEDDING_STD
    if name.endswith(("lm_head.weight", "router.weight")):
        return config.initializer_range
    # Linear layers are [out, in], expert stacks [E, in, out].
    std = 1 / math.sqrt(parameter.shape[1])
    return std * (2 * config.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj")) else std
