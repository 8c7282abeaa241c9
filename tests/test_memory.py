"""The memory estimate against a count by hand."""

import pytest
import torch

from poise.config import AlgorithmConfig, Config, ConfigError, RolloutConfig
from poise.memory import estimate_bytes, require_memory
from poise.model import GptOssConfig

# One sliding layer (window 4) and one full layer.
MODEL = GptOssConfig(
    vocab_size=10,
    hidden_size=6,
    intermediate_size=5,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_experts=3,
    experts_per_token=1,
    sliding_window=4,
)
# Embedding and head 2 * 60, norm 6; a layer: q 56, k and v 2 * 28, o 54, sinks 2, norms 12, router 21,
# gate and up 3 * (60 + 10), down 3 * (30 + 6).
PARAMETERS = 120 + 6 + 2 * (56 + 56 + 54 + 2 + 12 + 21 + 210 + 108)


def config(**algorithm):
    rollout = RolloutConfig(num_slots=3, max_context_tokens=100, max_action_tokens=10)
    return Config(rollout=rollout, algorithm=AlgorithmConfig(**algorithm))


def test_estimate_by_hand():
    expected = {
        "parameters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        # 3 slots x (4 + 100) rows x keys and values x 1 head x 4 channels x 4 bytes
        "engine cache": 3 * 104 * 2 * 4 * 4,
    }
    assert estimate_bytes(MODEL, config(), trains=True) == expected
    with_reference = estimate_bytes(MODEL, config(kl_weight=0.1), trains=True)
    assert with_reference == expected | {"reference": 4 * PARAMETERS}
    assert estimate_bytes(MODEL, config(), trains=False).keys() == {"parameters", "engine cache"}


def test_what_cannot_fit_is_refused():
    require_memory(MODEL, config(), torch.device("cpu"), trains=True)
    huge = GptOssConfig(vocab_size=10**9, hidden_size=6000, num_layers=1)
    with pytest.raises(ConfigError, match=r"needs at least \d+\.\d GiB \(optimizer"):
        require_memory(huge, config(), torch.device("cpu"), trains=True)
