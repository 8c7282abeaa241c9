"""Every way to compute routed experts beside the equation in float64 and Transformers' implementations; memory."""

import pytest
import torch
from transformers import GptOssConfig as HfConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from poise.ops import experts as experts_module
from poise.ops import experts_rows
from poise.ops.experts import routed_experts
from poise.ops.mxfp4 import Mxfp4Stack, unpack

NAMES = ("x", "gate_up", "gate_up_bias", "down", "down_bias", "expert_weights")
D, F = 16, 24


def operands(num_tokens, experts, active, routing="spread", dtype=torch.float64):
    """[x, gate_up, gate_up_bias, down, down_bias, expert_weights], ids. Scales that reach the clamps at +-7."""
    shapes = [(num_tokens, D), (experts, D, 2 * F), (experts, 2 * F), (experts, F, D), (experts, D)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    logits = torch.randn(num_tokens, experts, dtype=torch.float64)
    if routing == "one expert gets all":
        logits[:, 3] += 100
    elif routing == "one expert gets one":
        logits[:, 3] -= 100
        logits[0, 3] += 200
    elif routing == "one expert gets none":
        logits[:, 3] -= 100
    top, ids = logits.topk(active, dim=-1)
    numbers = {"one expert gets all": num_tokens, "one expert gets one": 1, "one expert gets none": 0}
    if routing in numbers:
        assert (ids == 3).sum() == numbers[routing]
    return [t.to(dtype) for t in (*tensors, top.softmax(dim=-1))], ids


def outcome(run, tensors):
    """Result and the gradient of each operand, from one fixed gradient of the result."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(*leaves)
    generator = torch.Generator().manual_seed(1)
    # Numbers that every type holds.
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator).bfloat16().to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def poise(ids, **options):
    return lambda *t: routed_experts(*t[:5], ids, t[5], **options)


def transformers(ids, implementation):
    def run(x, gate_up, gate_up_bias, down, down_bias, weights):
        experts, active = len(gate_up), ids.shape[1]
        config = HfConfig(
            hidden_size=D, intermediate_size=F, num_local_experts=experts, num_experts_per_tok=active,
        )  # fmt: skip
        config._experts_implementation = implementation
        module = GptOssExperts(config).to(x.dtype)
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        stacks = dict(zip(names, (gate_up, gate_up_bias, down, down_bias), strict=True))
        return torch.func.functional_call(module, stacks, (x, ids, weights))

    return run


def assert_same(actual, expected, tolerance):
    for name, a, e in zip(("result", *NAMES), actual, expected, strict=True):
        largest = e.abs().max().item()
        torch.testing.assert_close(
            a.double(), e.double(), rtol=0, atol=tolerance * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


ROUTINGS = ("spread", "one expert gets all", "one expert gets one", "one expert gets none")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("experts", "active"), [(32, 4), (128, 4), (8, 2)])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_equals_each_implementation_of_transformers(implementation, experts, active, routing):
    tensors, ids = operands(33, experts, active, routing)
    actual = outcome(poise(ids), tensors)
    if implementation == "grouped_mm":  # has no float64
        expected = outcome(transformers(ids, implementation), [t.float() for t in tensors])
        assert_same(actual, expected, 1e-5)
        assert_same(outcome(poise(ids), [t.float() for t in tensors]), expected, 1e-5)
    else:
        assert_same(actual, outcome(transformers(ids, implementation), tensors), 1e-12)


@pytest.fixture(params=["whole", "cut"])
def spans(request, monkeypatch):
    """ "cut": spans of 7 rows, some of their gate and up kept and some computed again, blocks of a few rows."""
    if request.param == "cut":
        monkeypatch.setattr(experts_rows, "MIN_SPAN", 7)
        monkeypatch.setattr(experts_rows, "MAX_SPAN_ELEMENTS", 1)
        monkeypatch.setattr(experts_module, "MAX_KEPT", 40 * 2 * F)
        monkeypatch.setattr(experts_rows, "MAX_BLOCK", 3 * 2 * F)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("experts", "active"), [(32, 4), (128, 4), (8, 2)])
@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({"kernel": "loop"}, torch.float64, 1e-13),
        ({"kernel": "loop", "max_tokens_per_chunk": 3}, torch.float64, 1e-13),
        ({"kernel": "loop"}, torch.float32, 1e-5),
        ({"kernel": "grouped"}, torch.float32, 1e-5),
        ({"kernel": "grouped", "max_tokens_per_chunk": 3}, torch.float32, 1e-5),
    ],
)
def test_equals_the_equation(options, dtype, tolerance, experts, active, routing, spans):
    tensors, ids = operands(33, experts, active, routing)
    expected = outcome(poise(ids, kernel="reference"), tensors)
    assert_same(outcome(poise(ids, **options), [t.to(dtype) for t in tensors]), expected, tolerance)


@pytest.mark.parametrize(
    "options", [{"kernel": "loop"}, {"kernel": "grouped"}, {"kernel": "loop", "max_tokens_per_chunk": 3}]
)
def test_half_types(options, spans):
    tensors, ids = operands(33, 8, 2, dtype=torch.bfloat16)
    if options["kernel"] == "grouped":
        tensors[0] *= 0.125  # gate and up, rounded between the products, must not cross a clamp by that
    expected = outcome(poise(ids, kernel="reference"), [t.double() for t in tensors])
    actual = outcome(poise(ids, **options), tensors)
    assert all(a.dtype == torch.bfloat16 for a in actual)
    # The loop rounds each result once, half a unit in 8 bits; grouped products round what lies between too.
    assert_same(actual, expected, 2**-8 if options["kernel"] == "loop" else 2**-5)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_chunk": 2}])
def test_packed_weights_are_the_unpacked_ones(options, spans):
    (x, gate_up, gate_up_bias, *_), ids = operands(33, 8, 2, "one expert gets none")
    gate_up = torch.randn(8, 32, 2 * 64, dtype=torch.float64)
    x, gate_up_bias = torch.randn(33, 32, dtype=torch.float64), torch.randn(8, 128, dtype=torch.float64)
    down, down_bias = torch.randn(8, 64, 32, dtype=torch.float64), torch.randn(8, 32, dtype=torch.float64)
    weights = torch.rand(33, 2, dtype=torch.float64)
    packed = Mxfp4Stack.of(gate_up), Mxfp4Stack.of(down)
    assert (packed[0].shape, packed[1].shape) == (gate_up.shape, down.shape)
    # The checkpoint's orientation: output channels before packed input channels.
    plain = [unpack(p.blocks, p.scales, torch.float64).transpose(1, 2) for p in packed]
    assert not torch.equal(plain[1], down)
    moving = [x, gate_up_bias, down_bias, weights]
    actual = outcome(lambda x, g, d, w: routed_experts(x, packed[0], g, packed[1], d, ids, w, **options), moving)
    expected = outcome(
        lambda x, g, d, w: routed_experts(x, plain[0], g, plain[1], d, ids, w, kernel="reference"), moving
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)


def test_frozen_operands_get_no_gradient_and_the_others_the_same():
    tensors, ids = operands(33, 8, 2)
    whole = outcome(poise(ids), tensors)
    grad = torch.randn(33, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    for i, name in enumerate(NAMES):
        leaves = [t.clone().requires_grad_(j == i) for j, t in enumerate(tensors)]
        poise(ids)(*leaves).backward(grad)
        assert [leaf.grad is not None for leaf in leaves] == [j == i for j in range(6)]
        assert torch.equal(leaves[i].grad, whole[1 + i]), name


@pytest.mark.parametrize("options", [{"kernel": "loop"}, {"kernel": "grouped"}, {"max_tokens_per_chunk": 3}])
def test_same_bits_every_time_and_without_gradients(options):
    tensors, ids = operands(65, 8, 2, dtype=torch.float32)
    first, second = (outcome(poise(ids, **options), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(poise(ids, **options)(*tensors), first[0])


def test_backward_twice():
    # What is kept for the backward pass must not be used up by it.
    tensors, ids = operands(33, 8, 2)
    leaves = [t.requires_grad_() for t in tensors]
    out = poise(ids)(*leaves)
    once = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


# --- memory ---


def peak_numel(run):
    """float32 numbers that the allocator held at most at once, beyond those held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    del result
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 4


def extra_numel(
    num_tokens, experts=8, active=4, channels=32, width=32, routing="spread", with_gradients=True, **options
):
    """What a pass holds beyond operands, result and gradients."""
    x = torch.randn(num_tokens, channels, requires_grad=with_gradients)
    shapes = [(experts, channels, 2 * width), (experts, 2 * width), (experts, width, channels), (experts, channels)]
    stacks = [torch.randn(shape, requires_grad=with_gradients) for shape in shapes]
    logits = torch.randn(num_tokens, experts)
    if routing != "spread":
        logits[:, 0] += 100
    top, ids = logits.topk(active, dim=-1)
    weights = top.softmax(-1).requires_grad_(with_gradients)
    grad = torch.randn(num_tokens, channels)

    def run():
        out = routed_experts(x, *stacks, ids, weights, **options)
        return torch.autograd.grad(out, (x, weights, *stacks), grad) if with_gradients else out

    run()
    known = x.numel() + (sum(t.numel() for t in (x, weights, *stacks)) if with_gradients else 0)
    return peak_numel(run) - known


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_peak_memory(kernel, with_gradients, monkeypatch):
    monkeypatch.setattr(experts_rows, "MAX_BLOCK", 2**12)
    tokens, active, channels, width = 4096, 4, 32, 32
    extra = extra_numel(tokens, kernel=kernel, with_gradients=with_gradients)
    assert extra <= 1.5 * tokens * active * (channels + 2 * width)


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("routing", ["spread", "one expert gets all"])
def test_peak_memory_of_a_chunk_is_bounded(kernel, routing, monkeypatch):
    monkeypatch.setattr(experts_rows, "MAX_BLOCK", 2**12)
    chunk, active, channels, width = 64, 4, 32, 32
    of_rows = 1.5 * chunk * active * (channels + 2 * width)
    for tokens in (1024, 4096):
        # Order, token and weight of each row (int64 counts twice): the recipe of the rows.
        recipe = 12 * tokens * active
        stack = 8 * channels * 2 * width if kernel == "grouped" else 0  # a chunk's part of the weights' gradient
        blocks = 16 * 2**10
        extra = extra_numel(tokens, routing=routing, kernel=kernel, max_tokens_per_chunk=chunk)
        assert extra <= of_rows + recipe + stack + blocks, tokens


def test_packed_weights_are_unpacked_one_expert_at_a_time():
    experts, channels, width = 64, 64, 64
    packed = [Mxfp4Stack.of(torch.randn(s)) for s in ((experts, channels, 2 * width), (experts, width, channels))]
    x = torch.randn(32, channels, requires_grad=True)
    biases = torch.randn(experts, 2 * width), torch.randn(experts, channels)
    ids, weights = torch.rand(32, experts).topk(4).indices, torch.rand(32, 4)

    def run():
        out = routed_experts(x, packed[0], biases[0], packed[1], biases[1], ids, weights)
        return torch.autograd.grad(out.sum(), x)

    one = channels * 2 * width
    # The rows, one matrix and the temporaries of unpacking it; all of them would be 96 such matrices.
    assert peak_numel(run) <= 16 * one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens_per_chunk": 0}, "max_tokens_per_chunk must be positive or None, got 0"),
        (
            {"kernel": "grouped"},
            "kernel 'grouped' cannot run here: it takes float32, float16 and bfloat16, got float64",
        ),
    ],
)
def test_options_that_do_not_fit(options, words):
    tensors, ids = operands(3, 8, 2)
    with pytest.raises(ValueError, match=words):
        poise(ids, **options)(*tensors)


@pytest.mark.parametrize("kernel", ["grouped", "reference"])
def test_packed_weights_take_the_loop_alone(kernel):
    stack = Mxfp4Stack.of(torch.zeros(2, 32, 64)), Mxfp4Stack.of(torch.zeros(2, 32, 32))
    with pytest.raises(ValueError, match="takes no packed weights"):
        routed_experts(
            torch.zeros(1, 32), stack[0], torch.zeros(2, 64), stack[1], torch.zeros(2, 32), torch.zeros(1, 1).long(),
            torch.ones(1, 1), kernel=kernel,
        )  # fmt: skip
