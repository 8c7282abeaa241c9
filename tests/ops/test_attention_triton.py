"""The Triton kernels: their numbers in Triton's interpreter, their resources as compiled for GPUs, and both on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so tests marked ``@interpreted`` run in a process of their own.
``python tests/ops/test_attention_triton.py`` prints the resources of every kernel, target and tile.
"""

import functools
import itertools
import multiprocessing
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from poise.ops.attention import sink_attention, unavailable_reason

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from poise.ops import attention_triton, attention_triton_kernels  # noqa: E402

WINDOWS = (None, 1, 16, 127, 128)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


# --- the process that interprets ---


@functools.cache
def interpreter():
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(_prepare).result()
    return pool


@pytest.fixture(scope="module", autouse=True)
def interpreter_is_stopped():
    yield
    if interpreter.cache_info().currsize:
        interpreter().shutdown()
        interpreter.cache_clear()


def interpreted(test):
    @functools.wraps(test)
    def run_there(**arguments):
        interpreter().submit(_run_here, test.__name__, arguments).result()

    return run_there


def _prepare():
    assert triton.knobs.runtime.interpret
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # on its own this fills uninitialized memory, see the next line
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    np.seterr(over="raise", invalid="raise")


def _run_here(name, arguments):
    torch.manual_seed(0)
    globals()[name].__wrapped__(**arguments)


# --- numbers ---


def borders(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(num_tokens, heads, kv_heads, channels, sinks, dtype=torch.float32):
    q = torch.randn(num_tokens, heads, channels)
    k, v = torch.randn(2, num_tokens, kv_heads, channels).unbind()
    sinks = torch.as_tensor(sinks).expand(heads)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, sinks)]


def with_grads(inputs, grad_out, *, kernel="triton", **kwargs):
    out = sink_attention(*inputs, kernel=kernel, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def in_float64(inputs, grad_out, **kwargs):
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    kwargs["cu_seqlens"] = kwargs["cu_seqlens"].cpu()
    return with_grads(wide, grad_out.cpu().double(), kernel="reference", **kwargs)


def assert_close(actual, expected, tolerance, floor=1e-3):
    """Head by head, so that one with large values does not hide another. ``floor``: the size that rounding goes by
    where terms cancel, or where everything is far below one."""
    for name, a, e in zip(("out", "q", "k", "v", "sinks"), actual, expected, strict=True):
        by_head = (0,) if name == "sinks" else (0, 2)
        a, e = (x.cpu().double().reshape(1, -1) if name == "sinks" else x.cpu().double() for x in (a, e))
        error = (a - e).abs().amax(by_head) / e.abs().amax(by_head).clamp(min=floor)
        assert error.max() < tolerance, f"{name}: {error.tolist()}"


def assert_equals_reference(inputs, lengths, window, tolerance=None, floor=1e-3):
    grad_out = torch.randn_like(inputs[0])
    common = {"cu_seqlens": borders(lengths).to(grad_out.device), "window": window}
    actual = with_grads(inputs, grad_out, **common)
    assert_close(actual, in_float64(inputs, grad_out, **common), tolerance or TOLERANCES[grad_out.dtype], floor)
    return actual


@interpreted
def test_one_key_by_hand():
    # s = q k = 1, sink = 0: P = e / (e + 1) = 0.73105858, O = 2 P; dS = P (dO v - dO O) = 0.73105858 (2 - 1.46211716),
    # d sink = -(1 - P) dO O = -0.26894142 * 1.46211716.
    ones = torch.ones(1, 1, 1)
    inputs = [x.requires_grad_() for x in (ones.clone(), ones.clone(), 2 * ones, torch.zeros(1))]
    results = with_grads(inputs, ones, cu_seqlens=borders([1]), scale=1.0)
    expected = [1.46211716, 0.39322387, 0.39322387, 0.73105858, -0.39322387]
    torch.testing.assert_close(torch.tensor([x.item() for x in results]), torch.tensor(expected), rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_reference(window, dtype):
    lengths = (1, 63, 0, 128, 129)
    inputs = operands(sum(lengths), 4, 1, 16, [-20.0, 0.0, 5.0, 100.0], dtype)  # 5: above the maximum of most rows
    # A row that sees one key and no sink to speak of has P = 1 and no gradient: its terms, of size 1, cancel.
    assert_equals_reference(inputs, lengths, window, floor=1.0 if window == 1 else 1e-3)


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels", "lengths", "window", "dtype"),
    [
        (8, 1, 64, (1, 63, 128, 129, 300), 128, torch.bfloat16),
        (8, 1, 64, (63, 129), None, torch.float32),
        (3, 3, 32, (200,), 66, torch.float16),  # windows reach one key, one query into the next tile
        (4, 2, 5, (70, 65), None, torch.float32),  # padded to 16 channels
        (2, 1, 80, (70, 129), 100, torch.float32),  # padded to 128
        (2, 1, 128, (70, 200), None, torch.bfloat16),
        (2, 2, 128, (33, 100), 64, torch.float32),
    ],
)
def test_heads_and_channels(heads, kv_heads, channels, lengths, window, dtype):
    sinks = torch.randn(heads)
    assert_equals_reference(operands(sum(lengths), heads, kv_heads, channels, sinks, dtype), lengths, window)


@interpreted
@pytest.mark.parametrize("sink", [-200.0, 100.0, 200.0])
def test_scores_beyond_the_range_of_exp(sink):
    inputs = operands(150, 2, 1, 16, sink)
    inputs[0] = (40 * inputs[0].detach()).requires_grad_()  # scores up to about 170; exp(89) overflows float32
    # float32 holds a score of 170 to 1e-5, which is then the relative error of its exponential.
    assert_equals_reference(inputs, (150,), None, tolerance=1e-4)


@interpreted
@pytest.mark.parametrize("window", [None, 16])
def test_without_sinks_equals_torch(window):
    q, k, v, sinks = operands(100, 2, 2, 16, -torch.inf)
    grad_out = torch.randn_like(q)
    actual = with_grads((q, k, v, sinks), grad_out, cu_seqlens=borders([100]), window=window)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    is_seen = torch.ones(100, 100, dtype=torch.bool).tril()
    if window:  # the last rows of a block first meet keys of which they see none
        is_seen = is_seen.triu(1 - window)
    batched = [x.transpose(0, 1)[None] for x in wide]
    out = F.scaled_dot_product_attention(*batched, attn_mask=is_seen)[0].transpose(0, 1)
    expected = [out.detach(), *torch.autograd.grad(out, wide, grad_out.double()), torch.zeros(2)]
    assert_close(actual, expected, 1e-5)
    assert torch.equal(actual[4], torch.zeros(2))


@interpreted
def test_window_counts_the_token_itself():
    inputs = operands(300, 1, 1, 16, 0.0)
    grad_out = torch.zeros_like(inputs[0])
    grad_out[200] = 1
    grad_v = with_grads(inputs, grad_out, cu_seqlens=borders([300]), window=128)[3]
    seen = (grad_v[:, 0, 0] != 0).nonzero().flatten().tolist()
    assert seen == list(range(200 - 127, 200 + 1)), seen


@interpreted
@pytest.mark.parametrize("window", [None, 16])
def test_sequences_do_not_see_each_other(window):
    lengths = (70, 1, 100)
    inputs = operands(sum(lengths), 2, 1, 16, 0.0)
    q, k, v, sinks = inputs
    grad_out = torch.randn_like(q)
    packed = with_grads(inputs, grad_out, cu_seqlens=borders(lengths), window=window)
    pieces = zip(*(x.split(lengths) for x in (q, k, v, grad_out, *packed[:4])), strict=True)
    for q_i, k_i, v_i, grad_i, *expected in pieces:
        alone = [x.detach().clone().requires_grad_() for x in (q_i, k_i, v_i, sinks)]
        actual = with_grads(alone, grad_i, cu_seqlens=borders([len(q_i)]), window=window)
        assert all(torch.equal(a, e) for a, e in zip(actual[:4], expected, strict=True))
    grad_out[:70] = grad_out[71:] = 0  # the loss of the middle sequence
    grads = with_grads(inputs, grad_out, cu_seqlens=borders(lengths), window=window)[1:4]
    assert all((x[:70] == 0).all() and (x[71:] == 0).all() for x in grads)
    assert (grads[2][70] != 0).all()


@interpreted
def test_blocks_outside_the_band_are_not_read():
    # No tile of float32 with 16 channels has more than 64 queries or keys.
    inputs = operands(256, 1, 1, 16, 0.0)
    grad_out = torch.randn_like(inputs[0])

    def run(window, poisoned, rows):
        changed = [x.detach().clone().requires_grad_() for x in inputs]
        for i in poisoned:
            changed[i - 1].data[rows] = torch.nan
        return with_grads(changed, grad_out, cu_seqlens=borders([256]), window=window)

    def assert_equal(results, clean, names, rows):
        for i in names:
            assert torch.equal(results[i][rows], clean[i][rows]), i

    out, q, k, v = range(4)
    sliding, full = run(16, (), slice(0)), run(None, (), slice(0))
    assert not any(x.isnan().any() for x in (*sliding, *full))
    # Keys behind the window: the block of queries from 128 looks back to 113, in the tile from 64 at most.
    results = run(16, (k, v), slice(0, 64))
    assert_equal(results, sliding, (out, q, k, v), slice(128, 256))
    assert results[out][:64].isnan().any()
    # Keys after the queries.
    assert_equal(run(None, (k, v), slice(192, 256)), full, (out, q), slice(0, 192))
    # Queries before the keys, and queries that have lost sight of them.
    assert_equal(run(None, (q,), slice(0, 64)), full, (k, v), slice(64, 256))
    assert_equal(run(16, (q,), slice(160, 256)), sliding, (k, v), slice(0, 128))


@interpreted
def test_non_contiguous_operands_and_no_tokens():
    inputs = operands(40, 4, 2, 8, 0.0)
    grad_out = torch.randn_like(inputs[0])
    expected = with_grads(inputs, grad_out, cu_seqlens=borders([40]), window=8)
    fused = torch.cat([x.detach().flatten(1) for x in inputs[:3]], dim=1)  # as a fused projection leaves them
    sliced = [x.unflatten(1, (-1, 8)) for x in fused.split([32, 16, 16], dim=1)]
    turned = [x.detach().transpose(0, 2).contiguous().transpose(0, 2) for x in inputs[:3]]
    for strided in (sliced, turned):
        assert not any(x.is_contiguous() for x in strided)
        strided = [x.detach().requires_grad_() for x in strided]
        turned_grad = grad_out.transpose(0, 2).contiguous().transpose(0, 2)
        actual = with_grads([*strided, inputs[3]], turned_grad, cu_seqlens=borders([40]), window=8)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    q, k, v, sinks = inputs
    assert sink_attention(q[:0], k[:0], v[:0], sinks, cu_seqlens=borders([0]), kernel="triton").shape == (0, 4, 8)


@interpreted
def test_says_what_it_takes():
    for channels, dtype, words in ((8, torch.float64, "float16, bfloat16 and float32"), (129, torch.float32, "128")):
        with pytest.raises(RuntimeError, match=words):
            sink_attention(*operands(2, 1, 1, channels, 0.0, dtype), cu_seqlens=borders([2]), kernel="triton")


def test_needs_a_gpu_or_the_interpreter():
    assert "it needs a GPU" in unavailable_reason("triton", torch.device("cpu"), torch.bfloat16, 64)


# --- resources, compiled without a GPU ---

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Of a program. sm_80 itself has 163 KiB; sm_86 and sm_89, which run the same tiles, have 99.
SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
KERNELS = {"forward_kernel": "forward", "query_grad_kernel": "query_grad", "key_grad_kernel": "key_grad"}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def argument_type(name, dtype):
    """Of a kernel's argument, and whether a launch finds it to be a multiple of 16, as for GPT-OSS it does."""
    if name.startswith("stride"):
        return "i32", True
    if name in ("num_tokens", "window"):
        return "i32", False
    if name in ("scale", "grad_scale"):
        return "fp32", False
    return {"blocks": "*i32", "lse": "*fp32", "delta": "*fp32", "sink_parts": "*fp32"}.get(name, POINTERS[dtype]), True


def compiled(kernel, target, dtype, head_dim, slides):
    function = getattr(attention_triton_kernels, kernel)
    tile = getattr(attention_triton.tiles(dtype, head_dim), KERNELS[kernel])
    constants = {"HEADS": 64, "GROUP": 8, "CHANNELS": head_dim, "LANES": attention_triton.lanes(head_dim)}
    constants |= {"QUERIES": tile.queries, "KEYS": tile.keys, "SLIDES": slides}
    signature, attributes = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name], is_multiple = ("constexpr", False) if name in constants else argument_type(name, dtype)
        if is_multiple:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        function, signature, {(function.arg_names.index(n),): c for n, c in constants.items()}, attributes
    )
    options = attention_triton.launch_options(tile, is_amd=target == "gfx942")
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(kernel, target, folder):
    """Registers a thread, bytes (AMD: registers) spilled, bytes of shared memory."""
    if target == "gfx942":
        count = {name: int(n) for name, n in re.findall(r"\.([vs]gpr_\w*count):\s+(\d+)", kernel.asm["amdgcn"])}
        # Scalar registers spill into vector registers, not into memory.
        return count["vgpr_count"], count["vgpr_spill_count"], kernel.metadata.shared
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "--dump-resource-usage", binary], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local, kernel.metadata.shared


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "slides"),
    [
        *itertools.product(("sm_80", "sm_90"), (torch.bfloat16,), (32, 64, 128), (False,)),
        *itertools.product(("sm_80", "sm_90"), (torch.float32,), (64, 128), (False,)),
        *itertools.product(("sm_80", "sm_90"), (torch.bfloat16, torch.float32), (64,), (True,)),
        ("gfx942", torch.bfloat16, 64, False),
    ],
)
def test_compiles_within_the_resources_of(kernel, target, dtype, head_dim, slides, tmp_path):
    binary = compiled(kernel, target, dtype, head_dim, slides)
    registers, spilled, shared = resources(binary, target, tmp_path)
    assert registers > 0
    assert spilled == 0
    assert 0 < shared <= SHARED_BYTES[target]
    assembly = binary.asm["amdgcn" if target == "gfx942" else "ptx"]
    # Additions by several programs to one place have no fixed order.
    assert not re.search(r"\b(atom|red)\.|atomic", assembly)
    # bfloat16 on the matrix units; float32 not, where it would be TF32.
    matrix_unit = {"sm_80": "mma.sync", "sm_90": "wgmma", "gfx942": "v_mfma"}[target]
    assert (matrix_unit in assembly) == (dtype != torch.float32)
    assert "tf32" not in assembly


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("channels", [32, 64, 80, 128])
def test_on_a_gpu(dtype, channels):
    lengths = (1, 63, 0, 128, 129, 300, 1000)
    sinks = [-20.0, 0.0, 5.0, 100.0] * 4
    inputs = [x.detach().cuda().requires_grad_() for x in operands(sum(lengths), 16, 2, channels, sinks, dtype)]
    grad_out = torch.randn_like(inputs[0])
    for window in WINDOWS:
        results = assert_equals_reference(inputs, lengths, window, floor=1.0 if window == 1 else 1e-3)
        assert all(x.isfinite().all() for x in results)
        common = {"cu_seqlens": borders(lengths).cuda(), "window": window}
        runs = [with_grads(inputs, grad_out, **common) for _ in range(3)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_that_share_borders_wait_for_the_gpu_once():
    inputs = [x.detach().cuda().requires_grad_() for x in operands(200, 4, 2, 64, 0.0, torch.bfloat16)]
    grad_out, common = torch.randn_like(inputs[0]), {"cu_seqlens": borders([70, 130]).cuda(), "window": 128}
    first = with_grads(inputs, grad_out, **common)
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = with_grads(inputs, grad_out, **common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    print("| kernel | type | head dim | window | target | registers | spilled | shared KiB |")
    print("| --- | --- | ---: | --- | --- | ---: | ---: | ---: |")
    for case in itertools.product(KERNELS, TARGETS, POINTERS, (32, 64, 128), (False, True)):
        name, target_name, dtype_, head_dim_, slides_ = case
        with tempfile.TemporaryDirectory() as temporary:
            registers_, spilled_, shared_ = resources(compiled(*case), target_name, Path(temporary))
        row = (name, str(dtype_).removeprefix("torch."), head_dim_, "yes" if slides_ else "no", target_name)
        print(f"| {' | '.join(map(str, row))} | {registers_} | {spilled_} | {shared_ / 1024:.1f} |")
