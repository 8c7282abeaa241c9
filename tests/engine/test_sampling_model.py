"""Decode steps on prepared matrices: the model's own numbers, also after its parameters moved."""

import asyncio

import pytest
import torch

from poise.engine import EmbeddedEngine
from poise.engine.prepared import SamplingModel, paying_matrices
from poise.model import GptOss, GptOssConfig, RopeConfig
from poise.model.gpt_oss import packed_attend
from poise.model.packed import packed_copy
from poise.ops import prepared

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
CONFIG = GptOssConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    num_experts=4, experts_per_token=2, sliding_window=8, rope=RopeConfig(), pad_token_id=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Prepared and used whatever the CPU and the sizes."""
    monkeypatch.setattr(prepared, "is_exact", lambda: True)
    monkeypatch.setattr(prepared, "MIN_WORK", 1)
    monkeypatch.setattr(prepared, "MIN_ELEMENTS", 1)


@pytest.fixture
def model():
    model = GptOss(CONFIG).init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    return model


@torch.no_grad()
def trainer_log_probs(model, token_ids):
    """In float64, on a model of its own."""
    exact = GptOss(model.config).double()
    exact.load_state_dict(model.state_dict())
    ids = torch.tensor(token_ids)
    hidden = exact(ids, torch.arange(len(ids)), packed_attend(torch.tensor([0, len(ids)], dtype=torch.int32)))
    return exact.lm_head(hidden).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def sampled(engine, prompts):
    async def run():
        return await asyncio.gather(
            *(engine(p, episode_id=str(i), seed=i, max_tokens=20) for i, p in enumerate(prompts))
        )

    return asyncio.run(run())


def require_trainers(engine, model):
    """Sampled log-probs are the trainer's."""
    prompts = [[1, 2, 3], [4] * 11, list(range(20))]
    for prompt, action in zip(prompts, sampled(engine, prompts), strict=True):
        expected = trainer_log_probs(model, [*prompt, *action.token_ids])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(action.log_probs).double(), expected, rtol=0, atol=1e-5)


def test_sampled_tokens_have_the_trainers_log_probs_before_and_after_an_update(model):
    engine = EmbeddedEngine(model, stop_ids=(), return_id=-1, num_slots=3, max_context_tokens=64)
    require_trainers(engine, model)
    assert engine._sampling_model.current() is not model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    engine.new_policy_version(1)
    require_trainers(engine, model)


@pytest.mark.parametrize("how", ["in place", "by an optimizer", "by loading", "by other storage"])
def test_parameters_that_moved_are_prepared_again(model, how):
    sampling = SamplingModel(model, 8)
    before = sampling.current()
    assert sampling.current() is before
    experts = model.model.layers[1].mlp.experts
    if how == "in place":
        with torch.no_grad():
            experts.down_proj[2, 3, 4] += 1
    elif how == "by an optimizer":
        optimizer = torch.optim.AdamW([experts.down_proj], foreach=True)
        experts.down_proj.grad = torch.ones_like(experts.down_proj)
        optimizer.step()
    elif how == "by loading":
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    else:
        experts.down_proj.data = experts.down_proj.data * 2
    after = sampling.current()
    assert after is not before
    rows = torch.randn(5, 64)
    got = after.model.layers[1].mlp.experts.down.matrices[2].product(rows, None)
    torch.testing.assert_close(got, rows @ experts.down_proj[2].detach(), rtol=0, atol=1e-5)


def test_all_other_modules_are_the_models_own_and_it_keeps_its_own(model):
    twin = SamplingModel(model, 8).current()
    assert twin.model.embed_tokens is model.model.embed_tokens
    assert twin.model.norm is model.model.norm
    for one, other in zip(twin.model.layers, model.model.layers, strict=True):
        assert one.mlp.router is other.mlp.router
        assert one.self_attn.sinks is other.self_attn.sinks
        assert one.self_attn.q_proj is not other.self_attn.q_proj
        assert type(other.self_attn.q_proj).__name__ == "Linear"
        assert one.mlp.experts.experts is other.mlp.experts


def test_it_is_given_up(model):
    sampling = SamplingModel(model, 8)
    before = sampling.current()
    sampling.forget()
    assert sampling._prepared is None
    assert sampling.current() is not before


def test_packed_experts_stay_packed(model):
    packed = packed_copy(model)
    assert SamplingModel(packed, 8).current() is packed


def test_counts_of_what_pays(monkeypatch):
    """By hand: 2 layers of 4 experts; 32 x 64 a matrix of an expert; q and o 32 x 32, k and v 32 x 16, head 32 x 50."""
    cpu = torch.device("cpu")
    assert paying_matrices(CONFIG, 8, torch.float32, cpu) == {
        "experts": (24, 2048), "q_proj": (2, 1024), "k_proj": (2, 512), "v_proj": (2, 512), "o_proj": (2, 1024),
        "lm_head": (1, 1600),
    }  # fmt: skip
    # 8 tokens are 4 rows an expert.
    monkeypatch.setattr(prepared, "MIN_WORK", 4 * 2048)
    assert set(paying_matrices(CONFIG, 8, torch.float32, cpu)) == {"experts", "q_proj", "o_proj", "lm_head"}
    monkeypatch.setattr(prepared, "MIN_WORK", 4 * 2048 + 1)
    assert set(paying_matrices(CONFIG, 8, torch.float32, cpu)) == {"lm_head"}
    assert not paying_matrices(CONFIG, 8, torch.bfloat16, cpu)
