"""The loop's own decisions: who enters a baseline, how a batch is split, what a step reports, what is evaluated."""

import asyncio
from dataclasses import replace

import pytest
import torch

from poise.config import AlgorithmConfig, Config, RolloutConfig
from poise.envs.env import Observation, Outcome
from poise.evaluate import evaluate
from poise.harmony import Conversation, Renderer, byte_tokenizer, user
from poise.interrupt import Interrupt
from poise.loop import (
    Rollout,
    is_equal,
    mean_metrics,
    pack_update,
    roll_out,
    rollout_metrics,
    split_evenly,
)
from poise.rollout import Limits
from poise.seeding import derive_seed, row_index
from poise.train.scoring import RolloutError, scored, trainable_groups
from poise.types import Action, Stop, Trajectory, Turn

CONFIG = Config(algorithm=AlgorithmConfig(normalize_advantages="none"))


def episode(group_id: int, reward: float, stop: Stop = Stop.DONE, num_streams: int = 1) -> list[Trajectory]:
    turn = Turn(observation_ids=(1, 2), action_ids=(3, 4, 5), rollout_log_probs=(-0.5, -0.5, -0.5))
    trajectory = Trajectory(group_id=group_id, episode_id="e", turns=(turn,), reward=reward, stop=stop)
    return [trajectory] * num_streams


def advantages_of(groups, config=CONFIG) -> list[float]:
    """One number per packed sequence, in order."""
    (batch,) = pack_update(scored(trainable_groups(groups, config), config), config)
    # Four rows a sequence: targets 2 (observed), 3, 4, 5 (sampled).
    rows = batch.advantages.view(-1, 4)
    assert batch.response_mask.view(-1, 4).tolist() == [[False, True, True, True]] * len(rows)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1].tolist()


def test_advantages_against_the_group_mean():
    # Rewards 1 and 0: mean 1/2. Rewards 3, 0, 0: mean 1.
    groups = [[episode(0, 1.0), episode(0, 0.0)], [episode(1, 3.0), episode(1, 0.0), episode(1, 0.0)]]
    assert advantages_of(groups) == [0.5, -0.5, 2.0, -1.0, -1.0]


def test_an_environment_failure_neither_trains_nor_shifts_its_siblings():
    # With the failure's reward of 0 in the baseline the mean would be 1/3.
    failed = episode(0, 0.0, Stop.ENV_ERROR)
    assert advantages_of([[episode(0, 1.0), failed, episode(0, 0.0)]]) == [0.5, -0.5]
    # A group left with one episode has no baseline and is dropped; nothing left at all is an error.
    assert advantages_of([[episode(0, 1.0), failed], [episode(1, 1.0), episode(1, 0.0)]]) == [0.5, -0.5]
    with pytest.raises(RolloutError, match="env_error"):
        trainable_groups([[episode(0, 1.0), failed]], CONFIG)


def test_an_episode_of_two_streams_counts_once_in_the_baseline():
    # Counted twice, the mean of 1, 1, 0 would be 2/3.
    groups = [[episode(0, 1.0, num_streams=2), episode(0, 0.0)]]
    assert advantages_of(groups) == [0.5, 0.5, -0.5]


def test_split_and_combine():
    groups = [[i] for i in range(7)]
    assert split_evenly(groups, 3) == [[[0], [1]], [[2], [3]], [[4], [5], [6]]]
    assert split_evenly(groups[:2], 3) == [[[0]], [[1]]]
    combined = mean_metrics(
        [
            {"ratio_min": 0.5, "ratio_max": 1.0, "loss": 1.0, "response_tokens": 5, "tokens_per_s": 9.0},
            {"ratio_min": 0.7, "ratio_max": 3.0, "loss": 2.0, "response_tokens": 7, "tokens_per_s": 9.0},
        ]
    )
    assert combined == {"ratio_min": 0.5, "ratio_max": 3.0, "loss": 1.5, "response_tokens": 12}


def test_rollout_metrics_by_hand():
    groups = [[episode(0, 1.0), episode(0, 1.0)], [episode(1, 1.0), episode(1, 0.0)]]
    metrics = rollout_metrics(Rollout(groups=groups, seconds=2.0))
    assert metrics["equal_groups"] == 0.5
    assert metrics["reward_mean"] == 0.75
    assert metrics["rollout_tokens_per_s"] == 6.0  # 4 episodes x 3 tokens in 2 s
    # A failure's placeholder reward of 0 makes no difference that anybody could learn from.
    groups = [[episode(0, 1.0), episode(0, 1.0), episode(0, 0.0, Stop.ENV_ERROR)]]
    assert rollout_metrics(Rollout(groups=groups, seconds=2.0))["equal_groups"] == 1.0


def test_every_epoch_is_another_permutation():
    draws = [row_index(i, 5, seed=1) for i in range(15)]
    epochs = [draws[:5], draws[5:10], draws[10:]]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [row_index(i, 5, seed=1) for i in range(15)] == draws
    assert [row_index(i, 5, seed=2) for i in range(15)] != draws
    assert derive_seed(1, 2) != derive_seed(2, 1)


class OneWord:
    """Rows of words; an episode that is asked for "bad" fails in its grader."""

    train_rows = ()
    test_rows = tuple({"word": word} for word in ("ok", "no", "bad", "ok"))

    def make_env(self, row):
        return OneWordEnv(row["word"])

    def demonstrate(self, row):
        return None


class OneWordEnv:
    def __init__(self, word):
        self.word = word

    async def reset(self):
        return Conversation(messages=(user(self.word),))

    async def step(self, messages):
        return Observation(is_done=True)

    async def outcome(self):
        if self.word == "bad":
            raise OSError("grader is gone")
        return Outcome(reward=float(self.word == "ok"))

    async def close(self):
        pass


def test_evaluation_counts_failures_as_unsolved():
    tokenizer = byte_tokenizer()
    said = (tokenizer.channel, *tokenizer.encode("final"), tokenizer.message, *tokenizer.encode("x"), tokenizer.return_)
    at_once = []
    running = 0

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0)
        running -= 1
        return Action(token_ids=said, log_probs=(0.0,) * len(said), is_stopped=True)

    limits = Limits(max_turns=1, max_action_tokens=20, max_context_tokens=100)
    arguments = {"limits": limits, "seed": 0, "max_concurrent": 2}
    renderer = Renderer(tokenizer)
    result = asyncio.run(evaluate(policy, renderer, OneWord(), num_problems=0, **arguments))
    assert result.num_problems == 4
    assert result.metrics["reward_mean"] == 0.5
    assert result.metrics["stop_env_error"] == 0.25
    assert max(at_once) == 2
    first_two = asyncio.run(evaluate(policy, renderer, OneWord(), num_problems=2, **arguments))
    assert first_two.num_problems == 2
    assert first_two.metrics["reward_mean"] == 0.5


def test_packing_respects_the_budget():
    config = replace(
        CONFIG,
        run=replace(CONFIG.run, tokens_per_microbatch=8),
        rollout=RolloutConfig(max_action_tokens=4, max_context_tokens=8),
        model=replace(CONFIG.model, sliding_window=4),
    )
    batches = pack_update(scored([[episode(0, 1.0), episode(0, 0.0), episode(0, 0.5)]], config), config)
    assert [len(batch.input_ids) for batch in batches] == [8, 4]
    assert torch.cat([batch.input_ids for batch in batches]).tolist() == [1, 2, 3, 4] * 3


class Mixed:
    """Rows say whether the episodes of their group all earn 1, or every second of them."""

    test_rows = ()

    def __init__(self, *kinds):
        self.train_rows = tuple({"kind": kind} for kind in kinds)
        self.num_made = 0

    def make_env(self, row):
        self.num_made += 1
        return OneWordEnv("ok" if row["kind"] == "equal" or self.num_made % 2 else "no")

    def demonstrate(self, row):
        return None


def roll_out_groups(task, step, *, lockstep=False, **algorithm):
    tokenizer = byte_tokenizer()
    said = (tokenizer.channel, *tokenizer.encode("final"), tokenizer.message, *tokenizer.encode("x"), tokenizer.return_)

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        await asyncio.sleep(0)
        return Action(token_ids=said, log_probs=(0.0,) * len(said), is_stopped=True)

    config = Config(
        rollout=RolloutConfig(groups_per_step=3, group_size=2, max_turns=1, lockstep=lockstep),
        algorithm=AlgorithmConfig(**algorithm),
    )
    return roll_out(
        policy, Renderer(tokenizer), task, config, step=step, interrupt=Interrupt(), on_group=lambda group: None
    )


def ids(groups):
    return [group[0][0].group_id for group in groups]


def test_dynamic_sampling_is_bounded_and_counted():
    rollout = roll_out_groups(Mixed("equal"), 1, max_resamples=2)
    # Three rounds of three; the last stays as it is.
    assert ids(rollout.replaced) == [0, 1, 2, 3, 4, 5]
    assert ids(rollout.groups) == [6, 7, 8]
    # The next step draws on, whatever this one needed.
    assert ids(roll_out_groups(Mixed("unequal"), 2, max_resamples=2).groups) == [9, 10, 11]
    assert ids(roll_out_groups(Mixed("equal"), 2).groups) == [3, 4, 5]


@pytest.mark.parametrize("lockstep", [False, True])
def test_dynamic_sampling_replaces_what_is_equal_and_keeps_the_rest(lockstep):
    rollout = roll_out_groups(Mixed("equal", "unequal", "unequal"), 1, lockstep=lockstep, max_resamples=8)
    # One epoch is a permutation of the three rows: two are kept, one group is sampled anew until it is unequal.
    assert len(rollout.groups) == 3
    assert not any(is_equal(group) for group in rollout.groups)
    assert all(is_equal(group) for group in rollout.replaced)
    assert len(ids(rollout.groups)[:2]) == len({0, 1, 2} & set(ids(rollout.groups)))
    assert len(set(ids(rollout.groups + rollout.replaced))) == 3 + len(rollout.replaced)
    assert rollout_metrics(rollout)["replaced_groups"] == len(rollout.replaced) >= 1
