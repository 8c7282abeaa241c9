"""Which episodes are trained on and with which advantage, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from poise.config import AlgorithmConfig, Config, RolloutConfig
from poise.loop import Rollout, is_equal, pack_update, rollout_metrics
from poise.train.packing import pack
from poise.train.scoring import RolloutError, scored, screened, trainable_groups, with_penalties
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn


def config(**algorithm):
    return Config(rollout=RolloutConfig(temperature=0.7), algorithm=AlgorithmConfig(**algorithm))


def episode(group_id, reward, *, turn_rewards=(0.0,), stop=Stop.DONE, num_tokens=5):
    turns = tuple(
        Turn(
            observation_ids=(1, 2),
            action_ids=tuple(range(3, num_tokens + 1)),
            rollout_log_probs=(-1.0,) * (num_tokens - 2),
            reward=turn_reward,
        )
        for turn_reward in turn_rewards
    )
    return [Trajectory(group_id=group_id, episode_id=f"{group_id}", turns=turns, reward=reward, stop=stop)]


def advantages_of(groups, settings):
    return [[advantage.tolist() for _, advantage in group] for group in scored(groups, settings)]


def test_a_global_baseline_spans_the_groups_and_needs_no_siblings():
    settings = config(normalize_advantages="global")
    groups = trainable_groups([[episode(0, 1.0)], [episode(1, 0.0), episode(1, 0.0, stop=Stop.ENV_ERROR)]], settings)
    high = 0.5 / (0.5**0.5 + 1e-4)  # mean 1/2, deviation of the sample sqrt(1/2)
    assert advantages_of(groups, settings) == [[pytest.approx(high)], [pytest.approx(-high)]]
    with pytest.raises(RolloutError, match="two episodes"):
        trainable_groups([[episode(0, 1.0)]], settings)


def test_turn_credit_reaches_the_tokens_of_its_turn():
    settings = config(normalize_advantages="none", credit="turn", turn_discount=0.5)
    groups = [[episode(0, 1.0, turn_rewards=(1.0, 0.0)), episode(0, 0.0, turn_rewards=(0.0,))]]
    # Outcomes 1 and 0: +-1/2. Turn rewards 1, 0, 0: 2/3, -1/3, -1/3. So -1/3 + 1/2 = 1/6 and 2/3 + 1/12 = 3/4.
    assert advantages_of(groups, settings) == [[pytest.approx([0.75, 1 / 6]), pytest.approx([-5 / 6])]]
    (batch,) = pack_update(scored(groups, settings), settings)
    # Nine rows of the two turns (2 observed and 3 sampled tokens each, less one), four of the other episode.
    assert batch.advantages.tolist() == pytest.approx(
        [0, 0.75, 0.75, 0.75, 0, 0, 1 / 6, 1 / 6, 1 / 6, 0, -5 / 6, -5 / 6, -5 / 6], rel=1e-6
    )


def test_turn_credit_over_two_streams_of_one_episode():
    settings = config(normalize_advantages="none", credit="turn")
    (stream,) = episode(0, 1.0, turn_rewards=(1.0,))
    (second,) = episode(0, 1.0, turn_rewards=(0.0, 0.0))
    groups = [[[stream, second], episode(0, 0.0)]]
    # Turn rewards 1, 0, 0, 0: 3/4 and -1/4. Backwards: 1/2 - 1/4, then 0, then 3/4. Other: -1/2 - 1/4.
    assert advantages_of(groups, settings) == [[[0.75], [0.0, 0.25], [-0.75]]]


def test_overlong_episodes_are_filtered_before_the_baseline():
    cut = episode(0, 0.0, stop=Stop.MAX_TOKENS)
    groups = [[episode(0, 1.0), cut, episode(0, 0.5)], [episode(1, 1.0), episode(1, 0.0, stop=Stop.MAX_TOKENS)]]
    settings = config(normalize_advantages="none")
    assert advantages_of(trainable_groups(groups, settings), settings) == [[0.5, -0.5, 0.0], [0.5, -0.5]]
    settings = config(normalize_advantages="none", overlong="filter")
    assert advantages_of(trainable_groups(groups, settings), settings) == [[0.25, -0.25]]
    with pytest.raises(RolloutError, match='overlong "filter"'):
        trainable_groups(groups[1:], settings)


def test_overlong_penalty_by_hand():
    settings = config(overlong="penalty", overlong_buffer_tokens=100)  # max_context_tokens 512: free up to 412
    groups = [[episode(0, 1.0, num_tokens=n) for n in (400, 412, 437, 512)]]
    penalized, metrics = with_penalties(groups, settings)
    assert [member[0].reward for member in penalized[0]] == [1.0, 1.0, 0.75, 0.0]
    assert metrics == {"overlong_penalty": 1.25 / 4}
    assert with_penalties(groups, config()) == (groups, {})


def as_the_engine_would(trainer, trajectories):
    """The trajectories with the trainer's own log-probs for the engine's."""
    result = []
    for trajectory in trajectories:
        (batch,) = trainer.with_old_log_probs(pack([trajectory], torch.zeros(1), tokens_per_microbatch=999))
        values = iter(batch.old_log_probs[batch.response_mask].tolist())
        turns = tuple(
            replace(turn, rollout_log_probs=tuple(next(values) for _ in turn.action_ids)) for turn in trajectory.turns
        )
        result.append(replace(trajectory, turns=turns))
    return result


def shifted(trajectory, amount):
    """The engine was more certain of every token by ``amount`` nats, so d = -amount."""
    turns = tuple(
        replace(turn, rollout_log_probs=tuple(value + amount for value in turn.rollout_log_probs))
        for turn in trajectory.turns
    )
    return replace(trajectory, turns=turns)


@pytest.mark.parametrize(
    "bound",
    [
        {"reject_by": "mean", "reject_above": 0.4},
        {"reject_by": "max", "reject_estimator": "k2", "reject_above": 0.1},
        {"veto_below": 0.7},
    ],
)
def test_a_rejected_episode_does_not_move_its_siblings(make_model, make_trajectories, bound):
    settings = config(normalize_advantages="none", **bound)
    trainer = Trainer(make_model(), settings)
    streams = as_the_engine_would(trainer, make_trajectories(num=6))
    rewards = [1.0, 0.0, 7.0, 1.0, 3.0, 5.0]
    streams = [replace(s, group_id=i // 3, reward=r) for i, (s, r) in enumerate(zip(streams, rewards, strict=True))]
    streams[2] = shifted(streams[2], 0.5)  # ratio e^-0.5 = 0.61 at every token
    groups = [[[s] for s in streams[:3]], [[s] for s in streams[3:]]]
    kept, metrics = screened(trainer, None, groups, settings)
    assert metrics == {"rejected_episodes": pytest.approx(1 / 6)}
    # Without the sibling of reward 7 the mean is 1/2, with it 8/3.
    assert advantages_of(kept, settings) == [[0.5, -0.5], [-2.0, 0.0, 2.0]]
    # An episode leaves whole where one of its streams is rejected.
    groups = [[[streams[0], streams[2]], [streams[1]], [streams[3]]]]
    kept, _ = screened(trainer, None, groups, settings)
    assert [member[0].reward for member in kept[0]] == [0.0, 1.0]
    with pytest.raises(
        RolloutError, match=r"rejected 4 of 4 streams .* algorithm.veto_below .* algorithm.reject_above"
    ):
        screened(trainer, None, [[[shifted(s, 2.0)] for s in streams[:4]]], settings)


def test_kl_in_the_reward_is_k1_over_the_episode(make_model, make_trajectories):
    settings = config(kl_weight=0.5, kl_in="reward", normalize_advantages="none")
    trainer = Trainer(make_model(), settings)
    streams = [replace(s, group_id=0, reward=float(i)) for i, s in enumerate(make_trajectories(num=4))]
    groups = [[[streams[0]], [streams[1], streams[2]], [streams[3]]]]
    reference = make_model(seed=5)
    sums = []
    with torch.no_grad():
        for stream in streams:
            (batch,) = pack([stream], torch.zeros(1), tokens_per_microbatch=999)
            ours, theirs = trainer.log_probs(batch)[0], trainer.log_probs(batch, model=reference)[0]
            sums.append((ours - theirs).sum().item())
    kept, metrics = screened(trainer, reference, groups, settings)
    rewards = [member[0].reward for member in kept[0]]
    expected = [-0.5 * sums[0], 1 - 0.5 * (sums[1] + sums[2]), 3 - 0.5 * sums[3]]
    assert rewards == pytest.approx(expected, rel=1e-4)
    assert metrics["kl"] == pytest.approx(sum(sums) / sum(sum(s.response_mask) for s in streams), rel=1e-4)
    # Then the loss knows no reference.
    trainer.step(pack_update(scored(kept, settings), settings))


def test_nothing_is_screened_where_nothing_asks():
    groups = [[episode(0, 1.0), episode(0, 0.0)]]
    assert screened(None, None, groups, config()) == (groups, {})


def test_replaced_groups_are_counted_and_reported_but_not_trained_on():
    equal, mixed = [episode(0, 1.0), episode(0, 1.0)], [episode(1, 1.0), episode(1, 0.0)]
    assert is_equal(equal)
    assert not is_equal(mixed)
    metrics = rollout_metrics(Rollout(groups=[mixed], seconds=1.0, replaced=[equal]))
    assert metrics["replaced_groups"] == 1.0
    assert metrics["equal_groups"] == 0.5
    assert metrics["reward_mean"] == 0.75


def test_a_missing_route_is_named():
    routes = np.zeros((5, 2, 2), dtype=np.int16)
    routes[0] = -1
    turn = replace(episode(0, 1.0)[0].turns[0], routes=routes)
    whole = replace(episode(0, 1.0)[0], turns=(turn,))
    assert pack([whole], torch.ones(1), tokens_per_microbatch=9)[0].routes.shape == (4, 2, 2)
    routes[3, 1, 0] = -1
    with pytest.raises(ValueError, match="trajectory 0: token 3 of 5 has no routes"):
        pack([replace(whole, turns=(replace(turn, routes=routes),))], torch.ones(1), tokens_per_microbatch=9)
