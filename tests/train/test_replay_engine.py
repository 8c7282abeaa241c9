"""Routes of the embedded engine, replayed by the trainer: aligned in float32, and worth their while in bf16."""

from copy import deepcopy

import pytest
import torch
from wide import make_wide_model, play

from poise.config import AlgorithmConfig, Config, OptimizerConfig
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Trajectory, Turn


def step_metrics(model, trajectories, source):
    config = Config(algorithm=AlgorithmConfig(replay_routes=source), optimizer=OptimizerConfig(learning_rate=0.0))
    batches = pack(trajectories, torch.ones(len(trajectories)), tokens_per_microbatch=150)
    assert len(batches) > 1
    return Trainer(deepcopy(model), config).step(batches)


def test_routes_of_a_float32_engine_are_the_trainers_own_token_by_token():
    model = make_wide_model()
    trajectories = play(model)
    replayed, own = step_metrics(model, trajectories, "engine"), step_metrics(model, trajectories, "none")
    assert replayed["route_drift"] == 0.0
    assert replayed["mismatch_max"] < 1e-5
    assert replayed["loss"] == pytest.approx(own["loss"], rel=1e-6)
    # Were row i not of token i, another expert would show at once.
    shifted = [
        Trajectory(
            group_id=0,
            episode_id=t.episode_id,
            turns=(
                Turn(
                    observation_ids=tuple(t.token_ids[: len(t.turns[0].observation_ids)]),
                    action_ids=tuple(t.token_ids[len(t.turns[0].observation_ids) :]),
                    rollout_log_probs=tuple(t.rollout_log_probs[len(t.turns[0].observation_ids) :]),
                    routes=t.routes[[0, *range(2, len(t.routes)), 1]],
                ),
            ),
            reward=0.0,
            stop=t.stop,
        )
        for t in trajectories
    ]
    assert step_metrics(model, shifted, "engine")["route_drift"] > 0.5


def test_replay_brings_a_float32_trainer_nearer_to_a_bfloat16_engine():
    model = make_wide_model().bfloat16()
    trajectories = play(model)
    own, replayed = (step_metrics(model.float(), trajectories, source) for source in ("none", "engine"))
    assert 0 < replayed["route_drift"] < 0.2
    assert replayed["mismatch_k3"] < own["mismatch_k3"] / 3
    assert replayed["ratio_min"] == replayed["ratio_max"] == 1.0
