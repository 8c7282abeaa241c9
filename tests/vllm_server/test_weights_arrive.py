"""Updates of a real vLLM server: whole by each route, and caught by the canary where they are not."""

import asyncio
import contextlib
import copy
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from conftest import CONTEXT, STOP_IDS, VOCAB

from poise.engine.http import Outage, Servers
from poise.engine.vllm import VllmEngine
from poise.model import save_model
from poise.model.gpt_oss import packed_attend
from poise.train.canary import CanaryError
from poise.train.diagnosis import swapped
from poise.train.sync import weight_sync
from poise.train.weights import FolderRoute, SyncError, TransferRoute, server_kind

TOLERANCE = 1e-4


def sequences(seed=3, lengths=(3, 40, 300)):
    """Shorter and much longer than the window."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def trainer_log_probs(model, token_ids, temperature=1.0):
    ids = torch.tensor(token_ids)
    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
    hidden = model(ids, torch.arange(len(ids)), packed_attend(cu_seqlens))
    logits = hidden @ model.lm_head.weight.T / temperature
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


@asynccontextmanager
async def engine_at(*processes, temperature=1.0, routes_shape=None):
    servers = Servers([process.url for process in processes], timeout_s=600, retries=1, max_wait_s=1800)
    arguments = {"stop_ids": STOP_IDS, "vocab_size": VOCAB, "temperature": temperature, "routes_shape": routes_shape}
    engine = VllmEngine(servers, **arguments)
    try:
        yield engine
    finally:
        await engine.close()


async def scores(engine, token_ids):
    """An answer 500 closes its connection, which the next request may still find open."""
    for _ in range(3):
        with contextlib.suppress(Outage):
            return await engine.score(token_ids)
    return await engine.score(token_ids)


async def largest_difference(engine, model):
    """Between the server's prompt log-probs and the trainer's."""
    worst = 0.0
    for token_ids in sequences():
        theirs = torch.tensor(await scores(engine, token_ids))
        worst = max(worst, float((theirs - trainer_log_probs(model, token_ids)).abs().max()))
    return worst


def make_route(name, servers, kind, folder):
    return FolderRoute(servers, kind, folder) if name == "folder" else TransferRoute(servers, kind, timeout_s=300)


@pytest.mark.parametrize("name", ["folder", "transfer"])
def test_an_update_is_whole_and_can_be_taken_back(server, fresh_b, model_a, model_b, tmp_path, name):
    async def run():
        async with engine_at(server) as engine, engine_at(fresh_b) as fresh:
            route = make_route(name, engine.servers, await server_kind(engine.servers), tmp_path / "weights")
            assert await largest_difference(engine, model_a) < TOLERANCE
            assert await largest_difference(engine, model_b) > 1
            await route.push(model_b)
            assert await largest_difference(engine, model_b) < TOLERANCE
            for token_ids in sequences(seed=4):
                updated, loaded = await engine.score(token_ids), await fresh.score(token_ids)
                assert max(abs(a - b) for a, b in zip(updated, loaded, strict=True)) < TOLERANCE
            await route.push(model_a)
            assert await largest_difference(engine, model_a) < TOLERANCE
            older = route.older()
            assert all(torch.equal(older(key), value) for key, value in model_b.named_parameters())
            await route.give(server.url)
            assert await largest_difference(engine, model_a) < TOLERANCE
            await route.close()
            assert name == "transfer" or not list((tmp_path / "weights").iterdir())

    asyncio.run(run())


def test_two_servers_get_the_weights_over_one_group(server, fresh_b, model_a, model_b):
    async def run():
        async with engine_at(server, fresh_b) as engine:
            route = TransferRoute(engine.servers, await server_kind(engine.servers), timeout_s=300)
            await route.push(model_a)
            for process in (server, fresh_b):
                async with engine_at(process) as one:
                    assert await largest_difference(one, model_a) < TOLERANCE
            # One of them forgets, and gets the weights alone; the next push reaches both again.
            await TransferRoute(Servers([fresh_b.url]), route.kind, timeout_s=300).push(model_b)
            await route.give(fresh_b.url)
            async with engine_at(fresh_b) as one:
                assert await largest_difference(one, model_a) < TOLERANCE
            await route.push(model_a)
            await TransferRoute(Servers([fresh_b.url]), route.kind, timeout_s=300).push(model_b)

    asyncio.run(run())


def test_an_update_that_a_trainer_left_open_is_in_nobodys_way(server, model_a, model_b):
    """As one does that is killed between two requests."""

    async def run():
        async with engine_at(server) as engine:
            route = TransferRoute(engine.servers, await server_kind(engine.servers), timeout_s=300)
            await route.push(model_b)
            await engine.post("/start_weight_update", {})
            with pytest.raises(SyncError, match="already active"):
                await route.push(model_a)
            assert await largest_difference(engine, model_b) < TOLERANCE
            await route.push(model_a)
            assert await largest_difference(engine, model_a) < TOLERANCE

    asyncio.run(run())


def mixed(new, old, is_stale):
    model = copy.deepcopy(new)
    with torch.no_grad():
        for (name, parameter), stale in zip(model.named_parameters(), old.parameters(), strict=True):
            if is_stale(name):
                parameter.copy_(stale)
    return model


def with_swapped_gate_and_up(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.model.layers:
            for parameter in (block.mlp.experts.gate_up_proj, block.mlp.experts.gate_up_proj_bias):
                parameter.copy_(swapped(parameter))
    return model


FAULTS = {
    "stale experts of one layer": (lambda name: "layers.2.mlp.experts" in name, ("the experts of layer 2",)),
    "stale sinks": (lambda name: name.endswith("sinks"), ("the sinks of every layer",)),
    "half an update": (
        lambda name: "layers.2" in name or "layers.3" in name or name in ("model.norm.weight", "lm_head.weight"),
        ("everything from layer 2 on",),
    ),
}


@pytest.mark.parametrize("fault", [*FAULTS, "swapped gate and up", "stock reload_weights"])
def test_the_canary_catches(server, model_a, model_b, tmp_path, fault):
    """The trainer has B; the server had A before."""

    async def run():
        async with engine_at(server) as engine:
            sync = await weight_sync(engine, model_b, folder=tmp_path / "weights", max_context_tokens=CONTEXT)
            await sync.sync(model_a, 1, mark="a")
            if fault == "stock reload_weights":
                save_model(model_b, tmp_path / "b", "fp32")
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "b")}}
                assert await engine.post("/collective_rpc", body) == [{"results": [None]}]  # it says nothing
                expected = ("the experts and the sinks of every layer",)
            elif fault == "swapped gate and up":
                await sync.route.push(with_swapped_gate_and_up(model_b))
                expected = ("the experts of every layer",)
            else:
                is_stale, expected = FAULTS[fault]
                await sync.route.push(mixed(model_b, model_a, is_stale))
            with pytest.raises(CanaryError) as caught:
                await sync.prove(model_b)
            assert caught.value.diagnosis.groups == expected
            assert caught.value.diagnosis.explained
            await sync.sync(model_b, 2, mark="b")
            assert sync.difference < TOLERANCE / 5
            assert await engine.read_mark(server.url) == "b"
            await sync.sync(model_a, 3, mark="a")

    asyncio.run(run())


def test_the_rehearsal_moves_every_parameter_and_leaves_the_trainer_alone(server, model_a):
    async def run():
        before = [parameter.detach().clone() for parameter in model_a.parameters()]
        async with engine_at(server) as engine:
            sync = await weight_sync(engine, model_a, folder=None, max_context_tokens=CONTEXT)
            await sync.rehearse(model_a, 0, mark="step 0")
            assert await largest_difference(engine, model_a) < TOLERANCE
            assert await engine.read_mark(server.url) == "step 0"
            # What the server had before the last push is far from what it has now.
            moved, current = sync.route.older(), dict(model_a.named_parameters())
            assert all(float((moved(name) - value.detach()).abs().max()) > 0.01 for name, value in current.items())
        assert all(torch.equal(a, b) for a, b in zip(before, model_a.parameters(), strict=True))

    asyncio.run(run())


@pytest.mark.parametrize("name", ["folder", "transfer"])
def test_another_models_weights_are_refused_and_the_server_goes_on(server, model_a, tmp_path, name):
    async def run():
        async with engine_at(server) as engine:
            route = make_route(name, engine.servers, await server_kind(engine.servers), tmp_path)
            other = type(model_a)(replace(model_a.config, num_experts=6)).init_weights(0)
            with pytest.raises(SyncError, match="refused, the model is as it was"):
                await route.push(other)
            assert await largest_difference(engine, model_a) < TOLERANCE
            await route.push(model_a)
            assert await largest_difference(engine, model_a) < TOLERANCE

    asyncio.run(run())


def test_sampled_tokens_have_the_trainers_log_probs_and_routes(server, model_a):
    """At temperature 0.7, and far past the window of 16."""

    async def run():
        config = model_a.config
        shape = (config.num_layers, config.experts_per_token)
        async with engine_at(server, temperature=0.7, routes_shape=shape) as engine:
            prompts = sequences(seed=5, lengths=(4, 30, 200))
            calls = [engine(p, episode_id=str(i), seed=i, max_tokens=120) for i, p in enumerate(prompts)]
            return prompts, await asyncio.gather(*calls)

    prompts, actions = asyncio.run(run())
    assert max(len(action.token_ids) for action in actions) > 32
    for prompt, action in zip(prompts, actions, strict=True):
        stream = [*prompt, *action.token_ids]
        expected = trainer_log_probs(model_a, stream, temperature=0.7)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(action.log_probs), expected, rtol=0, atol=TOLERANCE)
        routes = []

        def route(layer, router_logits, routes=routes):
            top, ids = router_logits.topk(model_a.config.experts_per_token, dim=-1)
            routes.append(ids)
            return ids, top.softmax(dim=-1)

        ids = torch.tensor(stream[:-1])
        with torch.no_grad():
            cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
            model_a(ids, torch.arange(len(ids)), packed_attend(cu_seqlens), route)
        mine = torch.stack(routes, dim=1).sort(dim=-1).values
        assert torch.equal(torch.tensor(action.routes).long().sort(dim=-1).values, mine)
