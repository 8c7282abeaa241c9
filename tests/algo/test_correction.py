"""Rollout correction against weights, bounds and metrics worked out by hand."""

import math

import pytest
import torch

from poise.algo.correction import rollout_correction

LOG2 = math.log(2.0)
INF, NAN = math.inf, math.nan
# Sequence 0: tokens of ratio 2 and 1/4, and an observation; sequence 1: a token of ratio e^0.1; sequence 2: nothing.
ROLLOUT = [-2.0, -2.0, 0.0, -1.0, 0.0]
OLD = [-2.0 + LOG2, -2.0 - 2 * LOG2, 0.0, -0.9, 0.0]
MASK = [True, True, False, True, False]
TENTH = math.exp(0.1)  # 1.10517


def correct(old=OLD, rollout=ROLLOUT, mask=MASK, cu_seqlens=(0, 3, 4, 5), **kwargs):
    weights, keep, metrics = rollout_correction(
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(cu_seqlens, dtype=torch.int32),
        **kwargs,
    )
    return weights.tolist(), keep.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("kwargs", "weights", "limited"),
    [
        ({"correction": "none"}, [1, 1, 0, 1, 0], 0),
        # Tokens: 2, 1/4 and e^0.1. Truncation stops at high and lets small ratios be.
        ({"correction": "truncate", "high": 1.5}, [1.5, 0.25, 0, TENTH, 0], 1),
        ({"correction": "truncate", "high": 1.05}, [1.05, 0.25, 0, 1.05, 0], 2),
        # The mask takes both sides away.
        ({"correction": "mask", "low": 0.5, "high": 3.0}, [2, 0, 0, TENTH, 0], 1),
        ({"correction": "mask", "low": 0.2, "high": 1.5}, [0, 0.25, 0, TENTH, 0], 1),
        # Sequence 0: 2 x 1/4 = 1/2, at each of its tokens.
        ({"correction": "truncate", "level": "sequence", "high": 1.05}, [0.5, 0.5, 0, 1.05, 0], 1),
        ({"correction": "mask", "level": "sequence", "low": 0.6}, [0, 0, 0, TENTH, 0], 2),
        ({"correction": "mask", "level": "sequence", "low": 0.4}, [0.5, 0.5, 0, TENTH, 0], 0),
    ],
)
def test_weights_by_hand(kwargs, weights, limited):
    actual, keep, metrics = correct(**kwargs)
    assert actual == pytest.approx(weights, rel=1e-6)
    assert keep == [weight > 0 for weight in weights]
    assert metrics["limited_tokens"] == limited
    assert metrics["rejected_sequences"] == 0


@pytest.mark.parametrize(
    ("reject_by", "estimator", "statistic"),
    [
        # Sequence 0, d = ln 2 and -2 ln 2; sequence 1 has d = 0.1 and stays below all of these.
        ("sum", "k1", LOG2),
        ("mean", "k1", LOG2 / 2),
        ("max", "k1", 2 * LOG2),
        ("sum", "k2", (LOG2**2 + 4 * LOG2**2) / 2),
        ("mean", "k2", (LOG2**2 + 4 * LOG2**2) / 4),
        ("max", "k2", 2 * LOG2**2),
        ("sum", "k3", (2 - 1 - LOG2) + (0.25 - 1 + 2 * LOG2)),  # 0.306853 + 0.636294
        ("mean", "k3", 0.943147 / 2),
        ("max", "k3", 0.636294),
    ],
)
def test_a_sequence_is_rejected_where_its_statistic_exceeds_the_bound(reject_by, estimator, statistic):
    for factor, keep in ((0.999, [False, False, False, True, False]), (1.001, MASK)):
        weights, actual, metrics = correct(
            reject_by=reject_by, reject_estimator=estimator, reject_above=statistic * factor
        )
        assert actual == keep
        assert weights == [float(k) for k in keep]
        assert metrics["rejected_sequences"] == (factor < 1)
        assert metrics["vetoed_sequences"] == 0


def test_one_catastrophic_token_vetoes_its_sequence():
    # The smallest ratio of sequence 0 is 1/4.
    _, keep, metrics = correct(veto_below=0.26)
    assert keep == [False, False, False, True, False]
    assert metrics["vetoed_sequences"] == metrics["rejected_sequences"] == 1
    _, keep, _ = correct(veto_below=0.24)
    assert keep == MASK


def test_metrics_by_hand():
    _, _, metrics = correct(correction="truncate", high=1.5)
    assert metrics == {
        "chi2_sum": pytest.approx(1 + 0.75**2 + (TENTH - 1) ** 2),
        "chi2_sequence_sum": pytest.approx(0.25 + (TENTH - 1) ** 2),
        "ratio_sum": pytest.approx(2.25 + TENTH),
        "ratio_square_sum": pytest.approx(4 + 1 / 16 + TENTH**2),
        "perplexity_gap_sum": pytest.approx(LOG2 / 2 + 0.1),
        "limited_tokens": 1,
        "rejected_sequences": 0,
        "vetoed_sequences": 0,
        "num_sequences": 2,
    }


def test_what_stands_outside_the_mask_changes_nothing():
    kwargs = {"correction": "mask", "low": 0.4, "level": "sequence", "reject_by": "max", "reject_above": 1.0}
    dirty = correct(old=[*OLD[:2], NAN, OLD[3], -INF], rollout=[*ROLLOUT[:2], INF, ROLLOUT[3], NAN], **kwargs)
    assert dirty == correct(**kwargs)


def test_impossible_and_absurd_tokens_stay_finite():
    # Under the trainer impossible: its ratio is clamped at e^-20, next to nothing. And e^100 is clamped at e^20.
    weights, _, metrics = correct(old=[-INF, -1.0], rollout=[-1.0, -101.0], mask=[True, True], cu_seqlens=(0, 2))
    assert weights == [1.0, 1.0]
    assert all(math.isfinite(value) for value in metrics.values())
    weights, _, _ = correct(
        old=[-INF, -1.0], rollout=[-1.0, -101.0], mask=[True, True], cu_seqlens=(0, 1, 2), correction="truncate"
    )
    assert weights == pytest.approx([math.exp(-20), 2.0])


def test_weights_carry_no_gradient():
    old = torch.tensor([-1.0], requires_grad=True)
    weights, _, metrics = rollout_correction(
        old, torch.tensor([-1.5]), torch.tensor([True]), torch.tensor([0, 1]), correction="truncate"
    )
    assert not weights.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="correction must be one of none, truncate, mask, got 'tis'"):
        correct(correction="tis")
    with pytest.raises(ValueError, match=r"0 <= low <= 1 <= high, got 0\.5 and 0\.9"):
        correct(correction="mask", high=0.9)
    with pytest.raises(ValueError, match='"k1", "k2" or "k3"'):
        correct(reject_by="sum", reject_estimator="k4", reject_above=1.0)
