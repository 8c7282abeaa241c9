"""Routes of the embedded engine, replayed by the trainer: aligned in float32, and worth their while in bf16."""

import asyncio
from copy import deepcopy

import pytest
import torch

from poise.config import AlgorithmConfig, Config, OptimizerConfig
from poise.engine import EmbeddedEngine
from poise.model import GptOss, GptOssConfig
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn


def make_wide_model():
    return GptOss(
        GptOssConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=16,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            num_experts=32,
            experts_per_token=4,
            sliding_window=6,
        )
    ).init_weights(3)


def play(model, num_episodes=12):
    """Episodes of two turns; the second goes on from what the engine has cached."""
    engine = EmbeddedEngine(model, stop_ids={1}, return_id=1, num_slots=4, max_context_tokens=64)

    async def episode(number):
        token_ids, turns = [], []
        for turn in range(2):
            observation = tuple(range(5 + number, 12 + 2 * number + turn))
            token_ids += observation
            action = await engine(token_ids, episode_id=str(number), seed=100 * number + turn, max_tokens=12)
            token_ids += action.token_ids
            num_tokens = len(observation) + len(action.token_ids)
            routes = action.routes[-num_tokens:]
            if turn == 0:
                routes = torch.cat([torch.full((1, 2, 4), -1), torch.from_numpy(routes)]).numpy().astype("int16")
            turns.append(
                Turn(
                    observation_ids=observation,
                    action_ids=action.token_ids,
                    rollout_log_probs=action.log_probs,
                    routes=routes,
                )
            )
        return Trajectory(group_id=0, episode_id=str(number), turns=tuple(turns), reward=0.0, stop=Stop.MAX_TURNS)

    async def episodes():
        return list(await asyncio.gather(*(episode(number) for number in range(num_episodes))))

    return asyncio.run(episodes())


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
