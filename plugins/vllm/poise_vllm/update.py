"""One weight update of a GPT-OSS model inside a vLLM worker: whole, or refused."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from poise_vllm.sinks import attention_modules, set_sinks

Shape = tuple[int, ...]


class UpdateError(RuntimeError):
    """An update that is not this model's, or did not arrive whole."""


def update_model(
    model: nn.Module, model_config: Any, shapes: Mapping[str, Shape], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Gives the model that is being served the weights ``tensors``, one tensor per expert, in Hugging Face's names.

    Stock vLLM reloads layer by layer: the weight loaders collect a layer's tensors, convert them as at start-up, and
    copy them into the storage in use. Experts get there only when they come one by one
    (``model.layers.0.mlp.experts.3.down_proj``), sinks never do, and on CPUs the experts are left unpacked. Here they
    all arrive. ``shapes`` announces what ``tensors`` will yield, and is checked before the model is touched. Raises
    UpdateError then, and also where the stream fails: layers that had not arrived by then keep their old weights.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    check_shapes(shapes, expected_shapes(model_config.hf_config))
    sinks: dict[str, Tensor] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.endswith(".sinks"):
                sinks[name] = tensor.detach().clone()
            yield name, tensor

    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(noted())
    except BaseException as error:
        _finish(model, model_config, keep_partial=False)
        raise UpdateError(f"the update broke off ({error}): the model is a mixture of two policies") from error
    _finish(model, model_config, keep_partial=True)
    for name, module in attention_modules(model):
        # Here the attention is called attn, in a checkpoint self_attn.
        set_sinks(module, sinks[f"{name.removesuffix('.attn')}.self_attn.sinks"])
    if missing := {name for name, _ in model.named_parameters()} - set(loaded or ()):
        raise UpdateError(f"vLLM's loader left out {_some(missing)}: the model is a mixture of two policies")


def expected_shapes(config: Any) -> dict[str, Shape]:
    """Name and shape of each tensor of an update, from the model's Hugging Face configuration."""
    hidden, width, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer_shapes: dict[str, Shape] = {
        "self_attn.sinks": (config.num_attention_heads,),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.o_proj.bias": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        layer_shapes[f"self_attn.{name}.weight"] = (out, hidden)
        layer_shapes[f"self_attn.{name}.bias"] = (out,)
    for expert in range(experts):
        layer_shapes[f"mlp.experts.{expert}.gate_up_proj"] = (hidden, 2 * width)
        layer_shapes[f"mlp.experts.{expert}.gate_up_proj_bias"] = (2 * width,)
        layer_shapes[f"mlp.experts.{expert}.down_proj"] = (width, hidden)
        layer_shapes[f"mlp.experts.{expert}.down_proj_bias"] = (hidden,)
    shapes: dict[str, Shape] = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.num_hidden_layers)
        for name, shape in layer_shapes.items()
    }
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (config.vocab_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def check_shapes(announced: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Raises UpdateError, naming tensors, unless the two are the same."""
    problems = []
    if missing := set(expected) - set(announced):
        problems.append(f"missing {_some(missing)}")
    if unknown := set(announced) - set(expected):
        problems.append(f"unknown {_some(unknown)}")
    for name in sorted(set(announced) & set(expected)):
        if tuple(announced[name]) != expected[name]:
            problems.append(f"{name} is {list(announced[name])}, the model's is {list(expected[name])}")
    if problems:
        raise UpdateError(f"refused, the model is as it was: {'; '.join(problems[:5])}")


def _finish(model: nn.Module, model_config: Any, *, keep_partial: bool) -> None:
    """Ends vLLM's reload. Without ``keep_partial``, layers that came in part keep their old weights: vLLM would fill
    what is missing with uninitialized memory."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    renewed = []
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load() and not keep_partial:
            info.load_numel = 0
            info.loaded_weights.clear()
        if not info.can_load() or info.load_numel:
            renewed.append(module)
    finalize_layerwise_reload(model, model_config)
    for module in renewed:
        pack_experts(module)


@torch.no_grad()
def pack_experts(module: nn.Module) -> None:
    """On CPUs: packs expert matrices that a reload has left in the checkpoint's layout, into the same storage."""
    from vllm.platforms import current_platform

    experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
    if experts is None or not current_platform.is_cpu() or getattr(experts, "_use_zentorch", False):
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    for name in ("w13_weight", "w2_weight"):
        weight = getattr(module, name)
        weight.data.copy_(cpu_prepack_moe_weight(weight.data, experts.isa))


def _some(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
