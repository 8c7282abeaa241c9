"""A tiny GPT-OSS of Transformers whose sinks matter, twice: with its own attention and with poise's."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM


def tiny_config(**changes) -> GptOssConfig:
    shape = {
        "vocab_size": 40, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 39, "bos_token_id": None,
    }  # fmt: skip
    config = GptOssConfig(**{**shape, **changes})
    config._experts_implementation = "eager"  # the grouped matmul has no float64
    return config


def twins(dtype=torch.float64, **changes) -> tuple[GptOssForCausalLM, GptOssForCausalLM]:
    """(eager, poise): the same weights; sinks between -2 and 3, scores large enough to differ."""
    eager = GptOssForCausalLM._from_config(tiny_config(**changes), attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(-2, 3)
            elif "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.normal_(std=0.5)
            elif "proj.weight" in name or "experts" in name or "embed" in name:
                parameter.normal_(std=0.3)
    poise = GptOssForCausalLM._from_config(tiny_config(**changes), attn_implementation="poise").to(dtype)
    poise.load_state_dict(eager.state_dict())
    assert poise.config._attn_implementation == "poise"
    return eager, poise


def grads_of(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_grads(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, f"{name} has no gradient: the comparison shows nothing"
        error = (actual[name] - grad).abs().max() / grad.abs().max()
        assert error < tolerance, f"{name}: {error:.2e}"
