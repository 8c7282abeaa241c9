"""Environments of the packages themselves: `make test-adapters` installs them apart, since they conflict."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from serving import listening

from poise.envs.gym_env import GymTask
from poise.envs.openenv import OpenEnvTask
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import final
from poise.rollout import Limits, run_episode
from poise.types import Action, Stop

RENDERER = Renderer(byte_tokenizer())
LIMITS = Limits(max_turns=8, max_action_tokens=200, max_context_tokens=8000)


def speaking(answer):
    """A policy that answers the text it was shown with ``answer(text)``."""

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        ids = RENDERER._action([final(answer(RENDERER.tokenizer.decode(token_ids)))])
        return Action(token_ids=tuple(ids), log_probs=(-1.0,) * len(ids), is_stopped=True, policy_version=0)

    return policy


async def play(task, row, policy, episode):
    return await run_episode(
        lambda: task.make_env(row), policy, RENDERER, group_id=0, episode_id=f"0/{episode}", seed=0, limits=LIMITS
    )


def halving(text):
    """The middle of what the hints of GEM's game leave of 1 to 10."""
    low, high = 1, 10
    for hint, guess in re.findall(r"the target number is (higher|lower) than (\d+)", text):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return f"\\boxed{{{(low + high) // 2}}}"


def test_a_game_of_gem():
    gem = pytest.importorskip("gem")
    task = GymTask(lambda: gem.make("game:GuessTheNumber-v0-easy"))
    for row in task.train_rows[:6]:
        streams = asyncio.run(play(task, row, speaking(halving), 0))
        # Halving finds one of ten numbers in at most four guesses, and GEM pays 1 for it.
        assert (streams[0].stop, streams[0].reward) == (Stop.DONE, 1.0)
        assert 1 <= len(streams) <= 4


def test_a_game_of_gem_is_the_same_for_the_whole_group():
    gem = pytest.importorskip("gem")
    task = GymTask(lambda: gem.make("game:GuessTheNumber-v0-easy"), history="append")

    async def group():
        return await asyncio.gather(*(play(task, task.train_rows[2], speaking(halving), i) for i in range(4)))

    streams = [stream for [stream] in asyncio.run(group())]
    assert len({tuple(stream.token_ids) for stream in streams}) == 1


def test_a_server_of_openenv():
    pytest.importorskip("openenv")
    with listening([sys.executable, str(Path(__file__).with_name("openenv_echo.py"))]) as url:
        task = OpenEnvTask(url, to_text=lambda seen: seen["echoed"], history="append")

        def answer(text):
            return "stop" if "1: hi" in text else "hi"

        async def group():
            return await asyncio.gather(*(play(task, task.train_rows[0], speaking(answer), i) for i in range(3)))

        for [stream] in asyncio.run(group()):
            # "hi" and "stop": 2 + 4 characters; each connection counts its own steps.
            assert (stream.stop, stream.reward) == (Stop.DONE, 6.0)
            text = RENDERER.tokenizer.decode(stream.token_ids)
            assert "seed 1<|end|>" in text
            assert "1: hi<|end|>" in text
