"""Losses against numbers worked out by hand, against finite differences, and at the edges of floating point."""

import math

import pytest
import torch

from poise.algo.correction import mismatch
from poise.algo.losses import kl, policy_loss

INF = math.inf
NAN = math.nan


def loss_and_gradient(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.3):
    log_probs = torch.tensor(log_probs, requires_grad=True)
    loss, metrics = policy_loss(
        log_probs,
        torch.tensor(old_log_probs),
        torch.tensor(advantages),
        torch.tensor(mask, dtype=torch.bool),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.tolist(), {name: value.item() for name, value in metrics.items()}


LOG2 = math.log(2.0)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        # clip_low 0.2, clip_high 0.3: the ratio may move in [0.8, 1.3].
        (0.0, 1.5, -1.5, -1.5, 0),  # ratio 1: -A, gradient -A
        (0.0, -2.0, 2.0, 2.0, 0),  # the same, downwards
        (LOG2, 1.0, -1.3, 0.0, 1),  # ratio 2 > 1.3, A > 0: bounded, no gradient
        (LOG2, -1.0, 2.0, 2.0, 0),  # ratio 2, A < 0: min keeps ratio A = -2; gradient -ratio A
        (-LOG2, 1.0, -0.5, -0.5, 0),  # ratio 0.5, A > 0: min keeps 0.5
        (-LOG2, -1.0, 0.8, 0.0, 1),  # ratio 0.5 < 0.8, A < 0: bounded at -0.8, no gradient
        (math.log(1.25), 1.0, -1.25, -1.25, 0),  # above 1 + clip_low but below 1 + clip_high
        (math.log(0.75), -1.0, 0.8, 0.0, 1),  # above 1 - clip_high but below 1 - clip_low
        (LOG2, 0.0, 0.0, 0.0, 0),  # advantage 0: nothing, and not counted as clipped
    ],
)
def test_policy_loss_row_by_row(log_ratio, advantage, loss, gradient, is_clipped):
    actual_loss, (actual_gradient,), metrics = loss_and_gradient([-3.0 + log_ratio], [-3.0], [advantage], [True])
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    assert actual_gradient == pytest.approx(gradient, rel=1e-5)
    assert metrics["clipped_tokens"] == is_clipped
    assert metrics["ratio_min"] == metrics["ratio_max"] == pytest.approx(math.exp(log_ratio), rel=1e-5)


def test_loss_is_a_sum_and_metrics_cover_the_masked_tokens_only():
    # Tokens 0, 1, 3 count: -1 x 1, -2 x 0.5, +0.8 (ratio 0.5, A < 0, bounded). Token 2 (ratio e^5) is an observation.
    loss, gradient, metrics = loss_and_gradient(
        [-1.0, -1.0 - LOG2, 4.0, -1.0 - LOG2],
        [-1.0, -1.0, -1.0, -1.0],
        [1.0, 2.0, 9.0, -1.0],
        [True, True, False, True],
    )
    assert loss == pytest.approx(-1.0 - 1.0 + 0.8, rel=1e-5)
    assert gradient == pytest.approx([-1.0, -1.0, 0.0, 0.0], rel=1e-5)
    assert metrics == {"ratio_min": pytest.approx(0.5), "ratio_max": 1.0, "clipped_tokens": 1}


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_minus_advantage_over_the_normalizer():
    generator = torch.Generator().manual_seed(0)
    log_probs = (-5 * torch.rand(50, generator=generator)).requires_grad_()
    advantages = torch.randn(50, generator=generator)
    mask = torch.rand(50, generator=generator) < 0.6
    loss, metrics = policy_loss(log_probs, log_probs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2)
    (loss / 64).backward()
    assert metrics["ratio_min"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["clipped_tokens"] == 0
    assert torch.equal(log_probs.grad, torch.where(mask, -advantages / 64, 0.0))


def test_gradient_against_finite_differences():
    generator = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(40, generator=generator, dtype=torch.float64)
    log_probs = (old + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    mask = torch.arange(40) % 3 > 0

    def loss(log_probs):
        return policy_loss(log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.28)[0]

    assert torch.autograd.gradcheck(loss, (log_probs,))


def test_what_stands_outside_the_mask_changes_nothing():
    # Observation tokens hold -inf, NaN and inf in every input: loss and gradient are those of the two response tokens.
    mask = [True, False, False, True, False]
    clean = loss_and_gradient(
        [-1.0, 0.0, 0.0, -2.0, 0.0], [-1.1, 0.0, 0.0, -2.5, 0.0], [1.0, 0.0, 0.0, -1.0, 0.0], mask
    )
    dirty = loss_and_gradient(
        [-1.0, -INF, NAN, -2.0, INF], [-1.1, NAN, -INF, -2.5, INF], [1.0, NAN, INF, -1.0, -INF], mask
    )
    assert clean == dirty
    # By hand: ratios e^0.1 and e^0.5, neither bounded: loss -e^0.1 + e^0.5.
    assert clean[0] == pytest.approx(-math.exp(0.1) + math.exp(0.5), rel=1e-5)


def test_a_fully_masked_sequence_gives_zero_and_the_identities_of_min_and_max():
    for length in (3, 0):
        loss, gradient, metrics = loss_and_gradient([-1.0] * length, [-2.0] * length, [5.0] * length, [False] * length)
        assert loss == 0.0
        assert gradient == [0.0] * length
        assert metrics == {"ratio_min": INF, "ratio_max": -INF, "clipped_tokens": 0}


def test_impossible_tokens_have_no_gradient_and_nan_stays_nan():
    # -inf under the policy, under the old policy, under both; the last token is sound: ratio 2, A = -1, loss 2.
    loss, gradient, metrics = loss_and_gradient(
        [-INF, -1.0, -INF, -1.0], [-1.0, -INF, -INF, -1.0 - LOG2], [1.0, -1.0, 1.0, -1.0], [True] * 4
    )
    assert loss == pytest.approx(2.0, rel=1e-6)
    assert gradient == [0.0, 0.0, 0.0, pytest.approx(2.0, rel=1e-6)]
    assert metrics == {
        "ratio_min": pytest.approx(2.0, rel=1e-6),
        "ratio_max": pytest.approx(2.0, rel=1e-6),
        "clipped_tokens": 0,
    }
    assert math.isnan(loss_and_gradient([NAN], [-1.0], [1.0], [True])[0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite(advantage):
    # exp(200) is inf in float32, and 0 x inf in the backward pass of min is NaN.
    loss, (gradient,), _ = loss_and_gradient([0.0], [-200.0], [advantage], [True])
    assert math.isfinite(loss)
    assert gradient == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # d = ln(0.5) - ln(0.25) = ln 2
        ("k1", LOG2, 1.0),
        ("k2", LOG2**2 / 2, LOG2),  # 0.240227
        ("k3", 0.5 - 1 + LOG2, 0.5),  # reference / policy = 1/2; gradient 1 - 1/2
    ],
)
def test_kl_by_hand(estimator, value, gradient):
    log_probs = torch.tensor([math.log(0.5), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.tensor([math.log(0.25), math.log(0.3)], dtype=torch.float64)
    estimate = kl(log_probs, ref_log_probs, estimator)
    estimate.sum().backward()
    assert estimate[0].item() == pytest.approx(value, rel=1e-12)
    assert log_probs.grad[0].item() == pytest.approx(gradient, rel=1e-12)
    # Where policy and reference agree every estimator is exactly 0; k2 and k3 are flat there.
    assert estimate[1] == 0.0
    assert log_probs.grad[1] == (1.0 if estimator == "k1" else 0.0)


def test_estimators_against_the_sums_over_a_whole_distribution():
    """Expectations over four tokens, exactly: who is unbiased in value, and whose gradient is which KL's."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.2, 0.4, 0.0], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    reverse = (log_p.exp() * (log_p - reference)).sum()  # KL(policy || reference)
    forward = (reference.exp() * (reference - log_p)).sum()  # KL(reference || policy)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = {name: (p * kl(log_p, reference, name)).sum() for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(expected["k1"], reverse)
    torch.testing.assert_close(expected["k3"], reverse)
    torch.testing.assert_close(gradient(expected["k1"]), torch.zeros_like(logits))
    torch.testing.assert_close(gradient(expected["k2"]), gradient(reverse))
    torch.testing.assert_close(gradient(expected["k3"]), gradient(forward))
    assert not torch.allclose(gradient(forward), gradient(reverse), rtol=1e-2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_never_makes_nan(estimator):
    log_probs = torch.tensor([-INF, -1.0, -INF, -200.0, 0.0, -1.0], requires_grad=True)
    ref_log_probs = torch.tensor([-1.0, -INF, -INF, 0.0, -200.0, -1.0])
    estimate = kl(log_probs, ref_log_probs, estimator)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert estimate[:3].tolist() == [0.0, 0.0, 0.0]
    assert log_probs.grad[:3].tolist() == [0.0, 0.0, 0.0]


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match='"k1", "k2" or "k3", got \'k4\''):
        kl(torch.zeros(1), torch.zeros(1), "k4")


def test_mismatch_by_hand():
    # Differences at the mask: 0.5, -0.25, 0; the third token is an observation.
    metrics = mismatch(
        torch.tensor([-1.0, -2.25, 7.0, -3.0]),
        torch.tensor([-1.5, -2.0, 0.0, -3.0]),
        torch.tensor([True, True, False, True]),
    )
    assert metrics["abs_sum"].item() == 0.75
    assert metrics["abs_max"].item() == 0.5
    # e^0.5 - 1.5 = 0.1487212707; e^-0.25 - 0.75 = 0.0288007831
    assert metrics["k3_sum"].item() == pytest.approx(0.1487212707 + 0.0288007831, rel=1e-9)


def test_mismatch_of_float32_noise_is_not_drowned():
    # d = 2^-22: k3 = d^2 / 2 + d^3 / 6 = 2.84e-14, a quarter of what float32 resolves around d.
    d = 2.0**-22
    metrics = mismatch(torch.tensor([-0.25 + d]), torch.tensor([-0.25]), torch.tensor([True]))
    assert metrics["k3_sum"].item() == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-9)


def test_mismatch_without_a_response_and_at_an_impossible_token():
    empty = mismatch(torch.tensor([NAN]), torch.tensor([0.0]), torch.tensor([False]))
    assert [value.item() for value in empty.values()] == [0.0, 0.0, 0.0]
    # The engine sampled what the trainer calls impossible: this must be seen.
    assert mismatch(torch.tensor([-INF]), torch.tensor([-1.0]), torch.tensor([True]))["abs_max"].item() == INF
