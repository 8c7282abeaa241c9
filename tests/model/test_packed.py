"""Models with frozen MXFP4 experts: the numbers of the unpacked ones, and never their memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from poise.model import GptOss, GptOssConfig, load_model, packed_attend, packed_copy, save_model

SHAPE = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "num_experts": 4, "experts_per_token": 2, "sliding_window": 8,
}  # fmt: skip
STACKS = ("gate_up_proj", "down_proj")


def make_model(**changes):
    model = GptOss(GptOssConfig(**{**SHAPE, **changes})).init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_()
    return model


def hidden_states(model, ids):
    border = torch.tensor([0, len(ids)], dtype=torch.int32)
    return model(ids, torch.arange(len(ids)), packed_attend(border))


@pytest.fixture(params=["mxfp4", "fp32"])
def folder(request, tmp_path):
    """A checkpoint that holds the experts packed, or plain and so that packing changes them."""
    save_model(make_model(), tmp_path / "saved", request.param)
    return tmp_path / "saved"


def test_equals_transformers_on_the_unpacked_experts(tmp_path):
    save_model(make_model(), tmp_path / "saved", "mxfp4")
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )  # fmt: skip
    model = load_model(tmp_path / "saved", experts="mxfp4")
    ids = torch.randint(0, 70, (50,))
    logits = model.lm_head(hidden_states(model, ids))
    torch.testing.assert_close(logits, hf(ids[None]).logits[0], rtol=1e-4, atol=1e-5)


def test_the_other_parameters_get_the_gradients_that_they_get_beside_unpacked_experts(folder, tmp_path):
    packed = load_model(folder, experts="mxfp4")
    save_model(packed, tmp_path / "plain", "fp32")
    plain = load_model(tmp_path / "plain")
    frozen = {f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in STACKS}
    assert {n for n, _ in plain.named_parameters()} - {n for n, _ in packed.named_parameters()} == frozen
    ids = torch.randint(0, 70, (33,))
    weights = torch.randn(33, 64)
    for model in (plain, packed):
        (hidden_states(model, ids) * weights).sum().backward()
    assert packed.model.layers[0].mlp.router.weight.grad.abs().max() > 0
    for name, parameter in packed.named_parameters():
        expected = plain.get_parameter(name).grad
        if expected is None:  # the head, which hidden states do not reach
            assert parameter.grad is None
            continue
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("format", ["bf16", "fp32", "mxfp4"])
def test_saving_a_packed_model_saves_the_same(folder, tmp_path, format):
    """As a plain model does that was packed by way of a file."""
    save_model(load_model(folder), tmp_path / "by_file", "mxfp4")
    save_model(load_model(tmp_path / "by_file", dtype=torch.float32), tmp_path / "expected", format)
    save_model(load_model(tmp_path / "by_file", experts="mxfp4"), tmp_path / "actual", format)
    save_model(load_model(folder, dtype=torch.bfloat16, experts="mxfp4"), tmp_path / "rounded", "mxfp4")
    expected, actual = (load_model(tmp_path / name) for name in ("expected", "actual"))
    assert expected.state_dict().keys() == actual.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(value, actual.state_dict()[name]), name
    by_file, rounded = (load_model(tmp_path / name).model.layers[1].mlp.experts for name in ("by_file", "rounded"))
    assert torch.equal(by_file.down_proj, rounded.down_proj)


def test_a_copy_of_a_policy_is_frozen_and_holds_what_the_checkpoint_would(tmp_path):
    model = make_model()
    save_model(model, tmp_path / "saved", "fp32")
    copy, loaded = packed_copy(model), load_model(tmp_path / "saved", experts="mxfp4")
    assert copy.state_dict().keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name
    assert not any(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert copy.lm_head.weight.any()


def test_a_copy_of_what_was_released_packed_is_exact(tmp_path):
    save_model(make_model(), tmp_path / "released", "mxfp4")
    policy = load_model(tmp_path / "released")
    ids = torch.randint(0, 70, (40,))
    with torch.no_grad():
        assert torch.equal(hidden_states(packed_copy(policy), ids), hidden_states(policy, ids))


def peak_bytes(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, result


def test_loading_never_holds_the_unpacked_experts(tmp_path):
    """32 experts of 3 x 64 x 64 beside little else: packed they take 4.25 bits a weight, and one at a time is wide."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_experts": 32, "num_layers": 4, "vocab_size": 8}
    model = make_model(**shape)
    one = 4 * 64 * 128  # bytes of the larger matrix of an expert in float32
    for format in ("mxfp4", "fp32"):
        save_model(model, tmp_path / format, format)
    for source, run in (
        ("mxfp4", lambda: load_model(tmp_path / "mxfp4", experts="mxfp4")),
        ("fp32", lambda: load_model(tmp_path / "fp32", experts="mxfp4")),
        (None, lambda: packed_copy(model)),
    ):
        peak, loaded = peak_bytes(run)
        if source:  # safetensors maps its files into the address space, which counts as an allocation
            peak -= (tmp_path / source / "model.safetensors").stat().st_size
        held = sum(x.numel() * x.element_size() for x in (*loaded.parameters(), *loaded.buffers()))
        packed = sum(x.numel() for x in loaded.buffers())
        assert packed == 4 * 32 * 3 * 64 * 64 * 17 // 32
        assert peak <= held + 12 * one  # the unpacked experts of one layer are 48 such matrices
        ids = torch.randint(0, 8, (16,))
        with torch.no_grad():
            used, _ = peak_bytes(lambda loaded=loaded, ids=ids: hidden_states(loaded, ids))
        assert used <= 12 * one


def test_errors(tmp_path, annotations_unchecked):
    model = make_model(hidden_size=48)
    save_model(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="experts must be 'plain' or 'mxfp4', got 'int8'"):
        load_model(tmp_path / "saved", experts="int8")
    for run in (lambda: load_model(tmp_path / "saved", experts="mxfp4"), lambda: packed_copy(model)):
        with pytest.raises(ValueError, match="needs a hidden_size that is a multiple of 32, got 48"):
            run()
