"""What ``poise doctor`` says of this machine."""

import platform

import pytest
import torch
import transformers

from poise import doctor
from poise.cli import run


@pytest.fixture(scope="module")
def report():
    return {title: dict(rows) for title, rows in doctor.diagnose()}


def test_versions_are_those_that_run(report):
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["transformers"] == transformers.__version__


def test_each_kernel_runs_or_has_a_reason(report):
    rows = report["attention kernels, cpu, float32, head dim 64"]
    assert list(rows) == ["flash4", "flash3", "flash2", "cpu", "triton", "reference", "auto"]
    assert rows["cpu"] == rows["reference"] == "runs"
    assert rows["auto"] == "takes cpu"
    assert all(rows[f"flash{version}"] == "no: it needs an NVIDIA GPU" for version in (2, 3, 4))
    assert rows["triton"].startswith("no: ")


def test_the_kernels_of_experts_and_log_probs(report):
    rows = report["expert kernels, cpu, float32"]
    assert list(rows) == ["loop", "grouped", "reference", "auto"]
    assert rows["loop"] == rows["grouped"] == rows["reference"] == "runs"
    assert rows["auto"].startswith("takes loop; grouped is for bfloat16 on GPUs")
    assert report["log-prob kernels, cpu, float32"]["tiles"].startswith("runs")


def test_the_ratio_is_that_of_the_measured_times(monkeypatch):
    monkeypatch.setattr(doctor, "_matmul_seconds", {torch.float32: 0.002, torch.bfloat16: 0.3}.__getitem__)
    assert doctor.number_types()[1].startswith("a matrix product takes 150x the time of float32's (slower")
    monkeypatch.setattr(doctor, "_matmul_seconds", {torch.float32: 0.002, torch.bfloat16: 0.0005}.__getitem__)
    assert doctor.number_types()[1].startswith("a matrix product takes 0.25x the time of float32's (this CPU has")


def test_extras_name_what_is_missing(monkeypatch):
    needed = ["torch>=2", 'poise[gym]; extra == "dev"', 'pytest>=8; extra == "dev"', "no-such-thing>=1; extra == 'gym'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needed)
    assert doctor.extras() == [
        ("dev", "installed (pytest)"),
        ("gym", "missing no-such-thing: pip install 'poise[gym]'"),
    ]


def test_a_sandbox_that_cannot_start_is_said_loudly(monkeypatch):
    def fails():
        raise doctor.SandboxError("no fork")

    monkeypatch.setattr(doctor, "protection", fails)
    assert doctor.sandbox() == ("protection", "NONE, snippets cannot run: no fork")


def test_the_command_prints_every_section(capsys):
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    for title in (
        "versions",
        "devices",
        "attention kernels, cpu",
        "expert kernels, cpu",
        "products on the CPU",
        "sandbox",
        "extras",
    ):
        assert f"\n{title}" in printed
    assert "  auto           takes cpu" in printed
