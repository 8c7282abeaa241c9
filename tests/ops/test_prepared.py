"""Products with matrices laid out once, against float64."""

import pytest
import torch

from poise.ops import prepared
from poise.ops.experts import routed_experts
from poise.ops.prepared import pays, prepared_matrix, prepared_stack

# By their own right on any CPU that oneDNN is there for; where they are taken is another question.
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
TOLERANCE = 1e-5  # of float32, against the largest number


def largest_difference(got, exact):
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("num_rows", [1, 3, 4, 17, 64, 128, 129, 300])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_the_plain_one(num_rows, has_bias):
    torch.manual_seed(num_rows)
    rows, plain, bias = torch.randn(num_rows, 384), torch.randn(384, 413), torch.randn(413)
    bias = bias if has_bias else None
    got = prepared_matrix(plain).product(rows, bias)
    exact = rows.double() @ plain.double() + (0 if bias is None else bias.double())
    assert largest_difference(got, exact) < TOLERANCE


def test_it_is_a_copy_where_it_is_used_and_the_matrix_itself_elsewhere():
    plain = torch.randn(512, 512)
    matrix, before = prepared_matrix(plain), plain.clone()
    plain.zero_()
    rows = torch.randn(8, 512)
    assert largest_difference(matrix.product(rows, None), rows.double() @ before.double()) < TOLERANCE
    assert matrix.product(rows[:1], None).abs().max() == 0  # too little work
    assert matrix.product(torch.randn(129, 512), None).abs().max() == 0  # too many rows


def stacks(seed):
    """Gate and up [E, D, 2F] with bias, down [E, F, D] with bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 256, 512), (4, 512), (4, 256, 256), (4, 256)
    return [torch.randn(shape, generator=generator) / 16 for shape in shapes]


def test_experts_are_the_plain_ones():
    """Of 40 tokens expert 0 has all, expert 1 most, expert 2 none and expert 3 two."""
    weights = stacks(0)
    gate_up, gate_up_bias, down, down_bias = weights
    x = torch.randn(40, 256)
    ids = torch.tensor([[0, 1]] * 38 + [[0, 3]] * 2)
    shares = torch.rand(40, 2)
    exact = routed_experts(x.double(), *(w.double() for w in weights), ids, shares.double(), kernel="reference")
    with torch.no_grad():
        got = routed_experts(x, prepared_stack(gate_up), gate_up_bias, prepared_stack(down), down_bias, ids, shares)
    assert largest_difference(got, exact) < TOLERANCE


def test_what_prepared_experts_cannot_do_is_refused():
    gate_up, gate_up_bias, down, down_bias = stacks(1)
    weights = prepared_stack(gate_up), gate_up_bias, prepared_stack(down), down_bias
    x, ids, shares = torch.randn(3, 256), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    for refused in (weights, (gate_up, *weights[1:]), (*weights[:2], down, down_bias)):
        with pytest.raises(ValueError, match="without gradients"):
            routed_experts(x, *refused, ids, shares)
    with torch.no_grad(), pytest.raises(ValueError, match="'grouped' takes no packed weights"):
        routed_experts(x, *weights, ids, shares, kernel="grouped")


def test_where_it_pays(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(prepared, "is_exact", lambda: True)
    assert pays(2**16, 8, torch.float32, cpu)
    assert not pays(2**16, 7, torch.float32, cpu)
    assert pays(2**17, 4, torch.float32, cpu)
    assert not pays(2**16 - 1, 128, torch.float32, cpu)
    assert not pays(2**16, 8, torch.bfloat16, cpu)
    assert not pays(2**16, 8, torch.float32, gpu)
    monkeypatch.setattr(prepared, "is_exact", lambda: False)
    assert not pays(2**16, 8, torch.float32, cpu)
