"""A policy of many experts, and what the embedded engine samples from it."""

import asyncio

import torch

from poise.engine import EmbeddedEngine
from poise.model import GptOss, GptOssConfig
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
