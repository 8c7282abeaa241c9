"""Which attention kernel "auto" takes, and what is said about the others."""

import logging

import pytest
import torch
from test_attention import borders, operands

from poise.ops import attention_flash
from poise.ops.attention import KERNELS, chosen_kernel, sink_attention, unavailable_reason


@pytest.fixture(autouse=True)
def choices_are_forgotten():
    chosen_kernel.cache_clear()
    yield
    chosen_kernel.cache_clear()


def test_auto_logs_its_choice_once(caplog):
    caplog.set_level(logging.INFO, logger="poise")
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        sink_attention(*operands(4, 2, 1, 8, dtype=dtype), cu_seqlens=borders([4]))
    assert [record.getMessage() for record in caplog.records] == [
        "attention of float32, head dim 8, on cpu: kernel cpu",
        "attention of bfloat16, head dim 8, on cpu: kernel cpu",
    ]


def test_auto_warns_where_only_the_reference_runs(caplog):
    assert chosen_kernel(torch.device("meta"), torch.float32, 64) == "reference"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "memory grows with the square of the length" in record.getMessage()


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "installed", "expected"),
    [
        ((10, 0), torch.bfloat16, 64, (2, 3, 4), "flash4"),
        ((9, 0), torch.float16, 64, (2, 3, 4), "flash4"),
        ((9, 0), torch.bfloat16, 64, (2, 3), "flash3"),
        ((9, 0), torch.bfloat16, 64, (2,), "flash2"),
        ((9, 0), torch.bfloat16, 64, (), "triton"),
        ((8, 0), torch.bfloat16, 64, (2, 3, 4), "flash2"),  # 3 is for Hopper, 4 for Hopper and later
        ((12, 0), torch.bfloat16, 64, (2, 3), "flash2"),
        ((9, 0), torch.bfloat16, 20, (2, 3, 4), "triton"),  # 8 does not divide 20
        ((10, 0), torch.bfloat16, 256, (2, 3, 4), "flash2"),
        ((9, 0), torch.float32, 64, (2, 3, 4), "triton"),
        ((9, 0), torch.float32, 256, (2, 3, 4), "reference"),
        ((9, 0), torch.float64, 64, (2, 3, 4), "reference"),
        ((7, 5), torch.float16, 64, (2, 3, 4), "reference"),
    ],
)
def test_the_choice_on_gpus(capability, dtype, head_dim, installed, expected, monkeypatch):
    pytest.importorskip("triton")

    def load(version):
        if version not in installed:
            raise ImportError(f"version {version} is not installed")

    monkeypatch.setattr(attention_flash, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen_kernel(torch.device("cuda"), dtype, head_dim) == expected


def test_a_broken_flash_attention_does_not_take_the_others_along(monkeypatch):
    def load(version):
        if version == 4:  # as its beta versions do beside another version of what they build on
            raise AttributeError("module 'cutlass' has no attribute 'cute'")

    monkeypatch.setattr(attention_flash, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert chosen_kernel(device, torch.bfloat16, 64) == "flash3"
    assert unavailable_reason("flash4", device, torch.bfloat16, 64) == (
        "flash_attn.cute.interface does not load: AttributeError: module 'cutlass' has no attribute 'cute'"
    )


def test_every_kernel_but_the_reference_says_why_it_cannot_run():
    reasons = {kernel: unavailable_reason(kernel, torch.device("meta"), torch.float32, 64) for kernel in KERNELS}
    assert reasons.pop("reference") is None
    assert reasons.pop("cpu") == "it takes tensors on the CPU, not on meta"
    assert all(reasons.values())
