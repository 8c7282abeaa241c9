"""What is sent to a vLLM server, and the parts of the plugin that need no vLLM."""

import asyncio
import importlib
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from poise.config import ConfigError
from poise.engine.http import Servers
from poise.model import GptOss, GptOssConfig, RopeConfig, save_model
from poise.train.weights import (
    FolderRoute,
    ServerKind,
    SyncError,
    require_servable,
    served_tensors,
    server_kind,
    stored_parameters,
)

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"
CONFIG = GptOssConfig(
    vocab_size=40, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    num_experts=3, experts_per_token=2, rope=RopeConfig(),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return GptOss(CONFIG).init_weights(0)


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PLUGIN), *sys.path])
    return lambda name: importlib.import_module(f"poise_vllm.{name}")


def hf_config():
    """As vLLM's workers see it."""
    return SimpleNamespace(**CONFIG.to_hf_dict())


def test_experts_are_sent_one_by_one_and_the_rest_as_it_is(model):
    sent = dict(served_tensors(model, torch.bfloat16))
    stacks = [name for name, _ in model.named_parameters() if ".mlp.experts." in name]
    assert len(sent) == len(list(model.parameters())) + len(stacks) * (CONFIG.num_experts - 1)
    for name, parameter in model.named_parameters():
        if name in stacks:
            prefix, part = name.rsplit(".", 1)
            for expert in range(CONFIG.num_experts):
                assert torch.equal(sent[f"{prefix}.{expert}.{part}"], parameter[expert].bfloat16())
        else:
            assert torch.equal(sent[name], parameter.bfloat16())


def test_the_plugin_expects_what_is_sent(model, plugin):
    shapes = {name: tuple(tensor.shape) for name, tensor in served_tensors(model, torch.float32)}
    assert plugin("update").expected_shapes(hf_config()) == shapes


def test_the_plugin_refuses_anything_else(model, plugin):
    update = plugin("update")
    expected = update.expected_shapes(hf_config())
    update.check_shapes(expected, expected)
    wrong = {**expected, "model.norm.weight": (13,), "surplus": (1,)}
    del wrong["lm_head.weight"]
    with pytest.raises(update.UpdateError, match="the model is as it was") as caught:
        update.check_shapes(wrong, expected)
    for part in ("missing lm_head.weight", "unknown surplus", "model.norm.weight is [13], the model's is [12]"):
        assert part in str(caught.value)


def test_the_plugin_reads_a_checkpoint_expert_by_expert(model, plugin, tmp_path):
    # In shards as well: the index and not the file's name says where a tensor is.
    save_model(model, tmp_path / "sharded", "fp32", max_shard_bytes=4000)
    save_model(model, tmp_path / "single", "fp32")
    sent = dict(served_tensors(model, torch.float32))
    for name in ("sharded", "single"):
        folder = plugin("folder")
        read = dict(folder.checkpoint_tensors(tmp_path / name))
        assert read.keys() == sent.keys()
        assert all(torch.equal(read[key], value) for key, value in sent.items())
        assert folder.checkpoint_shapes(tmp_path / name) == {key: tuple(value.shape) for key, value in sent.items()}
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    with pytest.raises(FileNotFoundError, match="holds neither"):
        list(folder.checkpoint_tensors(tmp_path))


def test_sinks_between_two_bfloat16_numbers_attend_exactly(plugin):
    """Against a softmax in float64 with the sink itself; the sinks are 0, a bfloat16 number, and two that are not."""
    sinks_module = plugin("sinks")
    sinks = torch.tensor([0.0, 0.5, 1.2311, 2.7233])
    below, above, share = sinks_module.bracket(sinks)
    assert below.dtype == above.dtype == torch.bfloat16
    assert share.tolist()[:2] == [0, 0]
    assert (below.double() <= sinks.double()).all()
    assert (sinks.double() <= above.double()).all()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 4, 10, generator=generator, dtype=torch.float64)
    values = torch.randn(4, 10, 6, generator=generator, dtype=torch.float64)

    def attention(sinks):
        column = sinks.double()[None, :, None].expand(7, 4, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("thn,hnc->thc", weights, values)

    exact = attention(sinks)
    # share has float32's 7 digits, and tells apart outputs that differ in the third.
    torch.testing.assert_close(
        sinks_module.between(attention(below), attention(above), share.double()), exact, rtol=1e-8, atol=0
    )
    assert float((attention(below) - exact).abs().max()) > 1e-4
    # A head that saw no value at all stays at 0.
    nothing = torch.zeros(7, 4, 6)
    assert torch.equal(sinks_module.between(nothing, nothing, share), nothing)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope": RopeConfig(attention_factor=2.0)}, "rope attention_factor"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"attention_bias": False}, "attention_bias"),
        ({"swiglu_limit": 6.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"layer_types": ("full_attention", "full_attention")}, "layer_types"),
    ],
    ids=["rope", "eps", "bias", "limit", "alpha", "layers"],
)
def test_a_model_that_vllm_would_compute_differently_is_refused(change, named):
    require_servable(CONFIG)
    require_servable(replace(CONFIG, rope=RopeConfig(kind="default")))  # the plugin makes it a YaRN of factor 1
    with pytest.raises(ConfigError, match=f"its {named} is"):
        require_servable(replace(CONFIG, **change))


def test_single_parameters_of_a_checkpoint(model, tmp_path):
    save_model(model, tmp_path / "sharded", "fp32", max_shard_bytes=4000)
    save_model(model, tmp_path / "single", "bf16")
    for name, dtype in (("sharded", torch.float32), ("single", torch.bfloat16)):
        parameter = stored_parameters(tmp_path / name)
        assert all(torch.equal(parameter(key), value.to(dtype)) for key, value in model.named_parameters())
    with pytest.raises(KeyError, match="nothing"):
        parameter("nothing")


class Answers:
    """In the place of ``Servers``: answers the plugin's calls, and keeps them."""

    def __init__(self, *urls, workers=({"dtype": "float32", "device": "cpu"},)):
        self.all = Servers(urls).all
        self.workers, self.calls = workers, []

    async def ask(self, url, method, path, **arguments):
        self.calls.append((url, path, arguments["json"]))
        if arguments["json"]["method"] == "poise_describe":
            return {"results": [{"quantization": None} | worker for worker in self.workers]}
        folder = Path(arguments["json"]["args"][0])
        return {"results": [{"loaded": load_file(folder / "model.safetensors")["model.norm.weight"]}]}


def test_each_server_reads_the_newest_checkpoint_and_two_are_kept(model, tmp_path):
    async def run():
        servers = Answers("http://one:1", "http://two:2")
        kind = await server_kind(servers)
        assert kind == ServerKind(dtype=torch.float32, device="cpu")
        route = FolderRoute(servers, kind, tmp_path / "weights")
        norm = dict(model.named_parameters())["model.norm.weight"]
        assert route.older() is None
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                norm.fill_(value)
            await route.push(model)
        folders = [call[2]["args"][0] for call in servers.calls if call[2]["method"] == "poise_load_folder"]
        assert len(folders) == 6
        assert len(set(folders)) == 3
        kept = sorted((tmp_path / "weights").iterdir())
        assert [str(path) for path in kept] == sorted(set(folders))[1:]
        assert route.older()("model.norm.weight").tolist() == [2.0] * 12
        await route.give("http://two:2")
        assert servers.calls[-1][0] == "http://two:2"
        assert servers.calls[-1][2]["args"] == [str(kept[-1])]
        await route.close()
        assert not list((tmp_path / "weights").iterdir())

    asyncio.run(run())


def test_a_push_that_is_cancelled_ends_when_nothing_is_written_any_more(model, tmp_path):
    """A thread cannot be stopped: whoever cleans up then would remove a folder that is being written."""
    route = FolderRoute(Servers(["http://127.0.0.1:1"]), ServerKind(dtype=torch.float32, device="cpu"), tmp_path / "w")
    write, begun, goes_on = route._write, threading.Event(), threading.Event()

    def slowly(model):
        begun.set()
        goes_on.wait()
        write(model)

    route._write = slowly

    async def run():
        push = asyncio.create_task(route.push(model))
        await asyncio.to_thread(begun.wait)
        push.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        is_over = push.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        await route.close()
        return is_over

    assert not asyncio.run(run())
    assert list((tmp_path / "w").iterdir()) == []


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (({"dtype": "float32", "device": "cpu"}, {"dtype": "bfloat16", "device": "cpu"}), "differ"),
        (({"dtype": "float16", "device": "cuda:0"},), "float16"),
        (({"dtype": "bfloat16", "device": "cuda:0", "quantization": "mxfp4"},), "packed as mxfp4"),
    ],
    ids=["unlike", "half", "packed"],
)
def test_servers_that_cannot_be_served_alike_are_refused(workers, message):
    with pytest.raises(SyncError, match=message):
        asyncio.run(server_kind(Answers("http://one:1", workers=workers)))


def test_workers_of_one_server_on_several_gpus_are_alike():
    workers = ({"dtype": "bfloat16", "device": "cuda:0"}, {"dtype": "bfloat16", "device": "cuda:1"})
    kind = asyncio.run(server_kind(Answers("http://one:1", workers=workers)))
    assert kind == ServerKind(dtype=torch.bfloat16, device="cuda")
