"""The model against Transformers: logits and the gradient of every parameter, with random weights."""

import itertools

import pytest
import torch
from transformers import GptOssConfig as HfConfig
from transformers import GptOssForCausalLM

from poise.model import GptOss, GptOssConfig, packed_attend, top_k_route
from poise.model.rope import RopeConfig

# hidden != intermediate in one, equal in the other: a transposed square projection would pass any check of shapes.
SHAPES = {
    "unequal": {"hidden_size": 48, "intermediate_size": 40},
    "square": {"hidden_size": 48, "intermediate_size": 48},
}
LENGTHS = (310, 1, 33, 140)  # over 300 tokens, and around the window of 32


def make_pair(shape, dtype=torch.float32, **changes):
    """Ours and Transformers' with the same random weights: large sinks, router biases and norms that are not 1."""
    config = GptOssConfig(
        **{
            "vocab_size": 60,
            "num_layers": 4,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "experts_per_token": 3,
            "sliding_window": 32,
            **SHAPES[shape],
            **changes,
        }
    )
    hf = GptOssForCausalLM._from_config(HfConfig(**config.to_hf_dict()), attn_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(hf.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(4 * noise)  # some far above a row's maximum, some far below
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model = GptOss(config).to(dtype)
    model.load_state_dict(hf.state_dict())  # strict: the names are Hugging Face's
    return model, hf


def packed(lengths):
    input_ids = torch.randint(0, 60, (sum(lengths),))
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    return input_ids, position_ids, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_logits_and_every_gradient_equal_transformers(shape, kernel):
    model, hf = make_pair(shape)
    input_ids, position_ids, cu_seqlens = packed(LENGTHS)
    logits = model.lm_head(model(input_ids, position_ids, packed_attend(cu_seqlens, kernel=kernel)))
    hf_logits = torch.cat([hf(ids[None]).logits[0] for ids in input_ids.split(LENGTHS)])
    for own, other in zip(logits.split(LENGTHS), hf_logits.split(LENGTHS), strict=True):
        assert relative_error(own, other) < 2e-5
    targets = torch.randint(0, 60, (sum(LENGTHS),))
    torch.nn.functional.cross_entropy(logits, targets).backward()
    torch.nn.functional.cross_entropy(hf_logits, targets).backward()
    hf_grads = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in model.named_parameters():
        assert hf_grads[name].abs().max() > 0, name
        assert relative_error(parameter.grad, hf_grads[name]) < 1e-4, name


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_kind": "default"},
        {"attention_bias": False},
        {"layer_types": ("full_attention", "full_attention", "sliding_attention", "full_attention")},
        {"swiglu_limit": 1.0, "swiglu_alpha": 1.1, "rms_norm_eps": 0.1},
        {"experts_per_token": 1, "sliding_window": 1},
    ],
)
def test_every_field_of_the_config_counts(changes):
    changes = dict(changes)
    if kind := changes.pop("rope_kind", None):
        changes["rope"] = RopeConfig(kind=kind, theta=1000.0)
    model, hf = make_pair("unequal", **changes)
    input_ids, position_ids, cu_seqlens = packed((70,))
    with torch.no_grad():
        logits = model.lm_head(model(input_ids, position_ids, packed_attend(cu_seqlens)))
        assert relative_error(logits, hf(input_ids[None]).logits[0]) < 2e-5
        default = make_pair("unequal")[0].eval()
        assert default.config != model.config


def test_packed_equals_one_by_one():
    model, _ = make_pair("unequal")
    input_ids, position_ids, cu_seqlens = packed(LENGTHS)
    with torch.no_grad():
        together = model(input_ids, position_ids, packed_attend(cu_seqlens)).split(LENGTHS)
        for ids, expected in zip(input_ids.split(LENGTHS), together, strict=True):
            border = torch.tensor([0, len(ids)], dtype=torch.int32)
            alone = model(ids, torch.arange(len(ids)), packed_attend(border))
            assert relative_error(alone, expected) < 2e-5


def test_bfloat16_stays_close_to_transformers():
    # Both round each layer's result to bfloat16; norms, rope angles and attention are float32 inside.
    model, hf = make_pair("unequal", torch.bfloat16)
    wide, _ = make_pair("unequal")
    wide.load_state_dict(model.state_dict())
    input_ids, position_ids, cu_seqlens = packed((100,))
    with torch.no_grad():
        exact = wide.lm_head(wide(input_ids, position_ids, packed_attend(cu_seqlens)))
        own = model.lm_head(model(input_ids, position_ids, packed_attend(cu_seqlens))).float()
        other = hf(input_ids[None]).logits[0].float()
    own_error = (own - exact).abs().mean()
    assert own_error < 1.2 * (other - exact).abs().mean()


def test_routes_can_be_replayed_and_the_router_still_learns():
    model, _ = make_pair("unequal")
    input_ids, position_ids, cu_seqlens = packed((40,))
    recorded = {}
    choose = top_k_route(3)

    def record(layer, router_logits):
        recorded[layer], weights = choose(layer, router_logits)
        return recorded[layer], weights

    def replay(layer, router_logits):
        ids = recorded[layer].flip(-1)  # the order within a token does not matter
        return ids, router_logits.gather(1, ids).softmax(dim=-1)

    attend = packed_attend(cu_seqlens)
    expected = model(input_ids, position_ids, attend, record)
    actual = model(input_ids, position_ids, attend, replay)
    assert sorted(recorded) == [0, 1, 2, 3]
    assert relative_error(actual, expected) < 1e-5
    actual.square().sum().backward()
    assert all(block.mlp.router.weight.grad.abs().max() > 0 for block in model.model.layers)


def test_top_k_route_by_hand():
    # Logits ln 1, ln 6, ln 2, ln 0.5: the top two are experts 1 and 2 with weights 6/8 and 2/8.
    ids, weights = top_k_route(2)(0, torch.tensor([[1.0, 6.0, 2.0, 0.5]]).log())
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.25]]))


def test_attend_receives_layer_window_and_sinks():
    model, _ = make_pair("unequal")
    calls = []

    def attend(layer, q, k, v, sinks, window):
        calls.append(
            (layer, window, tuple(q.shape), tuple(k.shape), sinks is model.model.layers[layer].self_attn.sinks)
        )
        return q

    model(torch.tensor([1, 2]), torch.tensor([0, 1]), attend)
    assert calls == [(layer, None if layer % 2 else 32, (2, 8, 16), (2, 2, 16), True) for layer in range(4)]


def test_init_weights_is_a_function_of_the_seed():
    config = make_pair("unequal")[0].config
    first, second, other = (GptOss(config).init_weights(seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all()
        elif name.endswith(("bias", "sinks")):
            assert (a == 0).all()
        else:
            assert not torch.equal(a, c), name
    # Standard deviations: 1 / sqrt(48) into the block; out of it also / sqrt(2 * 4 layers).
    block = first.model.layers[0]
    assert block.self_attn.q_proj.weight.std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert block.mlp.experts.gate_up_proj.std().item() == pytest.approx(48**-0.5, rel=0.05)
    assert block.mlp.experts.down_proj.std().item() == pytest.approx(40**-0.5 / 8**0.5, rel=0.05)
    assert first.model.embed_tokens.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert first.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_inputs_must_fit_together(annotations_unchecked):
    model, _ = make_pair("unequal")
    with pytest.raises(ValueError, match="input_ids and position_ids"):
        model(torch.tensor([1, 2]), torch.tensor([0]), lambda *a: a[1])
