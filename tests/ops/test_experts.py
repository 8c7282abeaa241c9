"""Routed experts against numbers by hand, against Transformers' module, and by finite differences."""

import math

import pytest
import torch
from transformers import GptOssConfig as HfConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from poise.ops import experts_rows
from poise.ops.experts import routed_experts

KERNELS = ("reference", "loop")
NAMES = ("x", "gate_up", "gate_up_bias", "down", "down_bias", "expert_weights")


def operands(num_tokens=13, channels=6, width=5, experts=7, active=3, *, scale=2.0):
    """Every tensor a float64 leaf; the last expert is never hit. ``scale`` 2 reaches the clamps."""
    shapes = [
        (num_tokens, channels),
        (experts, channels, 2 * width),
        (experts, 2 * width),
        (experts, width, channels),
        (experts, channels),
    ]
    tensors = [(scale * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    weights = torch.rand(num_tokens, active, dtype=torch.float64).requires_grad_()
    ids = torch.stack([torch.randperm(experts - 1)[:active] for _ in range(num_tokens)])
    return tensors, ids, weights


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        # (up + 1) gate sigmoid(1.702 gate), with gate <= 7 and -7 <= up <= 7.
        (1.0, 0.0, 0.8457957659328212),
        (1.0, 2.0, 2.5373872977984636),
        (-1.0, -3.0, 2 * 0.15420423406717884),  # gate is not clamped below
        (100.0, 1.0, 14 / (1 + math.exp(-1.702 * 7))),
        (1.0, 100.0, 8 * 0.8457957659328212),
        (1.0, -100.0, -6 * 0.8457957659328212),
    ],
)
def test_activation_by_hand(kernel, gate, up, expected):
    # gate comes from the even column, up from the odd one; down multiplies by 3, its bias adds 1, the weight is 1/2.
    double = {"dtype": torch.float64}
    out = routed_experts(
        torch.ones(1, 1, **double),
        torch.tensor([[[gate, up]]], **double),
        torch.zeros(1, 2, **double),
        torch.tensor([[[3.0]]], **double),
        torch.tensor([[1.0]], **double),
        torch.tensor([[0]]),
        torch.tensor([[0.5]], **double),
        kernel=kernel,
    )
    assert out.item() == pytest.approx((3 * expected + 1) / 2, rel=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("num_tokens", "channels", "width", "experts", "active"),
    [(13, 6, 5, 7, 3), (13, 6, 6, 7, 3), (1, 4, 8, 3, 1), (129, 8, 3, 5, 4)],
)
@pytest.mark.parametrize("max_block", [experts_rows.MAX_BLOCK, 50])  # all rows at once, and a few at a time
def test_equals_transformers(kernel, num_tokens, channels, width, experts, active, max_block, monkeypatch):
    monkeypatch.setattr(experts_rows, "MAX_BLOCK", max_block)
    # Down projections are random, so a transposed square one (6 x 6) would show.
    tensors, ids, weights = operands(num_tokens, channels, width, experts, active)
    module = GptOssExperts(
        HfConfig(hidden_size=channels, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=active)
    ).double()
    for name, value in zip(
        ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"), tensors[1:], strict=True
    ):
        getattr(module, name).data.copy_(value)
    hf_x, hf_weights = (x.detach().clone().requires_grad_() for x in (tensors[0], weights))
    expected = module(hf_x, ids, hf_weights)
    actual = routed_experts(*tensors, ids, weights, kernel=kernel)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    grad_out = torch.randn_like(expected)
    expected.backward(grad_out)
    actual.backward(grad_out)
    stacks = (module.gate_up_proj, module.gate_up_proj_bias, module.down_proj, module.down_proj_bias)
    for name, own, other in zip(NAMES, (*tensors, weights), (hf_x, *stacks, hf_weights), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel):
    tensors, ids, weights = operands(4, 3, 2, 4, 2, scale=1.0)

    def experts(*inputs):
        return routed_experts(*inputs[:5], ids, inputs[5], kernel=kernel, alpha=1.3, limit=0.9)

    assert torch.autograd.gradcheck(experts, (*tensors, weights))


def test_experts_that_are_not_hit_get_zero_gradients():
    tensors, ids, weights = operands()
    routed_experts(*tensors, ids, weights).sum().backward()
    for tensor in tensors[1:]:
        assert (tensor.grad[-1] == 0).all()
        assert (tensor.grad[int(ids[0, 0])] != 0).any()


def test_same_bits_every_time_and_for_any_integer_type():
    tensors, ids, weights = operands(65, 16, 16, 5, 2)
    inputs = [x.detach().float().requires_grad_() for x in (*tensors, weights)]
    runs = []
    for kind in (torch.int64, torch.int64, torch.int32, torch.int16):
        out = routed_experts(*inputs[:5], ids.to(kind), inputs[5])
        runs.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_expert_twice_and_operands_with_strides(kernel):
    tensors, ids, weights = operands(3, 4, 2, 3, 2)
    ids = torch.tensor([[1, 1], [0, 1], [2, 2]])
    strided = [x.detach().transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]
    out = routed_experts(*strided, ids, weights, kernel=kernel)
    # Two halves of one expert are the whole: token 0 with weights (a, b) is token 0 with weight a + b once.
    once = routed_experts(*tensors, ids[:, :1], weights.sum(dim=1, keepdim=True), kernel=kernel)
    torch.testing.assert_close(out[0], once[0])
    torch.testing.assert_close(out[2], once[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens(kernel):
    tensors, ids, weights = operands()
    out = routed_experts(tensors[0][:0], *tensors[1:], ids[:0], weights[:0], kernel=kernel)
    assert out.shape == (0, 6)
    out.sum().backward()
    assert (tensors[1].grad == 0).all()


def test_rows_do_not_depend_on_the_batch():
    tensors, ids, weights = operands(8, 6, 5, 7, 3)
    whole = routed_experts(*tensors, ids, weights)
    for t in range(8):
        alone = routed_experts(tensors[0][t : t + 1], *tensors[1:], ids[t : t + 1], weights[t : t + 1])
        torch.testing.assert_close(alone[0], whole[t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": "triton"}, "kernel must be one of auto, loop, grouped, reference"),
        ({"expert_ids": torch.tensor([[7]])}, "must be 0..2, got 7"),
        ({"expert_ids": torch.tensor([[-1]])}, "must be 0..2, got -1"),
        ({"expert_ids": torch.tensor([[0, 1]])}, "do not fit"),
        ({"down": torch.zeros(3, 4, 2)}, "do not fit"),
        ({"gate_up": torch.zeros(3, 4, 5)}, "do not fit"),
        ({"down_bias": torch.zeros(3, 4, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_errors_name_the_argument(change, words, annotations_unchecked):
    good = {
        "x": torch.zeros(1, 4),
        "gate_up": torch.zeros(3, 4, 4),
        "gate_up_bias": torch.zeros(3, 4),
        "down": torch.zeros(3, 2, 4),
        "down_bias": torch.zeros(3, 4),
        "expert_ids": torch.tensor([[0]]),
        "expert_weights": torch.ones(1, 1),
    }
    with pytest.raises(ValueError, match=words):
        routed_experts(**{**good, **change})
