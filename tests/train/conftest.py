"""A tiny policy with everything that could go wrong in it: sinks that matter, router biases, unequal sizes."""

import pytest
import torch

from poise.model import GptOss, GptOssConfig
from poise.types import Stop, Trajectory, Turn

VOCABULARY = 40


def make_model(seed=0, hidden_size=24, intermediate_size=20):
    model = GptOss(
        GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            num_experts=4,
            experts_per_token=2,
            sliding_window=6,
        )
    ).init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(2.0, 1.0, generator=generator)
            elif name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith(("lm_head.weight", "router.weight")):
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def make_trajectories(num=6, seed=0):
    """Ragged, one to three turns, some tokens longer than the window; rollout log-probs are arbitrary."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())

    trajectories = []
    for number in range(num):
        turns = []
        for _ in range(1 + number % 3):
            action_ids = ids(1, 9)
            turns.append(
                Turn(observation_ids=ids(1, 7), action_ids=action_ids, rollout_log_probs=(-1.0,) * len(action_ids))
            )
        trajectories.append(
            Trajectory(group_id=number // 2, episode_id=str(number), turns=tuple(turns), reward=0.0, stop=Stop.DONE)
        )
    return trajectories


@pytest.fixture(name="make_model")
def _make_model():
    return make_model


@pytest.fixture(name="make_trajectories")
def _make_trajectories():
    return make_trajectories
