"""The critic's loss and its measure, by hand and against finite differences."""

import math

import pytest
import torch

from poise.algo.advantages import explained_variance
from poise.algo.losses import value_loss


def loss_and_gradient(values, old_values, returns, mask, clip, **kwargs):
    values = torch.tensor(values, requires_grad=True)
    loss, metrics = value_loss(
        values,
        torch.tensor(old_values),
        torch.tensor(returns),
        torch.tensor(mask, dtype=torch.bool),
        clip=clip,
        **kwargs,
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.item(), gradient.tolist(), metrics["clipped_values"].item()


@pytest.mark.parametrize(
    ("value", "old", "ret", "clip", "loss", "gradient", "is_clipped"),
    [
        (0.5, 0.5, 1.0, 0.2, 0.125, -0.5, 0),  # not moved: (1/2)^2 / 2, gradient V - R
        (0.6, 0.5, 1.0, 0.2, 0.08, -0.4, 0),  # moved within the bound
        (0.75, 0.5, 1.0, 0.25, 0.03125, -0.25, 0),  # at the bound itself
        (0.9, 0.5, 1.0, 0.2, 0.045, 0.0, 1),  # past it towards R: (0.7 - 1)^2 / 2, and no gradient
        (0.1, 0.5, 1.0, 0.2, 0.405, -0.9, 0),  # past it away from R: (0.1 - 1)^2 / 2 is larger, the gradient stays
        (1.4, 0.5, 1.0, 0.2, 0.08, 0.4, 0),  # over R and further from it than the bound: (0.4)^2 / 2 > (0.3)^2 / 2
        (1.2, 0.5, 1.0, 0.2, 0.045, 0.0, 1),  # over R but nearer than the bound
        (0.9, 0.5, 1.0, 0.0, 0.005, -0.1, 0),  # no bound: (0.1)^2 / 2
    ],
)
def test_value_loss_row_by_row(value, old, ret, clip, loss, gradient, is_clipped):
    actual_loss, (actual_gradient,), clipped = loss_and_gradient([value], [old], [ret], [True], clip)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    assert actual_gradient == pytest.approx(gradient, rel=1e-5, abs=1e-7)
    assert clipped == is_clipped


def test_value_loss_is_a_weighted_sum_and_sees_the_mask_only():
    # Tokens 0 and 3: 1/2 x 2^2 x 0.5 = 1 and 1/2 x 3^2 x 1 = 4.5. What stands elsewhere is not even a number.
    loss, gradient, clipped, *_ = loss_and_gradient(
        [2.0, math.nan, math.inf, -3.0],
        [2.0, math.inf, 0.0, -3.0],
        [0.0, math.nan, -math.inf, 0.0],
        [True, False, False, True],
        0.2,
        weights=torch.tensor([0.5, 7.0, 7.0, 1.0]),
    )
    assert loss == 5.5
    assert gradient == [1.0, 0.0, 0.0, -3.0]
    assert clipped == 0
    assert loss_and_gradient([1.0], [0.0], [5.0], [False], 0.2) == (0.0, [0.0], 0)
    with pytest.raises(ValueError, match="clip must be at least 0, got -1"):
        loss_and_gradient([1.0], [0.0], [5.0], [True], -1)


def test_value_loss_against_finite_differences():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    mask = torch.arange(40) % 4 > 0
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, clip=0.5)[0], (values.requires_grad_(),)
    )


def test_explained_variance_by_hand():
    # Returns 0, 1, 2, 3: mean 1.5, variance 1.25.
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 7, returns) == 1.0  # a constant is no variance
    assert explained_variance(torch.full((4,), 9.0), returns) == 0.0
    # Errors 0, 1, 0, 1: variance 1/4.
    assert explained_variance(torch.tensor([0.0, 0.0, 2.0, 2.0]), returns) == pytest.approx(0.8)
    # Values the wrong way round: errors -3, -1, 1, 3, variance 5.
    assert explained_variance(returns.flip(0), returns) == pytest.approx(1 - 5 / 1.25)
    # Three times 0.1 has no variance, whatever rounding says of its mean.
    assert math.isnan(explained_variance(torch.randn(3), torch.full((3,), 0.1)))
