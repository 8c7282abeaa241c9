"""Log-probabilities and entropy against numbers by hand, torch.distributions and finite differences."""

import math

import pytest
import torch

from poise.ops import log_probs as module
from poise.ops.log_probs import reference_log_probs, token_log_probs

FUNCTIONS = (token_log_probs, reference_log_probs)


def operands(num_tokens=11, channels=6, vocabulary=9, dtype=torch.float64):
    hidden = torch.randn(num_tokens, channels, dtype=dtype, requires_grad=True)
    lm_head = torch.randn(vocabulary, channels, dtype=dtype, requires_grad=True)
    return hidden, lm_head, torch.randint(0, vocabulary, (num_tokens,))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_tokens_by_hand(function):
    # Logits (ln 3, 0): p = (3/4, 1/4), H = 3/4 ln 4/3 + 1/4 ln 4. At temperature 1/2: (ln 9, 0), p = (9/10, 1/10).
    hidden, lm_head = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    log_probs, entropy = function(hidden, lm_head, torch.tensor([0, 1]))
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.75), math.log(0.25)]))
    torch.testing.assert_close(entropy, torch.tensor([0.5623351446] * 2))
    log_probs, entropy = function(hidden, lm_head, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.9), math.log(0.1)]))
    torch.testing.assert_close(entropy, torch.tensor([0.3250829734] * 2))


@pytest.fixture(params=[(1, 1), (30, 4), (8, 8), (2**23, 1024)], ids=["one", "4 x 7", "8 x 1", "whole"])
def chunked(request, monkeypatch):
    """Tiles of so many logits and rows, of 11 x 9."""
    monkeypatch.setattr(module, "MAX_LOGITS", request.param[0])
    monkeypatch.setattr(module, "TILE_ROWS", request.param[1])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_equals_torch_distributions(chunked, temperature):
    hidden, lm_head, target_ids = operands()
    grads = torch.randn(2, 11, dtype=torch.float64)
    actual = token_log_probs(hidden, lm_head, target_ids, temperature=temperature)
    actual_grads = torch.autograd.grad(actual, (hidden, lm_head), grads.unbind())
    categorical = torch.distributions.Categorical(logits=hidden @ lm_head.t() / temperature)
    expected = categorical.log_prob(target_ids), categorical.entropy()
    expected_grads = torch.autograd.grad(expected, (hidden, lm_head), grads.unbind())
    for a, e in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck_of_both_outputs(function, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 15)
    hidden, lm_head, target_ids = operands(5, 3, 4)
    assert torch.autograd.gradcheck(lambda h, w: function(h, w, target_ids, temperature=0.7), (hidden, lm_head))


@pytest.mark.parametrize("index", [0, 1])
def test_one_output_alone(index):
    hidden, lm_head, target_ids = operands()
    actual = torch.autograd.grad(token_log_probs(hidden, lm_head, target_ids)[index].sum(), (hidden, lm_head))
    expected = torch.autograd.grad(reference_log_probs(hidden, lm_head, target_ids)[index].sum(), (hidden, lm_head))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


def test_huge_logits_stay_finite():
    # exp(2000) overflows float32; the answer does not: p = (1, 0), log p = (0, -2000), H = 0.
    hidden = torch.ones(2, 1, requires_grad=True)
    lm_head = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, lm_head, torch.tensor([0, 1]))
    assert log_probs.tolist() == [0.0, -2000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (log_probs.sum() + entropy.sum()).backward()
    assert lm_head.grad.tolist() == [[-1.0], [1.0]]  # only the second row pushes: its target has p = 0


def test_half_types_accumulate_in_float32(chunked):
    hidden, lm_head, target_ids = operands(7, 64, 50, torch.bfloat16)
    log_probs, entropy = token_log_probs(hidden, lm_head, target_ids)
    assert log_probs.dtype == entropy.dtype == torch.float32
    wide = token_log_probs(hidden.double(), lm_head.double(), target_ids)
    torch.testing.assert_close(log_probs.double(), wide[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wide[1], rtol=1e-5, atol=1e-5)
    assert [g.dtype for g in torch.autograd.grad(log_probs.sum(), (hidden, lm_head))] == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_tile(dtype, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 2000)
    monkeypatch.setattr(module, "TILE_ROWS", 20)
    hidden, lm_head, target_ids = operands(1000, 2, 5000, dtype)
    lm_head = torch.randn(5000, 8, dtype=dtype, requires_grad=True)
    hidden = torch.randn(1000, 8, dtype=dtype, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        log_probs, entropy = token_log_probs(hidden, lm_head, target_ids)
        torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, lm_head))
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    result = dtype.itemsize * (hidden.numel() + lm_head.numel())
    sums = 4 * hidden.numel() if dtype == torch.bfloat16 else 0
    # A few vectors [T] and tiles; never a float32 copy of a bfloat16 head (4 x 40000), never [T, V] (4 x 5000000).
    assert peak <= result + sums + 10 * 4 * 1000 + 5 * 4 * 2000


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient_and_the_other_the_same(frozen, chunked):
    hidden, lm_head, target_ids = operands()
    both = torch.autograd.grad(sum(token_log_probs(hidden, lm_head, target_ids)).sum(), (hidden, lm_head))
    leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((hidden, lm_head))]
    sum(token_log_probs(*leaves, target_ids)).sum().backward()
    assert leaves[frozen].grad is None
    assert torch.equal(leaves[1 - frozen].grad, both[1 - frozen])


def test_no_tokens():
    hidden, lm_head, target_ids = operands(0)
    log_probs, entropy = token_log_probs(hidden, lm_head, target_ids)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert (lm_head.grad == 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"target_ids": torch.tensor([0, 9])}, "0..8, got 9"),
        ({"target_ids": torch.tensor([-100, 1])}, "0..8, got -100"),
        ({"target_ids": torch.tensor([0])}, r"target_ids must be \[2\]"),
        ({"lm_head": torch.zeros(9, 5)}, "hidden must be"),
        ({"lm_head": torch.zeros(9, 4, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_errors_name_the_argument(change, words, annotations_unchecked):
    good = {"hidden": torch.zeros(2, 4), "lm_head": torch.zeros(9, 4), "target_ids": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=words):
        token_log_probs(**{**good, **change})
