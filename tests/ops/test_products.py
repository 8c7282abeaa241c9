"""Products of float32 matrices, in parts of both libraries, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from poise.model.gpt_oss import Linear
from poise.ops import products
from poise.ops.products import MAX_ERROR, MIN_ELEMENTS, MIN_ROWS, linear, rows_times, sum_over_rows, why_not_onednn

I, O = 192, 160  # noqa: E741
ROWS = (0, 1, 63, 64, 65, 127, 200, 1023, 1024, 2300)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_float32(out, exact):
    """Within a few times the rounding of float32's sums; bfloat16's is a thousand times as large."""
    assert out.shape == exact.shape
    torch.testing.assert_close(
        out.double(), exact, rtol=2e-6, atol=2e-6 * exact.abs().amax().item() if out.numel() else 0
    )


def test_the_sizes_reach_both_libraries():
    assert I * O >= MIN_ELEMENTS
    assert min(ROWS) < MIN_ROWS < max(ROWS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_times_a_matrix(rows, is_transposed, has_bias):
    x, bias = normal(rows, I), normal(O, seed=1)
    matrix = normal(O, I, seed=2).t() if is_transposed else normal(I, O, seed=2)
    out = rows_times(x, matrix, bias if has_bias else None, out=torch.full((rows, O), torch.nan))
    assert_float32(out, x.double() @ matrix.double() + (bias.double() if has_bias else 0))


@pytest.mark.parametrize("rows", ROWS)
def test_rows_times_a_matrix_is_added(rows):
    x, matrix, before = normal(rows, I), normal(I, O, seed=1), normal(rows, O, seed=2)
    out = rows_times(x, matrix, out=before.clone(), is_added=True)
    assert_float32(out, before.double() + x.double() @ matrix.double())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_added", [False, True])
def test_sums_over_rows(rows, is_added):
    left, right, before = normal(rows, I), normal(rows, O, seed=1), normal(I, O, seed=2)
    out = sum_over_rows(left, right, out=before.clone() if is_added else before * torch.nan, is_added=is_added)
    exact = left.double().t() @ right.double()
    assert_float32(out, before.double() + exact if is_added else exact)


def test_parts_are_few_shapes_and_cover_each_row_once():
    parts = list(products._parts(normal(1999, 1), 2**20))
    assert [row for part, _ in parts for row in range(part.start, part.stop)] == list(range(1999))
    if why_not_onednn() is None:
        sizes = [part.stop - part.start for part, is_onednn in parts if is_onednn]
        assert sizes == [1024, 512, 256, 128, 64]


@pytest.mark.parametrize("rows", [5, 64, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_and_its_gradients(rows, has_bias):
    operands = [normal(rows, I), normal(O, I, seed=1), normal(O, seed=2) if has_bias else None]
    grad = normal(rows, O, seed=3)
    results = []
    for function, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        leaves = [x if x is None else x.to(dtype, copy=True).requires_grad_() for x in operands]
        out = function(*leaves)
        out.backward(grad.to(dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
    for ours, exact in zip(*results, strict=True):
        assert_float32(ours, exact)


def test_linear_gives_no_gradient_that_nobody_asked_for():
    module = Linear(I, O)
    module.weight.requires_grad_(False)
    x = normal(128, I)
    module(x).sum().backward()
    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, torch.full((O,), 128.0))


@pytest.mark.parametrize("chosen", ["none", "ieee", "tf32", "bf16"])
def test_the_precision_that_the_user_chose_stays(chosen):
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = chosen
        rows_times(normal(256, I), normal(I, O), out=torch.empty(256, O))
        assert matmul.fp32_precision == chosen
        with pytest.raises(RuntimeError):
            products._run(True, torch.mm, normal(256, I), normal(I + 1, O), out=torch.empty(256, O))
        assert matmul.fp32_precision == chosen
    finally:
        matmul.fp32_precision = before


AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "reason"),
    [
        (AMD, None),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), "MKL is made for this CPU"),
        (AMD.replace(" avx512f", ""), "no AVX-512"),
        (AMD.replace("sse2", "sse2 amx_bf16"), "AMX"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "MKL is made for this CPU"),
    ],
    ids=["amd", "intel", "no-avx512", "amx", "arm"],
)
def test_cpus_that_are_left_to_mkl(tmp_path, cpuinfo, reason):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{cpuinfo}\nprocessor\t: 1\n{cpuinfo}")
    found = products._of_cpu(path)
    assert found is None if reason is None else reason in found


def test_an_unknown_cpu_and_a_user_who_says_no(tmp_path, monkeypatch):
    assert "unknown" in products._of_cpu(tmp_path / "cpuinfo")
    monkeypatch.setenv("POISE_ONEDNN", "0")
    assert why_not_onednn.__wrapped__() == "POISE_ONEDNN=0"


def test_a_rounded_product_is_noticed():
    def rounded(left, right, *, out):
        out.copy_(left.bfloat16().float() @ right.bfloat16().float())

    assert products.largest_error(torch.mm) < MAX_ERROR
    assert products.largest_error(rounded) > 100 * MAX_ERROR


@pytest.mark.parametrize("rows", [5, 300])
def test_linear_without_gradients(rows):
    x, weight, bias = normal(rows, I), normal(O, I, seed=1), normal(O, seed=2)
    with torch.inference_mode():
        out = linear(x, weight, bias)
    assert_float32(out, F.linear(x.double(), weight.double(), bias.double()))
