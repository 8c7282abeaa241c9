"""Rotary embedding against Transformers and numbers by hand."""

import math

import pytest
import torch
from transformers import GptOssConfig as HfConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding, apply_rotary_pos_emb

from poise.model.rope import RopeConfig, inverse_frequencies, rotate, rotation


@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize(
    ("config", "hf"),
    [
        (RopeConfig(), {"rope_type": "yarn", "factor": 32.0, "truncate": False}),
        (RopeConfig(truncate=True), {"rope_type": "yarn", "factor": 32.0, "truncate": True}),
        (
            RopeConfig(factor=4.0, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7, theta=10000.0),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.7,
                "rope_theta": 10000.0,
            },
        ),
        (RopeConfig(kind="default", theta=500.0), {"rope_type": "default", "rope_theta": 500.0}),
    ],
)
def test_equals_transformers(head_dim, config, hf):
    parameters = {"rope_theta": 150000.0, "original_max_position_embeddings": 4096, **hf}
    if hf["rope_type"] == "default":
        del parameters["original_max_position_embeddings"]
    hf_rope = GptOssRotaryEmbedding(HfConfig(head_dim=head_dim, rope_parameters=parameters))
    position_ids = torch.tensor([0, 1, 2, 127, 4095, 4096, 100_000])
    x = torch.randn(7, 3, head_dim)
    hf_cos, hf_sin = hf_rope(x, position_ids[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], hf_cos, hf_sin)
    cos, signed_sin = rotation(position_ids, inverse_frequencies(config, head_dim), config.cos_sin_scale, x.dtype)
    torch.testing.assert_close(cos[:, 0, : head_dim // 2], hf_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(x, cos, signed_sin), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_yarn_of_gpt_oss_by_hand():
    config = RopeConfig()
    assert config.cos_sin_scale == pytest.approx(1.3465735902799727)  # 0.1 ln 32 + 1
    frequencies = inverse_frequencies(config, 64)
    # The ramp runs from channel 64 ln(4096 / (32 2 pi)) / (2 ln 150000) = 8.0928 to 64 ln(4096 / 2 pi) / (2 ln 150000)
    # = 17.3980: pair 0 keeps its frequency, pair 31 is divided by 32, pair 12 lies (12 - 8.0928) / 9.3052 = 0.41990 in.
    assert frequencies[0].item() == 1.0
    assert frequencies[31].item() == pytest.approx(150000 ** (-62 / 64) / 32, rel=1e-6)
    assert frequencies[12].item() == pytest.approx(150000 ** (-24 / 64) * (0.41990 / 32 + 0.58010), rel=1e-4)


def test_rotation_by_hand():
    # One pair, one radian per token, position 2: (1, 0) -> (cos 2, sin 2), (0, 1) -> (-sin 2, cos 2).
    cos, signed_sin = rotation(torch.tensor([2]), torch.tensor([1.0]), 1.0, torch.float32)
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    expected = torch.tensor([[[math.cos(2), math.sin(2)], [-math.sin(2), math.cos(2)]]])
    torch.testing.assert_close(rotate(x, cos, signed_sin), expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "linear"}, "kind"),
        ({"theta": 1.0}, "theta"),
        ({"factor": 0.5}, "factor"),
        ({"beta_fast": 1.0}, "beta_fast"),
        ({"original_context": 0}, "original_context"),
    ],
)
def test_config_refuses(fields, words, annotations_unchecked):
    with pytest.raises(ValueError, match=words):
        RopeConfig(**fields)
