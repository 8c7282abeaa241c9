"""Losses against numbers worked out by hand, against finite differences, and at the edges of floating point."""

import math

import pytest
import torch

from poise.algo.correction import mismatch
from poise.algo.losses import aggregation_weights, kl, policy_loss

INF = math.inf
NAN = math.nan


def loss_and_gradient(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.3, **kwargs):
    log_probs = torch.tensor(log_probs, requires_grad=True)
    loss, metrics = policy_loss(
        log_probs,
        torch.tensor(old_log_probs),
        torch.tensor(advantages),
        torch.tensor(mask, dtype=torch.bool),
        clip_low=clip_low,
        clip_high=clip_high,
        **kwargs,
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
    # Ratios 1, 1/2, 1/2: twice 1/2 - 1 + ln 2.
    approx_kl = pytest.approx(2 * LOG2 - 1, rel=1e-5)
    assert metrics == {"ratio_min": pytest.approx(0.5), "ratio_max": 1.0, "clipped_tokens": 1, "approx_kl": approx_kl}


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
        assert metrics == {"ratio_min": INF, "ratio_max": -INF, "clipped_tokens": 0, "approx_kl": 0.0}


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
        "approx_kl": pytest.approx(1 - LOG2, rel=1e-5),  # 2 - 1 - ln 2
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


def test_the_gradient_of_each_estimator_for_three_tokens():
    """Policy (0.5, 0.3, 0.2), reference (0.2, 0.3, 0.5): d = (ln 2.5, 0, -ln 2.5).

    KL(policy || reference) = 0.3 ln 2.5 = 0.27489, and its gradient by the logits p (d - KL):
    0.5 x 0.64140, 0.3 x -0.27489, 0.2 x -1.19118.
    """
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true = [0.3207, -0.0825, -0.2382]

    def reverse_kl(logits):
        weights = [math.exp(logit) for logit in logits]
        p = [weight / sum(weights) for weight in weights]
        return sum(a * math.log(a / b) for a, b in zip(p, reference.tolist(), strict=True))

    # The literal numbers against central differences of the definition, which knows neither autograd nor estimators.
    differences = []
    for i in range(3):
        high, low = policy.log().tolist(), policy.log().tolist()
        high[i], low[i] = high[i] + 1e-5, low[i] - 1e-5
        differences.append((reverse_kl(high) - reverse_kl(low)) / 2e-5)
    assert differences == pytest.approx(true, abs=5e-5)

    def expected_gradient(estimator):
        """Sum over the tokens of their probability times the gradient of the loss at that token: sampling, exactly."""
        logits = policy.log().requires_grad_()
        per_token = kl(logits.log_softmax(0), reference.log(), estimator)
        (gradient,) = torch.autograd.grad((policy * per_token).sum(), logits)
        return gradient.tolist()

    assert expected_gradient("k1") == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)
    assert expected_gradient("k2") == pytest.approx(differences, abs=1e-9)
    # k3 has that of KL(reference || policy), p - q: other numbers, and none at all at the middle token.
    assert expected_gradient("k3") == pytest.approx([0.3, 0.0, -0.3], abs=1e-12)


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
    assert [value.item() for value in empty.values()] == [0.0] * 4
    # The engine sampled what the trainer calls impossible: this must be seen.
    assert mismatch(torch.tensor([-INF]), torch.tensor([-1.0]), torch.tensor([True]))["abs_max"].item() == INF


@pytest.mark.parametrize(
    ("loss", "log_ratio", "advantage", "value", "gradient", "is_clipped"),
    [
        # Bounds 0.8 and 1.3, dual clip 3; log_probs is -3 + log_ratio.
        ("dual_clip", math.log(5.0), -1.0, 3.0, 0.0, 1),  # ratio A = -5, but the loss stops at 3
        ("dual_clip", LOG2, -1.0, 2.0, 2.0, 0),  # below the limit: as clip
        ("dual_clip", math.log(5.0), 1.0, -1.3, 0.0, 1),  # A > 0: as clip
        ("dual_clip", -LOG2, -2.0, 1.6, 0.0, 1),  # 0.8 x 2
        ("cispo", LOG2, 1.0, 1.3 * (3 - LOG2), -1.3, 1),  # -1.3 log_probs: limited, and yet a gradient
        ("cispo", -LOG2, -1.0, -0.8 * (3 + LOG2), 0.8, 1),
        ("cispo", math.log(1.25), 2.0, 2.5 * (3 - math.log(1.25)), -2.5, 0),
        ("cispo", LOG2, 0.0, 0.0, 0.0, 0),
        ("reinforce", LOG2, 1.5, 1.5 * (3 - LOG2), -1.5, 0),  # no ratio in it
        ("reinforce", -LOG2, -2.0, -2.0 * (3 + LOG2), 2.0, 0),
    ],
)
def test_other_losses_row_by_row(loss, log_ratio, advantage, value, gradient, is_clipped):
    actual, (actual_gradient,), metrics = loss_and_gradient(
        [-3.0 + log_ratio], [-3.0], [advantage], [True], loss=loss, dual_clip=3.0
    )
    assert actual == pytest.approx(value, rel=1e-5)
    assert actual_gradient == pytest.approx(gradient, rel=1e-5)
    assert metrics["clipped_tokens"] == is_clipped
    assert metrics["ratio_max"] == pytest.approx(math.exp(log_ratio), rel=1e-5)


def test_gspo_by_hand():
    # Sequence 0: log-ratios ln 2 and 0: ratio sqrt 2 = 1.41421 > 1.3, A = -1: not bounded; loss and gradient 1.41421 a
    # token. Sequence 1: an observation (ignored), then ln 1.25 with A = 2: -2.5. Sequence 2: nothing. Sequence 3: ratio
    # e^0.4 = 1.49 with A = 1: bounded, -1.3 and no gradient.
    loss, gradient, metrics = loss_and_gradient(
        [-1.0 + LOG2, -1.0, 4.0, -1.0 + math.log(1.25), 3.0, -0.6],
        [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        [-1.0, -1.0, 9.0, 2.0, 9.0, 1.0],
        [True, True, False, True, False, True],
        loss="gspo",
        cu_seqlens=torch.tensor([0, 2, 4, 5, 6], dtype=torch.int32),
    )
    root = math.sqrt(2.0)
    assert loss == pytest.approx(2 * root - 2.5 - 1.3, rel=1e-5)
    assert gradient == pytest.approx([root, root, 0.0, -2.5, 0.0, 0.0], rel=1e-5)
    assert metrics["clipped_tokens"] == 1
    assert metrics["ratio_min"] == pytest.approx(1.25, rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.4), rel=1e-5)
    with pytest.raises(ValueError, match='"gspo" needs cu_seqlens'):
        loss_and_gradient([-1.0], [-1.0], [1.0], [True], loss="gspo")


def test_gspo_with_sequence_means_is_the_formula_of_the_paper():
    """mean_i min(s_i A_i, clip(s_i) A_i) with s_i = exp(mean_t log-ratio): equation 5, sequence by sequence."""
    generator = torch.Generator().manual_seed(3)
    old = -2 * torch.rand(12, generator=generator)
    log_probs = (old + 0.4 * torch.randn(12, generator=generator)).requires_grad_()
    borders, sequence_advantages = [0, 5, 9, 12], [1.0, -2.0, 0.5]
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    expected = 0.0
    for start, end, advantage in zip(borders[:-1], borders[1:], sequence_advantages, strict=True):
        chosen = mask[start:end]
        ratio = (log_probs[start:end] - old[start:end])[chosen].mean().exp()
        expected = expected - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 3
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)

    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    weights, normalizer = aggregation_weights(mask, cu_seqlens, "sequence", max_tokens=100)
    advantages = torch.tensor(sequence_advantages).repeat_interleave(torch.tensor([5, 4, 3]))
    loss, _ = policy_loss(
        log_probs,
        old,
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.2,
        loss="gspo",
        cu_seqlens=cu_seqlens,
        weights=weights,
    )
    torch.testing.assert_close(loss / normalizer, expected)
    (gradient,) = torch.autograd.grad(loss / normalizer, log_probs)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", ["clip", "dual_clip", "gspo", "cispo", "reinforce"])
def test_every_loss_starts_on_policy_with_minus_the_advantage(loss):
    generator = torch.Generator().manual_seed(0)
    log_probs = (-5 * torch.rand(50, generator=generator)).requires_grad_()
    advantages = torch.randn(50, generator=generator)
    mask = torch.rand(50, generator=generator) < 0.6
    value, metrics = policy_loss(
        log_probs,
        log_probs.detach(),
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.2,
        loss=loss,
        cu_seqlens=torch.tensor([0, 20, 50], dtype=torch.int32),
    )
    (value / 64).backward()
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clipped_tokens"] == 0
    assert torch.equal(log_probs.grad, torch.where(mask, -advantages / 64, 0.0))


@pytest.mark.parametrize("loss", ["dual_clip", "gspo", "cispo", "reinforce"])
def test_no_loss_lets_through_what_is_masked_or_impossible(loss):
    # The last sequence is one impossible token; observations hold whatever they like.
    mask, cu_seqlens = [True, False, False, True, False, True], torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    clean = loss_and_gradient(
        [-1.0, 0.0, 0.0, -2.0, 0.0, -INF],
        [-1.1, 0.0, 0.0, -2.5, 0.0, -1.0],
        [1.0, 0.0, 0.0, -1.0, 0.0, 1.0],
        mask,
        loss=loss,
        cu_seqlens=cu_seqlens,
    )
    dirty = loss_and_gradient(
        [-1.0, -INF, NAN, -2.0, INF, -INF],
        [-1.1, NAN, -INF, -2.5, INF, -1.0],
        [1.0, NAN, INF, -1.0, -INF, 1.0],
        mask,
        loss=loss,
        cu_seqlens=cu_seqlens,
    )
    assert clean == dirty
    assert all(math.isfinite(g) for g in clean[1])
    assert clean[1][0] < 0 < clean[1][3]
    assert clean[1][1] == clean[1][2] == clean[1][4] == clean[1][5] == 0.0


def test_aggregation_by_hand():
    # Sequences of 2 response tokens and an observation, of 1 and an observation, and of two observations.
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    for aggregation, weights, normalizer in (
        ("token", [1, 1, 0, 1, 0, 0, 0], 3),
        ("sequence", [0.5, 0.5, 0, 1, 0, 0, 0], 2),
        ("constant", [0.25, 0.25, 0, 0.25, 0, 0, 0], 2),
    ):
        actual, actual_normalizer = aggregation_weights(mask, cu_seqlens, aggregation, max_tokens=4)
        assert actual.tolist() == weights
        assert actual_normalizer == normalizer
    with pytest.raises(ValueError, match='"token", "sequence" or "constant", got \'mean\''):
        aggregation_weights(mask, cu_seqlens, "mean", max_tokens=4)


def test_weights_scale_tokens_and_unknown_losses_are_refused():
    loss, gradient, _ = loss_and_gradient(
        [-1.0, -1.0], [-1.0, -1.0], [1.0, -3.0], [True, True], weights=torch.tensor([0.5, 2.0])
    )
    assert loss == 5.5  # -0.5 x 1 + 2 x 3
    assert gradient == [-0.5, 6.0]
    with pytest.raises(ValueError, match="got 'ppo'"):
        loss_and_gradient([-1.0], [-1.0], [1.0], [True], loss="ppo")
