"""Demonstrations replayed through the real environments: what is imitated is exactly what a rollout would see."""

import asyncio
import os
from pathlib import Path

import pytest

from poise.config import Config, TaskConfig
from poise.envs import make_task
from poise.harmony import Conversation, Renderer, byte_tokenizer
from poise.harmony.messages import final, user
from poise.rollout import Limits, run_episode
from poise.types import Action, Stop
from poise.warmstart import demonstrations

DATA = Path(os.environ.get("POISE_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
RENDERER = Renderer(byte_tokenizer())
LIMITS = Limits(max_turns=20, max_action_tokens=4000, max_context_tokens=20_000)


class Replay:
    """A policy that says what was demonstrated, and remembers each prompt."""

    def __init__(self, actions):
        self.actions = list(actions)
        self.prompts = []

    async def __call__(self, token_ids, *, episode_id, seed, max_tokens):
        self.prompts.append(list(token_ids))
        said = tuple(self.actions[len(self.prompts) - 1])
        return Action(token_ids=said, log_probs=(0.0,) * len(said), is_stopped=True)


def task_configs():
    for dataset in ("chain_sum", "basic_arithmetic", "products"):
        for describes_tools in (True, False):
            yield TaskConfig(name="reasoning_gym", dataset=dataset, describes_tools=describes_tools, mental_share=0.2)
    for describes_tools in (True, False):
        yield TaskConfig(
            name="gsm8k",
            data=str(DATA / "gsm8k/train.jsonl"),
            test_data=str(DATA / "gsm8k/test.jsonl"),
            describes_tools=describes_tools,
        )


@pytest.mark.parametrize("config", task_configs(), ids=lambda c: f"{c.name}-{c.dataset}-{c.describes_tools}")
def test_a_rollout_of_the_demonstrated_actions_is_the_demonstration(config):
    if config.name == "gsm8k" and not (DATA / "gsm8k").exists():
        pytest.skip("needs the GSM8K files: set POISE_DATA")
    task = make_task(config)
    num_multi_turn = 0
    for index in range(25):
        row = task.train_rows[index]
        conversation = task.demonstrate(row)
        assert conversation is not None
        turns = RENDERER.demonstration(conversation)
        policy = Replay(action for _, action in turns)
        episode = run_episode(
            lambda task=task, row=row: task.make_env(row),
            policy,
            RENDERER,
            group_id=index,
            episode_id=str(index),
            seed=0,
            limits=LIMITS,
        )
        (trajectory,) = asyncio.run(episode)
        # Tool results come from the sandbox here and from the task's own text in the demonstration: same tokens.
        assert trajectory.token_ids == [i for observation, action in turns for i in (*observation, *action)]
        assert trajectory.stop is Stop.DONE
        assert trajectory.reward == 1.0
        assert trajectory.metrics["tool_errors"] == 0
        # The stream only grows: each prompt begins with the one before and the action that answered it.
        for before, action, after in zip(policy.prompts, policy.actions, policy.prompts[1:], strict=False):
            assert after[: len(before) + len(action)] == [*before, *action]
        num_multi_turn += len(turns) > 1
    assert num_multi_turn > 10


def test_one_row_that_fits_is_found_again_and_again():
    # Its place changes with every epoch: it may be the first of one and the last of the next.
    class OneOfThree:
        train_rows = (0, 1, 2)

        def demonstrate(self, row):
            return Conversation(messages=(user("?"), final("yes"))) if row == 1 else None

    source = demonstrations(RENDERER, OneOfThree(), Config(), skip=0)
    assert len({str(next(source)) for _ in range(50)}) == 1
