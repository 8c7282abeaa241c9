"""Engines that go wrong in one known way each: the diagnosis must name it. The damage is done to the engine's weights,
config or modules, by other code than the ablations."""

import copy

import numpy as np
import pytest
import torch
from injected import damaged, diagnosed, make_model, moved, sample

from poise.config import Config
from poise.mismatch.diagnosis import Trial, ranked, verdict
from poise.mismatch.forward import Forward, batches_of, log_probs
from poise.model import RopeConfig, load_model, save_model
from poise.train.trainer import Trainer


def leave(layer, block):
    pass


def no_sinks(layer, block):
    block.self_attn.sinks.fill_(-50.0)


def no_router_bias(layer, block):
    block.mlp.router.bias.zero_()


def no_attention_bias(layer, block):
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(block.self_attn, name).bias.zero_()


def no_expert_bias(layer, block):
    block.mlp.experts.gate_up_proj_bias.zero_()
    block.mlp.experts.down_proj_bias.zero_()


def gate_up_swapped(layer, block):
    for stack in (block.mlp.experts.gate_up_proj, block.mlp.experts.gate_up_proj_bias):
        gate, up = stack[..., 0::2].clone(), stack[..., 1::2].clone()
        stack[..., 0::2], stack[..., 1::2] = up, gate


def gate_up_in_halves(layer, block):
    for stack in (block.mlp.experts.gate_up_proj, block.mlp.experts.gate_up_proj_bias):
        first, second = stack.clone().chunk(2, dim=-1)
        stack[..., 0::2], stack[..., 1::2] = first, second


def scaled_by_hidden(layer, block):
    # 64 channels / 4 heads = 16 in place of the head's 8.
    block.self_attn.q_proj.weight.mul_((8 / 16) ** 0.5)
    block.self_attn.q_proj.bias.mul_((8 / 16) ** 0.5)


def plain_rope(**changes):
    return RopeConfig(**({"theta": 1000.0, "original_context": 64, "factor": 8.0} | changes))


# (cause, damage to each block, other config of the engine)
DAMAGES = [
    ("sinks removed", no_sinks, {}),
    ("window one longer", leave, {"sliding_window": 9}),
    ("window one shorter", leave, {"sliding_window": 7}),
    ("no window", leave, {"sliding_window": 10_000}),
    ("sliding and full layers swapped", leave,
     {"layer_types": ("full_attention", "sliding_attention")}),
    ("YaRN factor off", leave, {"rope": plain_rope(attention_factor=1.0)}),
    ("YaRN off", leave, {"rope": plain_rope(kind="default")}),
    ("YaRN ramp rounded", leave, {"rope": plain_rope(truncate=True)}),
    ("RoPE theta 10000", leave, {"rope": plain_rope(theta=10_000.0)}),
    ("attention scaled by hidden size / heads", scaled_by_hidden, {}),
    ("attention biases missing", no_attention_bias, {}),
    ("router bias missing", no_router_bias, {}),
    ("top 1 experts instead of 2", leave, {"experts_per_token": 1}),
    ("top 3 experts instead of 2", leave, {"experts_per_token": 3}),
    ("gate and up swapped", gate_up_swapped, {}),
    ("gate and up in halves", gate_up_in_halves, {}),
    ("swiglu limit missing", leave, {"swiglu_limit": 1e6}),
    ("plain silu", leave, {"swiglu_alpha": 1.0}),
    ("expert biases missing", no_expert_bias, {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def previous(model):
    return moved(model, 0.02, seed=9)


@pytest.mark.parametrize(("cause", "damage", "config"), DAMAGES, ids=[cause for cause, _, _ in DAMAGES])
def test_names_what_was_done_to_the_engine(model, cause, damage, config):
    diagnosis = diagnosed(model, damaged(model, damage, **config))
    assert diagnosis.cause == (cause,), diagnosis.sentence
    best, second = diagnosis.trials[:2]
    assert best.explained > 0.9999
    assert second.rms > 100 * best.rms
    assert best.rms < 20 * diagnosis.rounding < diagnosis.rms


def test_the_same_weights_differ_by_rounding_only(model):
    diagnosis = diagnosed(model, copy.deepcopy(model))
    assert diagnosis.cause == ()
    assert diagnosis.trials == ()  # nothing to explain, nothing tried
    assert diagnosis.sentence.startswith("no mismatch beyond rounding")
    assert diagnosis.rms < 2e-5


def test_other_weights_are_explained_by_nothing(model):
    diagnosis = diagnosed(model, make_model(seed=5))
    assert diagnosis.cause == ()
    assert "explains the mismatch; the nearest" in diagnosis.sentence


def bf16_router(router, arguments, output):
    # In float64, rounded where a bf16 product rounds.
    x, weight, bias = (t.bfloat16().double() for t in (arguments[0], router.weight, router.bias))
    return (x @ weight.T + bias).float().bfloat16().float()


def bf16_head(model):
    model.lm_head.bfloat16()
    model.model.norm.register_forward_hook(lambda norm, arguments, output: output.bfloat16())


def bf16_head_operands(model):
    model.lm_head.bfloat16().float()
    model.model.norm.register_forward_hook(lambda norm, arguments, output: output.bfloat16().float())


def test_names_a_router_in_bf16(model):
    engine = copy.deepcopy(model)
    for block in engine.model.layers:
        block.mlp.router.register_forward_hook(bf16_router)
    assert diagnosed(model, engine).cause == ("router in bf16",)


def test_names_a_head_in_bf16(model):
    for damage, cause in ((bf16_head, "head in bf16"), (bf16_head_operands, "head's operands in bf16")):
        diagnosis = diagnosed(model, copy.deepcopy(model), prepare=damage)
        assert diagnosis.cause == (cause,), diagnosis.sentence


def test_names_weights_and_arithmetic_in_bf16(model):
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16().float())
    assert diagnosed(model, rounded).cause == ("weights in bf16",)
    # The same weights: all that is left is arithmetic, whose last digits depend on the order of sums.
    assert diagnosed(rounded, copy.deepcopy(model).bfloat16()).cause == ("everything in bf16",)


def test_names_experts_in_mxfp4(model, tmp_path):
    # The trainer holds bf16 numbers, and the engine serves a checkpoint whose experts are packed.
    trainer = copy.deepcopy(model).bfloat16().float()
    save_model(trainer, tmp_path / "packed", format="mxfp4")
    assert diagnosed(trainer, load_model(tmp_path / "packed")).cause == ("experts in MXFP4",)


def test_names_the_temperature(model):
    for engine_temperature, cause in ((1.0, "temperature not applied"), (0.49, "temperature applied twice")):
        diagnosis = diagnosed(model, model, temperature=0.7, engine_temperature=engine_temperature)
        assert diagnosis.cause == (cause,)


OLD = {
    "old experts": ("mlp.experts.",),
    "old sinks": ("self_attn.sinks",),
    "old router": ("mlp.router.",),
    "old experts and sinks": ("mlp.experts.", "self_attn.sinks"),
    "old attention": ("self_attn.",),
}


def stale(model, previous, prefixes, layers):
    engine = copy.deepcopy(model)
    state = engine.state_dict()
    for name, value in previous.state_dict().items():
        parts = name.split(".", 3)  # model.layers.N.rest
        if parts[1] == "layers" and int(parts[2]) in layers and parts[3].startswith(prefixes):
            state[name] = value
    engine.load_state_dict(state)
    return engine


@pytest.mark.parametrize("cause", OLD)
def test_names_what_a_sync_lost(model, previous, cause):
    diagnosis = diagnosed(model, stale(model, previous, OLD[cause], {0, 1}), previous=previous)
    assert diagnosis.cause == (cause,), diagnosis.sentence


def test_names_a_sync_that_never_arrived_and_one_that_lost_a_layer(model, previous):
    assert diagnosed(model, previous, previous=previous).cause == ("all weights old",)
    half = diagnosed(model, stale(model, previous, OLD["old experts"], {1}), previous=previous)
    assert half.cause == ("old experts, layer 1 only",), half.sentence


def test_names_two_causes(model):
    def both(layer, block):
        no_sinks(layer, block)
        no_router_bias(layer, block)

    diagnosis = diagnosed(model, damaged(model, both))
    assert set(diagnosis.cause) == {"sinks removed", "router bias missing"}
    assert diagnosis.sentence.startswith("two causes: ")


def test_names_a_cause_beneath_bf16(model):
    # The engine computes in bf16 and has lost its sinks: the larger of the two is named, alone or with the other.
    diagnosis = diagnosed(model, damaged(model, no_sinks).bfloat16())
    assert "sinks removed" in diagnosis.cause, diagnosis.sentence


def test_a_bf16_trainer_and_a_bf16_engine_differ_by_rounding(model):
    half = copy.deepcopy(model).bfloat16()
    assert diagnosed(half, copy.deepcopy(half)).sentence.startswith("no mismatch beyond rounding")
    assert diagnosed(half, damaged(model, no_sinks).bfloat16()).cause == ("sinks removed",)


def test_the_forward_is_the_trainers(model):
    batches = batches_of(sample(model, num=2))
    own = log_probs(Forward(model=model, temperature=0.7), batches)
    trainer = Trainer(model, Config())
    with torch.no_grad():
        theirs = [trainer.log_probs(batch, temperature=0.7)[0][batch.response_mask] for batch in batches]
    assert np.array_equal(own, torch.cat(theirs).double().numpy())


def test_trying_leaves_the_model_as_it_is(model, previous):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = batches_of(sample(model, num=1))
    forward = Forward(model=model, temperature=1.0)
    said = log_probs(forward, batches)
    diagnosed(model, damaged(model, no_sinks), previous=previous)
    assert np.array_equal(log_probs(forward, batches), said)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


# --- the verdict alone ---


def trial_of(name: str, rms: float, base: float = 1.0) -> Trial:
    return Trial(name=name, advice="look there", rms=rms, k3=0.0, explained=1 - rms**2 / base**2)


def test_verdict():
    # Of two that leave no more than rounding (3 x 1e-3), the one listed first, though the other leaves less.
    trials = ranked([trial_of("narrow", 2.5e-3), trial_of("wide", 1e-3), trial_of("other", 0.9)], 1e-3)
    assert [t.name for t in trials] == ["narrow", "wide", "other"]
    sentence, cause = verdict(trials, rounding=1e-3)
    assert cause == ("narrow",)
    assert "(not to be told apart here from: wide)" in sentence
    # 1 - 0.8^2 = 0.36 of the squared difference is too little.
    sentence, cause = verdict(ranked([trial_of("a", 0.8), trial_of("b", 1.2)], 1e-3), rounding=1e-3)
    assert cause == ()
    assert "none of 2 ablations explains the mismatch; the nearest, a, takes away 36%" in sentence
    # 1 - 0.5^2 = 0.75; the runner-up leaves 0.9^2 = 0.81, more than twice 0.25.
    sentence, cause = verdict(ranked([trial_of("b", 0.9), trial_of("a", 0.5)], 1e-3), rounding=1e-3)
    assert cause == ("a",)
    assert "a explains 75.00% of the squared difference: look there; the next best, b, explains 19%" in sentence
    # 0.6^2 = 0.36 is less than twice 0.25: no margin.
    sentence, cause = verdict(ranked([trial_of("a", 0.5), trial_of("b", 0.6)], 1e-3), rounding=1e-3)
    assert cause == ("a",)
    assert "not to be told apart here from: b" in sentence
