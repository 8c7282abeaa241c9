"""FlashAttention's wrapper, on stand-ins with the arguments of the real functions that know no sinks.

The stand-ins compute softmax(q k) v without sinks, its log-sum-exp, and the gradients from what they are handed: from
out and lse as FlashAttention's backward does, not by autograd. The expected numbers are Transformers' eager attention
with sinks, differentiated by autograd.
"""

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_attention import assert_close, borders, operands, transformers_attention, with_grads

from poise.ops.attention import sink_attention
from poise.ops.attention_flash import Packing, _FlashWithSinks, _on_device, attend, interface, unavailable_reason
from poise.ops.remembered import Memory

LENGTHS = (1, 63, 128, 129, 30)


def sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    assert type(max_seqlen_q) is int
    return list(itertools.pairwise(cu_seqlens_q.tolist()))


def scores(q, k, scale, left, right, causal):
    """[H, L, L] of one sequence; FlashAttention's window: ``left`` keys before and ``right`` after, -1 for all."""
    assert causal
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    is_seen = (distance >= 0) & (distance <= (left if left >= 0 else len(q)))
    assert right in (-1, 0)
    return (torch.einsum("ihc,jhc->hij", q, k) * scale).masked_fill(~is_seen, -torch.inf)


def plain_forward(q, k, v, cu, scale, left, right, causal):
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for a, b in cu:
        s = scores(q[a:b], k[a:b], scale, left, right, causal)
        lse[:, a:b] = s.logsumexp(dim=-1)
        v_h = v[a:b].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[a:b] = torch.einsum("hij,jhc->ihc", s.softmax(dim=-1), v_h)
    return out, lse


def plain_backward(dout, q, k, v, out, lse, dq, dk, dv, cu, scale, left, right, causal):
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    group = q.shape[1] // k.shape[1]
    for a, b in cu:
        s = scores(q[a:b], k[a:b], scale, left, right, causal)
        p = torch.exp(s - lse[:, a:b, None])
        v_h, k_h = (x[a:b].repeat_interleave(group, dim=1) for x in (v, k))
        dp = torch.einsum("ihc,jhc->hij", dout[a:b], v_h)
        ds = p * (dp - (dout[a:b] * out[a:b]).sum(-1).t()[:, :, None]) * scale
        dq[a:b] = torch.einsum("hij,jhc->ihc", ds, k_h)
        for grad, rows in ((dk, torch.einsum("hij,ihc->jhc", ds, q[a:b])),
                           (dv, torch.einsum("hij,ihc->jhc", p, dout[a:b]))):  # fmt: skip
            grad[a:b] = rows.unflatten(1, (-1, group)).sum(2)


# The signatures are those of flash_attn 2.8.3.


def flash2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert dropout_p == softcap == 0.0
    assert alibi_slopes is None
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = plain_forward(q, k, v, cu, softmax_scale, window_size_left, window_size_right, causal)
    return out, lse, torch.empty(0), torch.empty(2)


def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert dropout_p == softcap == 0.0
    assert alibi_slopes is None
    assert deterministic  # the tests run under torch.use_deterministic_algorithms
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = (window_size_left, window_size_right)
    plain_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu, softmax_scale, *sides, causal)
    return torch.empty(0)


# flash_attn_interface with the window as a pair; a sibling below takes two numbers and `is_causal`.


def flash3_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    unused = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k)
    assert all(x is None for x in (*unused, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale))
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *plain_forward(q, k, v, cu, softmax_scale, *window_size, causal), None, None


def flash3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
    dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert sequed_q is None
    assert sequed_k is None
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    plain_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu, softmax_scale, *window_size, causal)
    return dq, dk, dv, torch.empty(0)


def newer_flash3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *plain_forward(q, k, v, cu, softmax_scale, window_size_left, window_size_right, causal), None, None


def newer_flash3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = (window_size_left, window_size_right)
    plain_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu, softmax_scale, *sides, is_causal)
    return torch.empty(0)


# flash_attn.cute: None stands for "all". Its later versions have sinks with a gradient.


def sides4(window_size_left, window_size_right):
    return tuple(-1 if side is None else side for side in (window_size_left, window_size_right))


def flash4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
    window_size_right=None, learnable_sink=None, return_lse=False,
):  # fmt: skip
    assert return_lse
    assert learnable_sink is None
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sides = sides4(window_size_left, window_size_right)
    return *plain_forward(q, k, v, cu, softmax_scale, *sides, causal), None, None, None


def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False,
):  # fmt: skip
    cu = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sides = sides4(window_size_left, window_size_right)
    plain_backward(dout, q, k, v, out, lse, *grads, cu, softmax_scale, *sides, causal)
    return grads


def newer_flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
    learnable_sink=None,
):  # fmt: skip
    raise AssertionError("the differentiable function calls it, poise does not")


def flash4_whole(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, deterministic=False,
):  # fmt: skip
    left, right = window_size
    assert causal
    assert right == (None if left is None else 0)
    window = None if left is None else left + 1
    assert softmax_scale == q.shape[-1] ** -0.5
    pieces = [
        transformers_attention(q[a:b], k[a:b], v[a:b], learnable_sink, window)
        for a, b in sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    ]
    return torch.cat(pieces), None


STAND_INS = {
    "2": (2, SimpleNamespace(_flash_attn_varlen_forward=flash2_forward, _flash_attn_varlen_backward=flash2_backward)),
    "3": (3, SimpleNamespace(_flash_attn_forward=flash3_forward, _flash_attn_backward=flash3_backward)),
    "3, two window sides": (
        3,
        SimpleNamespace(_flash_attn_forward=newer_flash3_forward, _flash_attn_backward=newer_flash3_backward),
    ),
    "4": (
        4,
        SimpleNamespace(
            _flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward, flash_attn_varlen_func=flash4_whole
        ),
    ),
    "4 with sinks": (
        4,
        SimpleNamespace(
            _flash_attn_fwd=flash4_forward, _flash_attn_bwd=newer_flash4_backward, flash_attn_varlen_func=flash4_whole
        ),
    ),
}  # fmt: skip


def packing(lengths, window, channels):
    return Packing(borders(lengths), max(lengths), window, channels**-0.5)


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("window", [None, 1, 16, 128])
@pytest.mark.parametrize("sink", [-20.0, 0.0, 5.0, 100.0])
def test_sinks_and_their_gradient_are_exact(name, window, sink):
    flash = interface(*STAND_INS[name])
    inputs = operands(sum(LENGTHS), 8, 1, 16, sink=sink)
    grad_out = torch.randn_like(inputs[0])
    out = attend(flash, *inputs, packing(LENGTHS, window, 16))
    actual = [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]
    q, k, v, sinks = inputs
    pieces = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    out = torch.cat([transformers_attention(*piece, sinks, window) for piece in pieces])
    assert_close(actual, [out.detach(), *torch.autograd.grad(out, inputs, grad_out)], 1e-10)


@pytest.mark.parametrize("name", STAND_INS)
def test_gradcheck_of_every_element(name):
    flash = interface(*STAND_INS[name])
    assert torch.autograd.gradcheck(
        lambda *inputs: attend(flash, *inputs, packing([1, 4, 2], 2, 2)), operands(7, 2, 1, 2, sink=1.0)
    )


def test_second_derivatives_are_refused():
    # FlashAttention 2 and 3 write gradients without a graph: their own gradient would be lost without a word.
    inputs = operands(4, 2, 1, 8)
    out = attend(interface(*STAND_INS["2"]), *inputs, packing([4], None, 8))
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


def test_borders_that_sampling_asked_for_first_serve_training():
    with torch.inference_mode():
        on_device = _on_device((0, 3, 7), torch.device("cpu"))
    assert not on_device.is_inference()  # FlashAttention 4 saves them for its backward pass, which refuses such tensors
    assert on_device.tolist() == [0, 3, 7]


@pytest.mark.parametrize("name", [name for name in STAND_INS if name != "4 with sinks"])
def test_a_pass_that_is_computed_again_takes_what_the_first_returned(name):
    """The kernel, made to fail the second time, is not asked; the gradients are those of one pass."""
    leaves = operands(40, 4, 2, 8)
    flash, pack = interface(*STAND_INS[name]), packing([40], 16, 8)
    expected = torch.autograd.grad(_FlashWithSinks.apply(*leaves, flash, pack).sum(), leaves)
    memory = Memory()

    def fails(*args):
        raise AssertionError("it must not run")

    # What has sinks of its own could not be kept from running again, so it does not run at all.
    with memory.recording:
        attend(replace(flash, with_sinks=fails), *leaves, pack)
    with memory.replaying:
        again = attend(replace(flash, forward=fails, with_sinks=fails), *leaves, pack)
    for actual, gradient in zip(torch.autograd.grad(again.sum(), leaves), expected, strict=True):
        assert torch.equal(actual, gradient)


def like(function):
    """Gives a stand-in the signature of ``function``."""

    def decorate(other):
        other.__signature__ = inspect.signature(function)
        return other

    return decorate


def test_half_types_keep_their_type_and_the_lse_stays_wide():
    # As on the GPU: bfloat16 operands and gradients, float32 log-sum-exps and sums.
    @like(flash2_forward)
    def forward(**arguments):
        wide = {name: arguments[name].float() for name in ("q", "k", "v")}
        out, lse, *others = flash2_forward(**{**arguments, **wide})
        return out.bfloat16(), lse, *others

    @like(flash2_backward)
    def backward(**arguments):
        names = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
        assert all(arguments[name].dtype == torch.bfloat16 for name in names)
        assert arguments["softmax_lse"].dtype == torch.float32
        wide = {name: arguments[name].float() for name in names}
        flash2_backward(**{**arguments, **wide})
        for name in ("dq", "dk", "dv"):
            arguments[name].copy_(wide[name])

    module = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    inputs = operands(40, 4, 2, 8, sink=2.0, dtype=torch.bfloat16)
    grad_out = torch.randn_like(inputs[0])
    out = attend(interface(2, module), *inputs, packing([40], 16, 8))
    actual = [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]
    assert all(x.dtype == torch.bfloat16 for x in actual)
    expected = with_grads(
        [x.detach().double().requires_grad_() for x in inputs], grad_out.double(), cu_seqlens=borders([40]), window=16
    )
    assert_close([x.double() for x in actual], expected, 2e-2)


@pytest.mark.parametrize(
    ("version", "module", "words"),
    [
        (2, SimpleNamespace(__name__="flash_attn"), "flash_attn._flash_attn_varlen_forward is missing"),
        (2, SimpleNamespace(_flash_attn_varlen_forward=lambda q, k, v: None), "takes no causal"),
        (3, SimpleNamespace(_flash_attn_forward=flash3_forward), "_flash_attn_backward is missing"),
        (3, SimpleNamespace(_flash_attn_forward=flash3_forward, _flash_attn_backward=flash4_backward), "takes no dq"),
        (4, SimpleNamespace(_flash_attn_fwd=flash4_forward), "_flash_attn_bwd is missing"),
    ],
)
def test_unknown_versions_are_refused_when_loaded(version, module, words):
    with pytest.raises(RuntimeError, match=words):
        interface(version, module)


def test_log_sum_exps_of_another_shape_are_refused():
    # flash_attn before 2.6 returned [sequences, heads, longest].
    @like(flash2_forward)
    def forward(**arguments):
        out, lse, *others = flash2_forward(**arguments)
        return out, lse.unsqueeze(0), *others

    module = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=flash2_backward)
    with pytest.raises(RuntimeError, match="lse"):
        attend(interface(2, module), *operands(4, 2, 1, 8), packing([4], None, 8))


def test_reasons():
    cpu = torch.device("cpu")
    for version in (2, 3, 4):
        assert unavailable_reason(version, cpu, torch.bfloat16, 64) == "it needs an NVIDIA GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash2", "flash3", "flash4"])
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("sink", [-20.0, 0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(kernel, window, sink, dtype):
    reason = unavailable_reason(int(kernel[-1]), torch.device("cuda"), dtype, 64)
    if reason:
        pytest.skip(reason)
    torch.use_deterministic_algorithms(False)
    lengths = (1, 63, 128, 129, 300, 1000)
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in operands(sum(lengths), 8, 1, 64, sink=sink)]
    grad_out = torch.randn_like(inputs[0])
    common = {"cu_seqlens": borders(lengths).cuda(), "window": window}
    actual = with_grads(inputs, grad_out, kernel=kernel, **common)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_grads(wide, grad_out.double(), kernel="reference", **common)
    assert_close([x.double() for x in actual], expected, 2e-2)


def test_a_kernel_that_cannot_run_here_is_refused_with_its_reason():
    for kernel in ("flash2", "flash3", "flash4"):
        with pytest.raises(RuntimeError, match=f"kernel '{kernel}' cannot run here: it needs an NVIDIA GPU"):
            sink_attention(*operands(2, 1, 1, 8), cu_seqlens=borders([2]), kernel=kernel)
