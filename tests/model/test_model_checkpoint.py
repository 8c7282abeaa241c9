"""Checkpoint folders: read by Transformers, read back byte for byte, refused with the tensor's name when broken."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from poise.model import CheckpointError, GptOss, GptOssConfig, load_model, packed_attend, save_model
from poise.ops import mxfp4

CONFIG = GptOssConfig(
    vocab_size=70,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=4,
    experts_per_token=2,
    sliding_window=32,
    eos_token_ids=(3, 9),
    pad_token_id=0,
)
EXPERTS = ("gate_up_proj", "down_proj")
FORMATS = ("fp32", "bf16", "mxfp4")


@pytest.fixture
def model():
    model = GptOss(CONFIG).init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_()
    return model


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
@pytest.mark.parametrize("format", FORMATS)
def test_load_save_load_keeps_every_byte(model, tmp_path, format, max_shard_bytes):
    save_model(model, tmp_path / "first", format, max_shard_bytes=max_shard_bytes)
    loaded = load_model(tmp_path / "first")
    assert loaded.config == CONFIG
    save_model(loaded, tmp_path / "second", format, max_shard_bytes=max_shard_bytes)
    assert files(tmp_path / "first") == files(tmp_path / "second")
    again = load_model(tmp_path / "second")
    for (name, a), b in zip(loaded.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    if format == "fp32":
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert ("model.safetensors.index.json" in files(tmp_path / "first")) == (max_shard_bytes < 10**9)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["first", "second"]  # nothing left aside


@pytest.mark.parametrize("format", FORMATS)
def test_transformers_loads_it(model, tmp_path, format):
    save_model(model, tmp_path / "saved", format, max_shard_bytes=100_000)
    quantization = {"quantization_config": Mxfp4Config(dequantize=True)} if format == "mxfp4" else {}
    hf, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **quantization
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    loaded = load_model(tmp_path / "saved")
    state = hf.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(state[name].float(), parameter), name
    assert hf.generation_config.eos_token_id == [3, 9]
    assert hf.generation_config.pad_token_id == 0
    ids = torch.randint(0, 70, (50,))
    border = torch.tensor([0, 50], dtype=torch.int32)
    logits = loaded.lm_head(loaded(ids, torch.arange(50), packed_attend(border)))
    torch.testing.assert_close(logits, hf(ids[None]).logits[0], rtol=1e-4, atol=1e-5)


def test_loads_what_transformers_saves(model, tmp_path):
    save_model(model, tmp_path / "ours", "fp32")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    hf.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    loaded = load_model(tmp_path / "theirs")
    assert loaded.config == CONFIG
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_mxfp4_holds_the_nearest_values_in_openais_layout(model, tmp_path):
    save_model(model, tmp_path / "saved", "mxfp4")
    stored = tensors(tmp_path / "saved")
    prefix = "model.layers.0.mlp.experts."
    assert stored[prefix + "gate_up_proj_blocks"].shape == (4, 192, 2, 16)
    assert stored[prefix + "down_proj_scales"].shape == (4, 64, 3)
    assert stored[prefix + "gate_up_proj_bias"].dtype == torch.bfloat16
    down = model.model.layers[0].mlp.experts.down_proj
    blocks, scales = mxfp4.pack(down[2, :, 5].detach())  # one output channel's row of 96 inputs
    assert torch.equal(stored[prefix + "down_proj_blocks"][2, 5], blocks)
    assert torch.equal(stored[prefix + "down_proj_scales"][2, 5], scales)
    loaded = load_model(tmp_path / "saved", dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    value = loaded.model.layers[0].mlp.experts.down_proj[2, :, 5]
    assert torch.equal(value, mxfp4.unpack(blocks, scales, torch.bfloat16))


def test_a_block_of_any_scale_survives(model, tmp_path):
    # OpenAI's files may hold blocks whose largest code is small: other bytes on saving, the same values on loading.
    save_model(model, tmp_path / "saved", "mxfp4")
    path = tmp_path / "saved" / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stored[name + "_blocks"].fill_(0x1A)  # -1.0 and 0.5 only
    save_file(stored, path, metadata={"format": "pt"})
    loaded = load_model(tmp_path / "saved")
    save_model(loaded, tmp_path / "again", "mxfp4")
    again = load_model(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))


def test_tokenizer_files_travel(model, tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    added = [{"id": 9, "content": "<|call|>"}, {"id": 41, "content": "<|return|>"}]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_text("no tokenizer file")
    save_model(model, tmp_path / "copied", tokenizer=source)
    assert (tmp_path / "copied" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "copied" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    load_model(tmp_path / "copied")
    # The config's own stop ids first, then the tokenizer's that are not among them.
    generation = json.loads((tmp_path / "copied" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [3, 9, 41]

    save_model(model, tmp_path / "written", tokenizer=lambda folder: shutil.copytree(source, folder / "tokenizer"))
    assert (tmp_path / "written" / "tokenizer" / "tokenizer.json").is_file()

    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added[:1]}))
    with pytest.raises(CheckpointError, match=r"<\|return\|>"):
        save_model(model, tmp_path / "no_stop", tokenizer=source)
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        save_model(model, tmp_path / "no_tokenizer", tokenizer=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer", "copied", "written"}


def test_never_overwrites_and_never_leaves_half(model, tmp_path, annotations_unchecked):
    save_model(model, tmp_path / "saved")
    before = files(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="never overwrites"):
        save_model(model, tmp_path / "saved")
    assert files(tmp_path / "saved") == before
    with pytest.raises(ValueError, match="format must be"):
        save_model(model, tmp_path / "other", "int8")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):  # fails after some shards are written
        save_model(model, tmp_path / "other", "mxfp4", max_shard_bytes=20_000)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_mxfp4_needs_whole_blocks(tmp_path):
    narrow = GptOss(GptOssConfig(**{**vars(CONFIG), "intermediate_size": 40})).init_weights(0)
    with pytest.raises(ValueError, match="down_proj has 40 rows"):
        save_model(narrow, tmp_path / "saved", "mxfp4")


def drop(name):
    return lambda stored: stored.pop(name)


def put(name, tensor):
    return lambda stored: stored.update({name: tensor})


NORM, SINKS = "model.norm.weight", "model.layers.1.self_attn.sinks"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("format", "breaks", "words"),
    [
        ("bf16", drop(NORM), f"missing {NORM}"),
        ("bf16", put("model.layers.2.self_attn.sinks", torch.zeros(4)), "unexpected model.layers.2.self_attn.sinks"),
        ("bf16", put(SINKS, torch.zeros(5)), rf"{SINKS} is \[5\], config.json asks for \[4\]"),
        ("bf16", put(GATE_UP, torch.zeros(4, 192, 64)), rf"{GATE_UP} is \[4, 192, 64\].*\[4, 64, 192\]"),
        ("bf16", put(NORM, torch.ones(64, dtype=torch.int32)), f"{NORM} is I32"),
        ("mxfp4", drop(f"{GATE_UP}_scales"), f"missing {GATE_UP}_scales"),
        ("mxfp4", put(GATE_UP, torch.zeros(4, 64, 192)), f"unexpected {GATE_UP}"),
        ("mxfp4", put(f"{GATE_UP}_scales", torch.zeros(4, 192, 2)), f"{GATE_UP}_scales is F32, expected U8"),
    ],
)
def test_a_wrong_tensor_is_named(model, tmp_path, format, breaks, words):
    save_model(model, tmp_path / "saved", format)
    path = tmp_path / "saved" / "model.safetensors"
    stored = load_file(path)
    breaks(stored)
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path / "saved")


def test_a_broken_folder_is_refused(model, tmp_path):
    folder = tmp_path / "saved"
    save_model(model, folder, max_shard_bytes=50_000)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = folder / index["weight_map"][NORM]
    content = shard.read_bytes()

    shard.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=f"{shard.name} is no whole safetensors file"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_model(folder)
    shard.write_bytes(content)
    index["weight_map"]["ghost"] = shard.name
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="promises ghost"):
        load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match="hidden_act"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_model(folder)
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_model(tmp_path / "nowhere")
