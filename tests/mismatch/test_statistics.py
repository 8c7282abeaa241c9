"""Numbers worked out by hand."""

import math

import numpy as np
import pytest

from poise.mismatch.statistics import bands, route_differences, summary

LN2 = math.log(2)


def test_summary_of_three_tokens():
    # Probabilities of the trainer 1/2, 1/4, 1/4, of the engine 1/4, 1/4, 1/2: d = ln 2, 0, -ln 2.
    found = summary(np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.25, 0.5]))
    assert found.num_tokens == 3
    assert found.mean == pytest.approx(2 * LN2 / 3)
    assert found.max == pytest.approx(LN2)
    assert found.rms == pytest.approx(LN2 * math.sqrt(2 / 3))
    assert found.k1 == pytest.approx(0, abs=1e-12)
    # exp(d) - 1 - d: 2 - 1 - ln 2, 0, 1/2 - 1 + ln 2: their mean is 1/6.
    assert found.k3 == pytest.approx(1 / 6)
    assert found.share_large == pytest.approx(2 / 3)
    # Deviations 1/6, -1/12, -1/12 and -1/12, -1/12, 1/6: covariance (-2 + 1 - 2) / 144, variance (4 + 1 + 1) / 144.
    assert found.pearson == pytest.approx(-0.5)


def test_k1_has_the_sign_of_engine_minus_trainer_and_large_means_above_a_tenth():
    found = summary(np.array([-1.0, -1.0, -1.0, -1.0]), np.array([-0.5, -1.05, -1.0, -0.9]))
    assert found.k1 == pytest.approx((0.5 - 0.05 + 0 + 0.1) / 4)
    assert found.share_large == pytest.approx(1 / 4)  # 0.1 itself, up to rounding below, is not above
    assert found.pearson is None  # the trainer's probabilities are constant


def test_p99_lies_between_the_two_largest():
    # 101 differences 0, 1, .., 100: the 0.99 quantile is the one at index 0.99 x 100 = 99.
    found = summary(np.arange(101.0) * -1, np.zeros(101))
    assert found.p99 == pytest.approx(99)


def test_summary_refuses_nothing_and_unequal_lengths():
    for trainer, engine in ((np.zeros(0), np.zeros(0)), (np.zeros(2), np.zeros(3))):
        with pytest.raises(ValueError, match=r"must be \[N\]"):
            summary(trainer, engine)


def test_bands_double():
    positions = np.array([0, 3, 4, 7, 8, 15, 40])
    found = [(name, chosen.tolist()) for name, chosen in bands(positions, 4)]
    assert found == [
        ("first window (0..3)", [True, True, False, False, False, False, False]),
        ("1 to 2 windows (4..7)", [False, False, True, True, False, False, False]),
        ("2 to 4 windows (8..15)", [False, False, False, False, True, True, False]),
        ("8 to 16 windows (32..63)", [False, False, False, False, False, False, True]),
    ]
    assert [name for name, _ in bands(positions, None)] == ["everywhere (no sliding layer)"]


def test_route_differences():
    trainer = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [0, 1]]], dtype=np.int16)
    engine = np.array([[[1, 0], [2, 4]], [[-1, -1], [-1, -1]], [[4, 5], [1, 0]]], dtype=np.int16)
    # Row 1 was not recorded. Layer 0: the same sets in another order. Layer 1: row 0 differs, row 2 does not.
    assert route_differences(trainer, engine) == (2, [0.0, 0.5])
    assert route_differences(trainer, np.full_like(engine, -1)) == (0, [])
    with pytest.raises(ValueError, match="one shape"):
        route_differences(trainer, engine[:2])
