"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from poise.algo.advantages import group_advantages


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
    with pytest.raises(ValueError, match=r'"std", "none" or "leave_one_out", got "?\'?batch'):
        advantages([1.0, 0.0], [0, 0], normalize="batch")
    with pytest.raises(ValueError, match=r"rewards must be finite, got \[nan\]"):
        advantages([1.0, float("nan")], [0, 0])
    with pytest.raises(ValueError, match=r"rewards \[2\] and group_ids \[3\]"):
        advantages([1.0, 0.0], [0, 0, 0])
