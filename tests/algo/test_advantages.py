"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from poise.algo.advantages import gae, group_advantages, turn_advantages


def advantages(rewards, group_ids, **kwargs):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), **kwargs)


def assert_close(actual, expected, **kwargs):
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=torch.float64), **({"rtol": 1e-12, "atol": 1e-12} | kwargs)
    )


def test_none_subtracts_the_mean_of_the_group():
    # Groups interleaved: 7 holds rewards 1, 0, 0, 1 (mean 0.5), 3 holds 2, 5 (mean 3.5).
    actual = advantages([1.0, 2.0, 0.0, 0.0, 5.0, 1.0], [7, 3, 7, 7, 3, 7], normalize="none")
    assert_close(actual, [0.5, -1.5, -0.5, -0.5, 1.5, 0.5])


def test_std_divides_by_the_deviation_of_the_sample():
    # 1, 0, 0, 1: mean 1/2, squares 4 x 1/4 = 1, over N - 1 = 3: std = sqrt(1/3); floor 1e-4 x max|r| = 1e-4.
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert_close(advantages([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0]), [expected, -expected, -expected, expected])
    # 2, 4, 9: mean 5; squares 9 + 1 + 16 = 26, over 2 = 13; floor 1e-4 x 9.
    denominator = math.sqrt(13) + 9e-4
    assert_close(advantages([2.0, 4.0, 9.0], [0, 0, 0]), [-3 / denominator, -1 / denominator, 4 / denominator])


def test_leave_one_out_compares_with_the_siblings():
    # 3 against mean(0, 6) = 3; 0 against 4.5; 6 against 1.5.
    assert_close(advantages([3.0, 0.0, 6.0], [1, 1, 1], normalize="leave_one_out"), [0.0, -4.5, 4.5])


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(normalize):
    # The mean of three times 0.1 is not 0.1 in floating point; -3.3 and 1e300 likewise try to leave a remainder.
    for reward in (0.1, 0.0, -3.3, 1e300, 1e-300):
        actual = advantages([reward] * 3 + [1.0, 2.0], [0, 0, 0, 1, 1], normalize=normalize)
        assert actual[:3].tolist() == [0.0, 0.0, 0.0]
        assert actual[3] < 0 < actual[4]


def test_rewards_that_differ_by_rounding_are_not_blown_up():
    # 0.1 + 0.2 and 0.3 differ by 5.6e-17; dividing by their std alone would give +-0.707.
    actual = advantages([0.1 + 0.2, 0.3], [0, 0])
    assert actual.abs().max() < 1e-11


def test_scaling_the_rewards_keeps_the_advantages():
    rewards = [0.0, 0.25, 1.0, 0.5]
    expected = advantages(rewards, [0] * 4)
    for scale in (1e-6, 1e6):
        torch.testing.assert_close(advantages([r * scale for r in rewards], [0] * 4), expected, rtol=1e-9, atol=0)


def test_statistics_survive_a_large_offset():
    # 1e9 + (0, 1, 2): mean 1e9 + 1. E[r^2] - E[r]^2 in float64 would lose it all; two passes do not.
    assert_close(advantages([1e9, 1e9 + 1, 1e9 + 2], [0, 0, 0], normalize="none"), [-1.0, 0.0, 1.0])


def test_float32_rewards_are_taken_in_float64():
    actual = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), normalize="none")
    assert actual.dtype == torch.float64
    assert actual.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("normalize", ["std", "none", "leave_one_out"])
def test_a_group_of_one_is_refused_by_name(normalize):
    with pytest.raises(ValueError, match="group 12 has one episode"):
        advantages([1.0, 0.0, 1.0], [5, 5, 12], normalize=normalize)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match='"std", "none", "leave_one_out" or "global", got \'batch\''):
        advantages([1.0, 0.0], [0, 0], normalize="batch")
    with pytest.raises(ValueError, match=r"rewards must be finite, got \[nan\]"):
        advantages([1.0, float("nan")], [0, 0])
    with pytest.raises(ValueError, match=r"rewards \[2\] and group_ids \[3\]"):
        advantages([1.0, 0.0], [0, 0, 0])


def test_global_takes_the_whole_batch_as_one_group():
    # Mean 2 over both groups; differences -1, -2, 0, 3; squares 14 over 3; floor 1e-4 x 5.
    denominator = math.sqrt(14 / 3) + 5e-4
    actual = advantages([1.0, 0.0, 2.0, 5.0], [0, 0, 1, 1], normalize="global")
    assert_close(actual, [-1 / denominator, -2 / denominator, 0.0, 3 / denominator])
    # A group of one has the others as its baseline.
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert advantages([1.0, 0.0], [0, 1], normalize="global").tolist() == [half, -half]


def test_leave_one_out_of_nearly_equal_rewards_stays_bounded():
    # 0 against 0.95: -0.95; 0.95 against (0 + 6 x 0.95) / 7 = 5.7 / 7: 0.95 / 7.
    actual = advantages([0.0] + [0.95] * 7, [0] * 8, normalize="leave_one_out")
    assert_close(actual, [-0.95] + [0.95 / 7] * 7)


def test_turn_credit_by_hand():
    # Turn rewards 1, 0 and 0: mean 1/3, so b = 2/3, -1/3 and -1/3. Episode 0, backwards with discount 1/2:
    # 1/2 - 1/3 = 1/6, then 2/3 + 1/2 x 1/6 = 3/4. Episode 1: -1/2 - 1/3.
    first, second = turn_advantages(
        torch.tensor([0.5, -0.5], dtype=torch.float64),
        torch.tensor([0, 0]),
        [[1.0, 0.0], [0.0]],
        discount=0.5,
        normalize="none",
    )
    assert_close(first, [0.75, 1 / 6])
    assert_close(second, [-5 / 6])


def test_turns_without_rewards_have_the_advantage_of_their_episode_discounted():
    outcome, group_ids = torch.tensor([2.0, -2.0], dtype=torch.float64), torch.tensor([4, 4])
    # Equal turn rewards teach nothing, whatever they are: 2, 2 and -2 exactly.
    for reward in (0.0, 0.1):
        first, second = turn_advantages(outcome, group_ids, [[reward, reward], [reward]], discount=1.0)
        assert first.tolist() == [2.0, 2.0]
        assert second.tolist() == [-2.0]
    first, _ = turn_advantages(outcome, group_ids, [[0.0, 0.0, 0.0], [0.0]], discount=0.5)
    assert first.tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"turn_rewards\[1\] is empty"):
        turn_advantages(outcome, group_ids, [[0.0], []], discount=1.0)
    with pytest.raises(ValueError, match=r"discount must be in \[0, 1\], got 1.5"):
        turn_advantages(outcome, group_ids, [[0.0], [0.0]], discount=1.5)


def test_gae_by_hand_and_over_observations():
    # gamma 0.9, lam 0.5. delta: 1 - 0.6 = 0.4; 0.9 x 0.6 - 0.4 = 0.14; 0.9 x 0.4 - 0.5 = -0.14.
    # A: 0.4; 0.14 + 0.45 x 0.4 = 0.32; -0.14 + 0.45 x 0.32 = 0.004. Returns: A + V.
    plain, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 0.6]), torch.tensor([True] * 3), gamma=0.9, lam=0.5
    )
    assert_close(plain, [0.004, 0.32, 0.4], atol=1e-7)
    assert_close(returns, [0.504, 0.72, 1.0], atol=1e-7)
    # An observation in the middle is no step; a second sequence of one token (1 - 0.25) does not leak into the first.
    mask = torch.tensor([True, False, True, True, True])
    packed, _ = gae(
        torch.tensor([0.0, math.nan, 0.0, 1.0, 1.0]),
        torch.tensor([0.5, math.inf, 0.4, 0.6, 0.25]),
        mask,
        gamma=0.9,
        lam=0.5,
        cu_seqlens=torch.tensor([0, 4, 5], dtype=torch.int32),
    )
    assert_close(packed, [0.004, 0.0, 0.32, 0.4, 0.75], atol=1e-7)
