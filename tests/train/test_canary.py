"""The canary against a fake server: our own model with parameters tampered with, as updates in the wild leave them."""

import asyncio
import copy

import pytest
import torch

from poise.model import GptOss, GptOssConfig, RopeConfig
from poise.train.canary import CanaryError, choose_canary, trainer_scores, verify
from poise.train.diagnosis import parameter_groups, put_back, swapped

LAYERS = 3


def random_model(seed: int) -> GptOss:
    config = GptOssConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=LAYERS, num_heads=4, num_kv_heads=2,
        head_dim=16, num_experts=6, experts_per_token=2, sliding_window=8, rope=RopeConfig(),
    )  # fmt: skip
    model = GptOss(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks", "router.weight", "lm_head.weight", "norm.weight")):
                parameter.add_(noise * (0.1 if "router.bias" in name else 0.5))
    return model


@pytest.fixture(scope="module")
def old():
    return random_model(1)


@pytest.fixture(scope="module")
def new():
    return random_model(2)


@pytest.fixture(scope="module")
def canary(new):
    return choose_canary(new, seed=5, max_tokens=200)


def check(canary, new, old, server, noise=None, **arguments):
    """The trainer has ``new``, the server's model is ``server``; ``noise``: what rounding adds to its scores."""
    older = {"as before the update": dict(old.named_parameters()).__getitem__}
    sequences = dict(zip(canary.sequences, trainer_scores(server, canary), strict=True))

    async def score(token_ids):
        scores = sequences[tuple(token_ids)]
        return (scores if noise is None else scores + next(noise)[: len(scores)]).tolist()

    settings = {"tolerance": 2e-5, "older": older, "where": "the server"} | arguments
    return asyncio.run(verify(canary, new, score, **settings))


def mixture(new, old, is_stale):
    """``new`` with the parameters of ``old`` where ``is_stale(name)``."""
    model = copy.deepcopy(new)
    with torch.no_grad():
        for (name, parameter), stale in zip(model.named_parameters(), old.parameters(), strict=True):
            if is_stale(name):
                parameter.copy_(stale)
    return model


def moved(model):
    """As a rehearsal moves it: noise of a quarter of each parameter's size."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.square().mean().sqrt()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size / 4)
    return model


@pytest.mark.parametrize("stale", [None, "layers.1.self_attn", "layers.0.mlp.experts"], ids=str)
def test_what_half_types_hide_is_found_where_it_is_looked_for(canary, new, stale):
    """A server whose log-probs are 0.03 nats off by rounding, while a part of the rehearsal's weights stays behind."""
    server = mixture(moved(new), new, lambda name: stale is not None and stale in name)
    noise = iter(torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 0.04)
    settings = {"tolerance": 0.1, "noise": noise, "thorough": True}
    if stale is None:
        assert 0.02 < check(canary, moved(new), new, server, **settings) < 0.05
    else:
        diagnosis, _ = diagnosis_of(canary, moved(new), new, server, **settings)
        assert diagnosis.groups == (f"the {'attention of layer 1' if 'attn' in stale else 'experts of layer 0'}",)


def diagnosis_of(canary, new, old, server, **arguments):
    before = [parameter.clone() for parameter in new.parameters()]
    with pytest.raises(CanaryError) as caught:
        check(canary, new, old, server, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, new.parameters(), strict=True)), "the trainer's model changed"
    return caught.value.diagnosis, str(caught.value)


def test_the_same_weights_pass(canary, new, old):
    assert check(canary, new, old, copy.deepcopy(new)) < 1e-6


def test_every_expert_is_reached_and_the_window_is_left_behind(canary, new):
    assert canary.unreached == ()
    assert all(len(sequence) > 2 * new.config.sliding_window for sequence in canary.sequences)


def test_experts_that_no_token_reaches_are_named(new):
    # A bias of -1e4 keeps every token away from expert 4 of layer 1.
    model = copy.deepcopy(new)
    with torch.no_grad():
        model.model.layers[1].mlp.router.bias[4] = -1e4
    assert (1, 4) in choose_canary(model, seed=5, max_tokens=200).unreached


def test_a_short_server_gets_short_sequences(new):
    assert {len(sequence) for sequence in choose_canary(new, seed=5, max_tokens=20).sequences} == {19}


# What each fault leaves stale, and what the diagnosis must call it. The groups of one layer are all in this table.
FAULTS = {
    "stock reload_weights of GPT-OSS": (
        lambda name: ".experts." in name or name.endswith("sinks"),
        "the experts and the sinks of every layer",
    ),
    "stale experts of one layer": (lambda name: "layers.1.mlp.experts" in name, "the experts of layer 1"),
    "stale sinks": (lambda name: name.endswith("sinks"), "the sinks of every layer"),
    "stale sinks of one layer": (lambda name: name == "model.layers.2.self_attn.sinks", "the sinks of layer 2"),
    "stale router of one layer": (lambda name: "layers.0.mlp.router" in name, "the router of layer 0"),
    "stale attention of one layer": (
        lambda name: "layers.2.self_attn" in name and "sinks" not in name,
        "the attention of layer 2",
    ),
    "stale norms of one layer": (lambda name: "layers.1." in name and "layernorm" in name, "the norms of layer 1"),
    "stale embedding": (lambda name: "embed_tokens" in name, "the embedding"),
    "stale head": (lambda name: "lm_head" in name, "the head"),
    "stale final norm": (lambda name: name == "model.norm.weight", "the final norm"),
    "nothing arrived": (lambda name: True, "every parameter"),
    "broke off before layer 2": (
        lambda name: "layers.2." in name or name in ("model.norm.weight", "lm_head.weight"),
        "everything from layer 2 on",
    ),
    "only the end arrived": (lambda name: "embed" in name or "layers.0." in name, "everything before layer 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(canary, new, old, fault):
    is_stale, expected = FAULTS[fault]
    diagnosis, message = diagnosis_of(canary, new, old, mixture(new, old, is_stale))
    assert diagnosis.groups == (expected,)
    assert diagnosis.source == "as before the update"
    assert diagnosis.explained
    assert diagnosis.after < 1e-5 < diagnosis.before
    assert f"it has {expected}, as before the update" in message


def test_groups_that_make_no_pattern_are_all_found(canary, new, old):
    stale = ("layers.0.mlp.experts", "layers.2.mlp.router", "layers.1.self_attn.sinks")
    diagnosis, _ = diagnosis_of(canary, new, old, mixture(new, old, lambda name: any(part in name for part in stale)))
    assert set(diagnosis.groups) == {"the experts of layer 0", "the router of layer 2", "the sinks of layer 1"}
    assert diagnosis.explained


@pytest.mark.parametrize(("layers", "expected"), [((0, 1, 2), "every layer"), ((1,), "layer 1")], ids=["all", "one"])
def test_swapped_gate_and_up_are_named(canary, new, old, layers, expected):
    server = copy.deepcopy(new)
    with torch.no_grad():
        for layer in layers:
            experts = server.model.layers[layer].mlp.experts
            for parameter in (experts.gate_up_proj, experts.gate_up_proj_bias):
                even, odd = parameter[..., ::2].clone(), parameter[..., 1::2].clone()
                parameter[..., ::2], parameter[..., 1::2] = odd, even
    diagnosis, message = diagnosis_of(canary, new, old, server)
    assert diagnosis.groups == (f"the experts of {expected}",)
    assert "with gate and up swapped" in message


def test_another_model_is_not_explained(canary, new, old):
    diagnosis, message = diagnosis_of(canary, new, old, random_model(3))
    assert not diagnosis.explained
    assert "no older parameters explain it" in message or "which is not all" in message


def test_older_weights_of_the_right_age_are_named(canary, new, old):
    first = random_model(4)
    older = {
        "of the update before": dict(old.named_parameters()).__getitem__,
        "as it was started": dict(first.named_parameters()).__getitem__,
    }
    server = mixture(new, first, lambda name: ".experts." in name)
    diagnosis, _ = diagnosis_of(canary, new, old, server, older=older)
    assert (diagnosis.groups, diagnosis.source) == (("the experts of every layer",), "as it was started")


def test_without_older_weights_the_difference_alone_stops_the_run(canary, new, old):
    diagnosis, message = diagnosis_of(canary, new, old, mixture(new, old, lambda name: "lm_head" in name), older={})
    assert diagnosis.groups == ()
    assert "does not have the trainer's weights" in message


def test_scores_are_those_of_transformers(new, canary):
    # The trainer's side of the comparison, against an independent implementation.
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**new.config.to_hf_dict(), attn_implementation="eager")
    theirs = transformers.GptOssForCausalLM(config)
    theirs.load_state_dict(new.state_dict())
    for sequence, scores in zip(canary.sequences, trainer_scores(new, canary), strict=True):
        ids = torch.tensor(sequence)
        with torch.no_grad():
            log_probs = theirs(ids[None]).logits[0, :-1].double().log_softmax(-1)
        torch.testing.assert_close(scores, log_probs.gather(1, ids[1:, None])[:, 0], rtol=0, atol=1e-4)


def test_every_parameter_is_in_one_group(new):
    names = [name for group in parameter_groups(new).values() for name in group]
    assert sorted(names) == sorted(name for name, _ in new.named_parameters())
    assert len(parameter_groups(new)) == 5 * LAYERS + 3


def test_swapped_by_hand():
    assert swapped(torch.tensor([[0, 1, 2, 3]])).tolist() == [[1, 0, 3, 2]]


def test_the_model_is_restored_when_scoring_fails(new):
    before = [parameter.clone() for parameter in new.parameters()]
    with pytest.raises(ZeroDivisionError), put_back(new, []):
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(before, new.parameters(), strict=True))
