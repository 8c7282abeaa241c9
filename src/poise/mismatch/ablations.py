"""What an engine may do differently, each as a change of the trainer's forward: the suspects of a diagnosis.

Named after what the engine would have to do for its log-probabilities to come out as they do.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from poise.mismatch.experts import expert_ablations
from poise.mismatch.forward import Forward, with_blocks, with_config, with_part
from poise.mismatch.rounding import (
    bf16_forward,
    bf16_head,
    bf16_head_operands,
    bf16_weights,
    is_half,
    router_in,
)
from poise.model import GptOss, GptOssConfig, top_k_route
from poise.model.gpt_oss import Attend, Block, Route

# A sink so low that exp(sink) is 0 beside any score, and finite in every type.
NO_SINK = -1e4


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """``apply(forward, layers)``: the trainer's forward with the change in ``layers``. ``layers`` is ignored where
    it concerns no layer in particular. ``advice``: what it means in the engine. ``befalls_single_layers``: such as
    weights that were not loaded; the engine's code would go wrong in all layers alike.
    ``is_rounding``: another number format; two of these are not told apart beside each other."""

    name: str
    advice: str
    apply: Callable[[Forward, Container[int]], Forward]
    befalls_single_layers: bool = False
    is_rounding: bool = False


def ablations(forward: Forward, previous: GptOss | None = None) -> list[Ablation]:
    """Those that can differ from ``forward`` at all; the narrower before the wider. ``previous``: older weights."""
    config = forward.model.config
    found = [*_attention(config), *_positions(config), *_router(forward.model)]
    found += [
        Ablation(name=name, advice=advice, apply=apply, befalls_single_layers=True)
        for name, advice, apply in expert_ablations(config)
    ]
    found += _numbers(forward)
    return found + ([] if previous is None else _stale(previous))


# --- attention ---

# (q, sinks, window) -> what attention gets instead
Operands = tuple[Tensor, Tensor, int | None]


def _attending(change: Callable[[Tensor, Tensor, int | None], Operands]) -> Callable[..., Forward]:
    def apply(forward: Forward, layers: Container[int]) -> Forward:
        def wrap(attend: Attend) -> Attend:
            def changed(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
                if layer in layers:
                    q, sinks, window = change(q, sinks, window)
                return attend(layer, q, k, v, sinks, window)

            return changed

        return replace(forward, attend=forward.attended(wrap))

    return apply


def _windowed(change: Callable[[int], int | None]) -> Callable[..., Forward]:
    return _attending(lambda q, sinks, window: (q, sinks, None if window is None else change(window)))


def _scaled(factor: float) -> Callable[..., Forward]:
    return _attending(lambda q, sinks, window: (q * factor, sinks, window))


def _without_attention_bias(forward: Forward, layers: Container[int]) -> Forward:
    def change(layer: int, block: Block) -> Block:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj") if layer in layers else ():
            block = with_part(block, f"self_attn.{name}.bias", None)
        return block

    return replace(forward, model=with_blocks(forward.model, change))


def _attention(config: GptOssConfig) -> list[Ablation]:
    def of(name: str, advice: str, apply: Callable[..., Forward], befalls_single_layers: bool = False) -> Ablation:
        return Ablation(name=name, advice=advice, apply=apply, befalls_single_layers=befalls_single_layers)

    found = [
        of(
            "sinks removed",
            "the engine's attention ignores the learned sinks: they were not loaded, or its kernel has none",
            _attending(lambda q, sinks, window: (q, torch.full_like(sinks, NO_SINK), window)),
            True,
        ),
        of(
            "attention unscaled",
            "the engine does not divide the scores by the square root of the head's channels",
            _scaled(config.head_dim**0.5),
        ),
    ]
    by_hidden = (config.head_dim * config.num_heads / config.hidden_size) ** 0.5
    if not math.isclose(by_hidden, 1):
        found.append(
            of(
                "attention scaled by hidden size / heads",
                "the engine takes hidden_size / num_heads for the head's channels; GPT-OSS has head_dim",
                _scaled(by_hidden),
            )
        )
    if config.attention_bias:
        found.append(
            of(
                "attention biases missing",
                "the engine has no biases in q, k, v and o: see attention_bias in its config",
                _without_attention_bias,
            )
        )
    if window := next((w for w in config.windows if w is not None), None):
        off_by_one = "the engine counts the window differently: W is the token itself and the W - 1 before it"
        found.append(of("window one longer", off_by_one, _windowed(lambda w: w + 1)))
        if window > 1:
            found.append(of("window one shorter", off_by_one, _windowed(lambda w: w - 1)))
        found.append(
            of("no window", "the engine's sliding layers see the whole sequence", _windowed(lambda w: None)),
        )
        found.append(
            of(
                "sliding and full layers swapped",
                "the engine slides on the wrong layers: see layer_types in its config",
                _attending(lambda q, sinks, w: (q, sinks, window if w is None else None)),
            )
        )
    return found


# --- positions ---


def _positions(config: GptOssConfig) -> list[Ablation]:
    def of(name: str, advice: str, **changes: object) -> Ablation:
        rope = replace(config.rope, **changes)  # type: ignore[arg-type]

        def apply(forward: Forward, layers: Container[int]) -> Forward:
            return replace(forward, model=with_config(forward.model, replace(forward.model.config, rope=rope)))

        return Ablation(name=name, advice=advice, apply=apply)

    found = []
    if config.rope.kind == "yarn":
        scale = config.rope.cos_sin_scale
        if scale != 1:
            found.append(
                of("YaRN factor off", "the engine does not scale cos and sin by YaRN's factor", attention_factor=1.0)
            )
            found.append(
                Ablation(
                    name="YaRN factor counted once",
                    advice="the engine scales the scores by YaRN's factor and not by its square",
                    apply=_scaled(1 / scale),
                )
            )
        found.append(
            of(
                "YaRN off",
                "the engine's rotary positions are the plain ones: rope_scaling was lost from its config",
                kind="default",
                attention_factor=None,
            )
        )
        found.append(
            of(
                "YaRN ramp rounded" if not config.rope.truncate else "YaRN ramp not rounded",
                "the engine reads rope_scaling.truncate differently",
                truncate=not config.rope.truncate,
            )
        )
    if config.rope.theta != 10_000:
        found.append(of("RoPE theta 10000", "the engine has the default rope_theta", theta=10_000.0))
    return found


# --- router ---


def _routing(wrap: Callable[[Route], Route]) -> Callable[..., Forward]:
    def apply(forward: Forward, layers: Container[int]) -> Forward:
        def chosen(route: Route) -> Route:
            changed = wrap(route)
            return lambda layer, logits: changed(layer, logits) if layer in layers else route(layer, logits)

        return replace(forward, route=forward.routed(chosen))

    return apply


def _weighed_by_all(route: Route) -> Route:
    def weighed(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        expert_ids, _ = route(layer, router_logits)
        return expert_ids, router_logits.softmax(dim=-1).gather(1, expert_ids.long())

    return weighed


def _other_top_k(num_active: int) -> Callable[[Route], Route]:
    return lambda route: top_k_route(num_active)


def _without_router_bias(forward: Forward, layers: Container[int]) -> Forward:
    def change(layer: int, block: Block) -> Block:
        return with_part(block, "mlp.router.bias", None) if layer in layers else block

    return replace(forward, model=with_blocks(forward.model, change))


def _router(model: GptOss) -> list[Ablation]:
    config, is_narrow = model.config, is_half(model)
    dtype = torch.float32 if is_narrow else torch.bfloat16
    found = [
        Ablation(
            name="router bias missing",
            advice="the engine's router has no bias: it was not loaded",
            apply=_without_router_bias,
            befalls_single_layers=True,
        ),
        Ablation(
            name=f"router in {'fp32' if is_narrow else 'bf16'}",
            advice="the engine computes the router's logits in another type, and near ties fall to other experts",
            apply=router_in(dtype),
            is_rounding=True,
        ),
        Ablation(
            name="experts weighed by a softmax over all",
            advice="the engine's weights are a softmax over all router logits, not over those of the chosen experts",
            apply=_routing(_weighed_by_all),
        ),
    ]
    for num_active in (config.experts_per_token - 1, config.experts_per_token + 1):
        if 1 <= num_active <= config.num_experts:
            found.append(
                Ablation(
                    name=f"top {num_active} experts instead of {config.experts_per_token}",
                    advice="the engine takes another number of experts a token: see num_experts_per_tok in its config",
                    apply=_routing(_other_top_k(num_active)),
                )
            )
    return found


# --- numbers and the distribution ---


def _numbers(forward: Forward) -> list[Ablation]:
    def of(name: str, advice: str, apply: Callable[[Forward], Forward], is_rounding: bool = True) -> Ablation:
        def everywhere(forward: Forward, layers: Container[int]) -> Forward:
            return apply(forward)

        return Ablation(name=name, advice=advice, apply=everywhere, is_rounding=is_rounding)

    found = [of("head in bf16", "the engine's logits are rounded to bf16", bf16_head)]
    if not is_half(forward.model):
        found.append(
            of(
                "head's operands in bf16",
                "the engine's head and its input are bf16, its logits fp32",
                bf16_head_operands,
            )
        )
        found.append(
            of("weights in bf16", "the engine holds its weights in bf16 and the trainer does not", bf16_weights)
        )
        found.append(of("everything in bf16", "the engine computes in bf16 and the trainer does not", bf16_forward))
    if forward.temperature != 1:
        found.append(
            of(
                "temperature not applied",
                "the engine reports log-probs of the raw logits (vLLM: needs --logprobs-mode processed_logprobs)",
                lambda forward: replace(forward, temperature=1.0),
                is_rounding=False,
            )
        )
        found.append(
            of(
                "temperature applied twice",
                "the engine divides the logits by the temperature twice",
                lambda forward: replace(forward, temperature=forward.temperature**2),
                is_rounding=False,
            )
        )
    return found


# --- stale weights ---

# Parts of a block, by the beginnings of the names of their parameters.
_PARTS = {
    "old experts": ("mlp.experts.",),
    "old sinks": ("self_attn.sinks",),
    "old router": ("mlp.router.",),
    "old experts and sinks": ("mlp.experts.", "self_attn.sinks"),
    "old attention": ("self_attn.",),
    "old experts, router and sinks": ("mlp.", "self_attn.sinks"),
}


def _stale(previous: GptOss) -> list[Ablation]:
    def of(name: str, prefixes: tuple[str, ...]) -> Ablation:
        def apply(forward: Forward, layers: Container[int]) -> Forward:
            def change(layer: int, block: Block) -> Block:
                old = dict(previous.model.layers[layer].named_parameters()) if layer in layers else {}
                for parameter, value in old.items():
                    if parameter.startswith(prefixes):
                        block = with_part(block, parameter, value.detach())
                return block

            return replace(forward, model=with_blocks(forward.model, change))

        parts = name.removeprefix("old ")
        advice = f"the engine kept the previous {parts}: the sync lost them"
        return Ablation(name=name, advice=advice, apply=apply, befalls_single_layers=True)

    def embeddings(forward: Forward, layers: Container[int]) -> Forward:
        model = with_part(forward.model, "model.embed_tokens.weight", previous.model.embed_tokens.weight.detach())
        model = with_part(model, "lm_head.weight", previous.lm_head.weight.detach())
        return replace(forward, model=model)

    return [
        *(of(name, prefixes) for name, prefixes in _PARTS.items()),
        Ablation(
            name="old embeddings and head",
            advice="the engine kept the previous embeddings and head: the sync lost them",
            apply=embeddings,
        ),
        Ablation(
            name="all weights old",
            advice="the engine still has the previous weights: the sync never arrived",
            apply=lambda forward, layers: replace(forward, model=previous),
        ),
    ]
