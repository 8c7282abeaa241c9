"""Attention with sinks against numbers by hand, against Transformers, and by finite differences."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from largest import LargestTensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from poise.ops.attention import remembered_bounds, sink_attention

KERNELS = ("reference", "cpu")
WINDOWS = (None, 1, 16, 127, 128)
LENGTHS = (1, 63, 128, 129, 300)


def borders(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(num_tokens, heads, kv_heads, channels, *, sink=0.0, dtype=torch.float64):
    q = torch.randn(num_tokens, heads, channels, dtype=dtype)
    k, v = torch.randn(2, num_tokens, kv_heads, channels, dtype=dtype).unbind()
    sinks = sink + torch.randn(heads, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, sinks)]


def with_grads(inputs, grad_out, **kwargs):
    out = sink_attention(*inputs, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def transformers_attention(q, k, v, sinks, window):
    """Transformers' eager attention of one sequence [T, H, C]."""
    num_tokens, heads, channels = q.shape
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
    is_seen = (distance >= 0) & (distance < (window or num_tokens))
    mask = torch.zeros(num_tokens, num_tokens, dtype=q.dtype).masked_fill(~is_seen, -torch.inf)
    module = SimpleNamespace(num_key_value_groups=heads // k.shape[1], sinks=sinks, training=False)
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return eager_attention_forward(module, *batched, mask[None, None], scaling=channels**-0.5)[0][0]


def assert_close(actual, expected, tolerance):
    for name, a, e in zip(("out", "q", "k", "v", "sinks"), actual, expected, strict=True):
        # Where a gradient all but cancels, its rounding is that of the operands, not of the result.
        scale = max(e.abs().max().item(), 1e-3)
        error = (a - e).abs().max().item() / scale
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_key_by_hand(kernel):
    # s = q k = 1, sink = 0: P = e / (e + 1) = 0.73105858, O = 2 P; dS = P (dO v - dO O) = 0.73105858 (2 - 1.46211716),
    # d sink = -(1 - P) dO O = -0.26894142 * 1.46211716.
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (ones.clone(), ones.clone(), 2 * ones, torch.zeros(1, dtype=torch.float64))]
    out, grad_q, grad_k, grad_v, grad_sink = with_grads(inputs, ones, cu_seqlens=borders([1]), scale=1.0, kernel=kernel)
    assert out.item() == pytest.approx(1.46211716, abs=1e-8)
    assert grad_q.item() == pytest.approx(0.39322387, abs=1e-8)  # dS * k
    assert grad_k.item() == pytest.approx(0.39322387, abs=1e-8)  # dS * q
    assert grad_v.item() == pytest.approx(0.73105858, abs=1e-8)  # P
    assert grad_sink.item() == pytest.approx(-0.39322387, abs=1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("lengths", "window", "expected"),
    [
        # All scores 0 and sink ln 2, so a row with n keys divides their sum by n + 2; v = 4, 8, 12.
        ([3], None, [4 / 3, 12 / 4, 24 / 5]),
        ([3], 2, [4 / 3, 12 / 4, 20 / 4]),
        ([3], 1, [4 / 3, 8 / 3, 12 / 3]),
        ([1, 2], None, [4 / 3, 8 / 3, 20 / 4]),
        ([2, 1], 2, [4 / 3, 12 / 4, 12 / 3]),
        ([0, 2, 0, 1, 0], 2, [4 / 3, 12 / 4, 12 / 3]),
    ],
)
def test_window_and_borders_by_hand(kernel, lengths, window, expected):
    q = k = torch.zeros(3, 1, 2)
    v = torch.tensor([4.0, 8.0, 12.0]).view(3, 1, 1).expand(3, 1, 2)
    sinks = torch.tensor([math.log(2)])
    out = sink_attention(q, k, v, sinks, cu_seqlens=borders(lengths), window=window, kernel=kernel)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor(expected))
    torch.testing.assert_close(out[:, 0, 1], torch.tensor(expected))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sink", [-20.0, 0.0, 5.0, 100.0])  # 5: above the maximum of most rows
def test_packed_equals_transformers_one_by_one(kernel, window, sink):
    inputs = operands(sum(LENGTHS), 8, 1, 16, sink=sink)
    grad_out = torch.randn_like(inputs[0])
    actual = with_grads(inputs, grad_out, cu_seqlens=borders(LENGTHS), window=window, kernel=kernel)
    q, k, v, sinks = inputs
    pieces = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    out = torch.cat([transformers_attention(*piece, sinks, window) for piece in pieces])
    expected = [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]
    assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("lengths", [[1], [63], [129], [40] * 7, [200, 180, 170, 30, 1]])
@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(4, 4, 8), (4, 2, 32), (3, 1, 5)])
@pytest.mark.parametrize("window", [None, 16, 50])
def test_cpu_kernel_equals_reference_in_float32(lengths, heads, kv_heads, channels, window):
    inputs = operands(sum(lengths), heads, kv_heads, channels, sink=1.0, dtype=torch.float32)
    grad_out = torch.randn_like(inputs[0])
    common = {"cu_seqlens": borders(lengths), "window": window, "scale": 0.3}
    actual = with_grads(inputs, grad_out, kernel="cpu", **common)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_grads(wide, grad_out.double(), kernel="reference", **common)
    assert_close([x.double() for x in actual], expected, 1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sink", [-20.0, 0.0, 5.0, 100.0])
def test_gradcheck(kernel, window, sink):
    def attention(q, k, v, sinks):
        return sink_attention(q, k, v, sinks, cu_seqlens=borders(LENGTHS), window=window, kernel=kernel)

    assert torch.autograd.gradcheck(attention, operands(sum(LENGTHS), 8, 1, 2, sink=sink), atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck_of_every_element(kernel, window):
    def attention(q, k, v, sinks):
        return sink_attention(q, k, v, sinks, cu_seqlens=borders([1, 4, 2]), window=window, kernel=kernel)

    assert torch.autograd.gradcheck(attention, operands(7, 2, 1, 2, sink=1.0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("sink", [-3.0, 5.0])
def test_sink_gradient_is_the_central_difference(kernel, window, sink):
    q, k, v, sinks = operands(sum(LENGTHS), 4, 1, 8, sink=sink)
    weight, common = torch.randn_like(q), {"cu_seqlens": borders(LENGTHS), "window": window, "kernel": kernel}

    def loss(sinks):
        return (sink_attention(q, k, v, sinks, **common) * weight).sum()

    actual = torch.autograd.grad(loss(sinks), sinks)[0]
    with torch.no_grad():
        steps = 1e-5 * torch.eye(4, dtype=torch.float64)
        expected = torch.stack([(loss(sinks + step) - loss(sinks - step)) / 2e-5 for step in steps])
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_distance_127_matters_and_128_does_not(kernel):
    # Window 128 is the token itself and the 127 before. Token 40 changes: 40 to 167 notice, 168 and later do not.
    q, k, v, sinks = (x.detach() for x in operands(300, 2, 1, 4))
    common = {"cu_seqlens": borders([300]), "window": 128, "kernel": kernel}
    before = sink_attention(q, k, v, sinks, **common)
    for changed in (k, v):
        changed[40] += 1
        change = (sink_attention(q, k, v, sinks, **common) - before).abs().amax(dim=(1, 2))
        changed[40] -= 1
        assert (change[40:168] > 0).all()
        assert (change[:40] == 0).all()
        assert (change[168:] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 16])
def test_a_packed_neighbour_changes_nothing(kernel, window):
    lengths = (40, 70)
    q, k, v, sinks = operands(110, 4, 2, 8)
    common = {"window": window, "kernel": kernel}
    packed = sink_attention(q, k, v, sinks, cu_seqlens=borders(lengths), **common)
    alone = [
        sink_attention(*parts, sinks, cu_seqlens=borders([n]), **common)
        for n, *parts in zip(lengths, *(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(packed[40:].square().sum(), (q, k, v)):
        assert (grad[:40] == 0).all()
        assert (grad[40:] != 0).any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("num_tokens", [20, 64])  # 64: whole blocks, nothing to pad
def test_non_contiguous_operands(kernel, window, num_tokens):
    inputs = operands(num_tokens, 4, 2, 6)
    grad_out = torch.randn_like(inputs[0])
    common = {"cu_seqlens": borders([num_tokens]), "window": window, "kernel": kernel}
    expected = with_grads(inputs, grad_out, **common)
    strided = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in inputs[:3]]
    assert not any(x.is_contiguous() for x in strided)
    turned = grad_out.transpose(0, 2).contiguous().transpose(0, 2)
    assert_close(with_grads([*strided, inputs[3]], turned, **common), expected, 1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 16])
def test_sinks_of_minus_infinity_are_no_sinks(kernel, window):
    q, k, v, _ = operands(60, 2, 2, 4)
    sinks = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn_like(q)
    actual = with_grads((q, k, v, sinks), grad_out, cu_seqlens=borders([60]), window=window, kernel=kernel)
    is_seen = torch.ones(60, 60, dtype=torch.bool).tril().triu(1 - (window or 60))
    out = F.scaled_dot_product_attention(*[x.transpose(0, 1) for x in (q, k, v)], attn_mask=is_seen).transpose(0, 1)
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out), torch.zeros_like(sinks)]
    assert_close(actual, expected, 1e-12)
    assert torch.equal(actual[4], expected[4])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens(kernel):
    q, k, v, sinks = operands(0, 4, 2, 6)
    out = sink_attention(q, k, v, sinks, cu_seqlens=borders([0]), kernel=kernel)
    assert out.shape == (0, 4, 6)
    out.sum().backward()  # every operand has a gradient, as data-parallel wrappers want it
    assert torch.equal(sinks.grad, torch.zeros(4, dtype=torch.float64))
    assert all(x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("window", [None, 16])
def test_training_after_sampling(window):
    # What a layout keeps for the next call must serve training too, though inference mode asked for it first.
    inputs, common = operands(60, 2, 1, 4), {"cu_seqlens": borders([23, 37]), "window": window, "kernel": "cpu"}
    with torch.inference_mode():
        sampled = sink_attention(*[x.detach().clone() for x in inputs], **common)
    out, *grads = with_grads(inputs, torch.ones_like(inputs[0]), **common)
    assert torch.equal(out, sampled.clone())
    assert all((x != 0).any() for x in grads)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [[6], [4, 2], [9, 1]])
def test_writing_into_the_result_is_noticed(lengths, window):
    # The backward pass keeps the result; as with torch's own attention, it refuses one that was written to.
    inputs = operands(sum(lengths), 2, 1, 4)
    out = sink_attention(*inputs, cu_seqlens=borders(lengths), window=window, kernel="cpu")
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_float32(kernel, dtype):
    inputs = operands(40, 4, 2, 8, sink=2.0, dtype=dtype)
    grad_out = torch.randn_like(inputs[0])
    common = {"cu_seqlens": borders([40]), "window": 16, "kernel": kernel}
    actual = with_grads(inputs, grad_out, **common)
    assert all(x.dtype == dtype for x in actual)
    expected = with_grads([x.detach().double().requires_grad_() for x in inputs], grad_out.double(), **common)
    rounding = torch.finfo(dtype).eps / 2  # one rounding of each result
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1.01 * rounding, atol=1e-5)


def test_two_threads_give_the_same_bits():
    # Query heads that share a key head add into one gradient; threads must not race for it.
    inputs = operands(400, 8, 1, 16, dtype=torch.float32)
    grad_out = torch.randn_like(inputs[0])
    try:
        torch.set_num_threads(2)
        runs = [with_grads(inputs, grad_out, cu_seqlens=borders([150, 250]), window=w) for w in (None, 32) * 4]
    finally:
        torch.set_num_threads(1)
    for same_window in (runs[0::2], runs[1::2]):
        for run in same_window[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, same_window[0], strict=True))


@pytest.mark.parametrize(("window", "bound"), [(128, 2 * 128), (None, 16)])
def test_memory_grows_with_the_window_not_with_the_square(window, bound):
    num_tokens = 4096
    inputs = operands(num_tokens, 2, 1, 8, dtype=torch.float32)
    with LargestTensor() as largest:
        out = sink_attention(*inputs, cu_seqlens=borders([num_tokens]), window=window, kernel="cpu")
        out.sum().backward()
    assert largest.numel <= num_tokens * bound


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kernel": "flash"}, ValueError, "kernel must be one of auto, flash4, flash3, flash2, cpu, triton, reference"),
        ({"kernel": "flash3"}, RuntimeError, "kernel 'flash3' cannot run here: it needs an NVIDIA GPU"),
        ({"q": torch.zeros(4, 4, 2, dtype=torch.int32)}, ValueError, "one dtype"),
        (
            {name: torch.zeros(4, 4, 2).to(torch.int64) for name in "qkv"} | {"sinks": torch.zeros(4).to(torch.int64)},
            ValueError,
            "float16, bfloat16, float32 or float64",
        ),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"k": torch.zeros(4, 3, 2), "v": torch.zeros(4, 3, 2)}, ValueError, r"heads \(4\) must be a multiple"),
        ({"v": torch.zeros(4, 1, 2)}, ValueError, "q must be"),
        ({"k": torch.zeros(5, 2, 2), "v": torch.zeros(5, 2, 2)}, ValueError, "q must be"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, ValueError, "one dtype"),
        ({"q": torch.zeros(4, 4, 2, device="meta")}, ValueError, "one device"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "int32"),
        ({"cu_seqlens": borders([3])}, ValueError, "from 0 to 4"),
        ({"cu_seqlens": borders([5])}, ValueError, "from 0 to 4"),
        ({"cu_seqlens": torch.tensor([1, 4], dtype=torch.int32)}, ValueError, "from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4], dtype=torch.int32)}, ValueError, "must not fall"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ValueError, "from 0 to 4"),
    ],
)
def test_errors_name_the_argument(change, error, words, annotations_unchecked):
    good = {"q": torch.zeros(4, 4, 2), "k": torch.zeros(4, 2, 2), "v": torch.zeros(4, 2, 2), "sinks": torch.zeros(4)}
    with pytest.raises(error, match=words):
        sink_attention(**{**good, "cu_seqlens": borders([4]), **change})


def test_cu_seqlens_that_are_written_to_are_read_again():
    # What a tensor said is remembered, so that layers wait for a device once; until it says something else.
    q, k, v, sinks = operands(8, 2, 1, 4)
    cu_seqlens = borders([8])
    whole = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens)
    cu_seqlens.resize_(3).copy_(borders([3, 5]))
    parts = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(parts, sink_attention(q, k, v, sinks, cu_seqlens=borders([3, 5])), rtol=0, atol=0)
    assert not torch.equal(parts, whole)
    with pytest.raises(ValueError, match="from 0 to 7"):
        sink_attention(q[:7], k[:7], v[:7], sinks, cu_seqlens=cu_seqlens)
    cu_seqlens.numpy()[1] = 4  # which torch does not see
    other = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(other, sink_attention(q, k, v, sinks, cu_seqlens=borders([4, 4])), rtol=0, atol=0)
    with torch.inference_mode():  # such tensors do not tell when they were written to
        cu_seqlens = borders([8])
        torch.testing.assert_close(sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens), whole, rtol=0, atol=0)
        cu_seqlens.resize_(3).copy_(borders([3, 5]))
        torch.testing.assert_close(sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens), parts, rtol=0, atol=0)


def test_borders_are_remembered_until_torch_writes():
    cu_seqlens = borders([3, 5])
    assert remembered_bounds(cu_seqlens, 8) == (0, 3, 8)
    cu_seqlens.numpy()[1] = 4  # shows that it is not read again; on the CPU, sink_attention does not rely on this
    assert remembered_bounds(cu_seqlens, 8) == (0, 3, 8)
    cu_seqlens[1] = 6
    assert remembered_bounds(cu_seqlens, 8) == (0, 6, 8)
    with pytest.raises(ValueError, match="from 0 to 9"):
        remembered_bounds(cu_seqlens, 9)
    assert remembered_bounds(borders([1, 7]), 8) == (0, 1, 8)
