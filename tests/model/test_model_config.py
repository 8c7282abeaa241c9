"""Hugging Face config.json: every field is honoured or refused by name."""

import json

import pytest
from transformers import GptOssConfig as HfConfig

from poise.model import GptOssConfig
from poise.model.rope import RopeConfig

# The config.json of openai/gpt-oss-20b, with layer_types cut short below.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def without(*names, **changes):
    return {k: v for k, v in {**GPT_OSS_20B, **changes}.items() if k not in names}


@pytest.fixture(autouse=True)
def json_numbers(annotations_unchecked):
    """JSON writes 150000 where the field is a float."""


def test_gpt_oss_20b():
    assert GptOssConfig.from_hf_dict(GPT_OSS_20B) == GptOssConfig(eos_token_ids=(200002,), pad_token_id=199999)
    config = GptOssConfig.from_hf_dict(GPT_OSS_20B)
    assert config.windows == (128, None) * 12
    assert config.rope == RopeConfig()


def test_newer_spelling_is_the_same_model():
    rope = {**GPT_OSS_20B["rope_scaling"], "rope_theta": 150000.0}
    newer = without("rope_scaling", "rope_theta", "experts_per_token", rope_parameters=rope)
    assert GptOssConfig.from_hf_dict(newer) == GptOssConfig.from_hf_dict(GPT_OSS_20B)
    older = without(rope_scaling={**GPT_OSS_20B["rope_scaling"], "type": "yarn"})
    del older["rope_scaling"]["rope_type"]
    assert GptOssConfig.from_hf_dict(older) == GptOssConfig.from_hf_dict(GPT_OSS_20B)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 3, "layer_types": None, "pad_token_id": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": True,
            }
        },
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            "rope_theta": 7.0,
        },
        {"layer_types": ["full_attention"] * 36, "sliding_window": None},
        {
            "swiglu_alpha": 1.5,
            "swiglu_limit": 3.0,
            "attention_bias": False,
            "eos_token_id": [4, 5],
            "rms_norm_eps": 1e-6,
        },
    ],
)
def test_absent_and_null_fields_mean_what_they_mean_to_transformers(fields):
    config, hf = GptOssConfig.from_hf_dict(fields), HfConfig(**fields)
    for name, hf_name in [
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("num_experts", "num_local_experts"),
        ("experts_per_token", "num_experts_per_tok"),
        ("max_context", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("swiglu_alpha", "swiglu_alpha"),
        ("swiglu_limit", "swiglu_limit"),
        ("attention_bias", "attention_bias"),
    ]:
        assert getattr(config, name) == getattr(hf, hf_name), name
    assert list(config.layer_types) == hf.layer_types
    rope = hf.rope_parameters
    assert config.rope.kind == rope["rope_type"]
    assert config.rope.theta == rope["rope_theta"]
    if config.rope.kind == "yarn":
        assert config.rope.factor == rope["factor"]
        assert config.rope.truncate == rope.get("truncate", True)
        assert config.rope.original_context == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    "config",
    [
        GptOssConfig(eos_token_ids=(2, 12), pad_token_id=1, bos_token_id=0),
        GptOssConfig(
            vocab_size=99,
            hidden_size=6,
            intermediate_size=7,
            num_layers=3,
            num_heads=6,
            num_kv_heads=3,
            head_dim=10,
            num_experts=5,
            experts_per_token=2,
            sliding_window=9,
            layer_types=("full_attention", "full_attention", "sliding_attention"),
            rope=RopeConfig(theta=9.0, factor=2.0, beta_fast=5.0, beta_slow=0.5, original_context=77, truncate=True),
            max_context=1000,
            rms_norm_eps=0.5,
            swiglu_alpha=1.1,
            swiglu_limit=2.0,
            attention_bias=False,
            initializer_range=0.3,
            router_aux_loss_coef=0.1,
        ),
        GptOssConfig(rope=RopeConfig(attention_factor=1.25)),
    ],
)
def test_written_and_read_again(config):
    text = json.dumps(config.to_hf_dict())
    assert GptOssConfig.from_hf_dict(json.loads(text)) == config
    # What Transformers writes after reading ours is the same model, too.
    rewritten = json.loads(HfConfig(**json.loads(text)).to_json_string(use_diff=False))
    assert GptOssConfig.from_hf_dict(rewritten) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"architectures": ["GptOssForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"initial_context_length": 8192}, "initial_context_length"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "mscale": 0.7}}, "rope_scaling.mscale"),
        ({"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "short_factor": []}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "rope_theta": 1e6}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_key_value_heads": 7}, "num_kv_heads"),
        ({"num_experts_per_tok": 64, "experts_per_token": 64}, "experts_per_token"),
        ({"head_dim": 63}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"head_dim": None}, "head_dim must not be null"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        GptOssConfig.from_hf_dict({**GPT_OSS_20B, **changes})
