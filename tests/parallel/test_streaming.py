"""Weights leave a mesh tensor by tensor: whole, in the names the servers load, and never many at a time."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_transfer import FakeTransfer
from largest import LiveTensors
from ranks import on_ranks, split_model, whole_model
from serving import serving
from starlette.responses import JSONResponse

from poise.config import ParallelConfig
from poise.engine import Servers
from poise.model import load_model
from poise.parallel import local_part, make_mesh
from poise.train import broadcast
from poise.train.weights import FolderRoute, ServerKind, SyncError, TransferRoute, served_shapes, served_tensors

# So many layers that the model is many times its largest tensor, an expert stack.
SHAPE = {"num_layers": 10, "num_experts": 4}
MESHES = {"data": (2, 1, 1), "sequence": (1, 2, 1), "expert": (1, 1, 2), "data and expert": (2, 1, 2)}
KIND = ServerKind(dtype=torch.bfloat16, device="cpu")  # so that a gathered tensor is no view of a float32 part


def mesh_of(degrees):
    data, sequence, expert = degrees
    degrees = ParallelConfig(data_degree=data, sequence_degree=sequence, expert_degree=expert)
    return make_mesh(degrees, torch.device("cpu"))


def routes_of(mesh, url, folder):
    async def tell(url, path):
        assert (path / "model.safetensors.index.json").is_file()  # it is whole when a server hears of it

    return {
        "transfer": TransferRoute(Servers([url]), KIND, timeout_s=300.0, mesh=mesh),
        "folder": FolderRoute(Servers([url]), KIND, folder / "weights", tell=tell, mesh=mesh, shard_bytes=1),
    }


def push(degrees, url, folder):
    """The peak of each route on this rank, and of a mesh that gathers everything first."""
    mesh = mesh_of(degrees)
    model = split_model(mesh, **SHAPE)
    peaks = {}
    for name, route in routes_of(mesh, url, folder).items():
        with LiveTensors(local_part(p) for p in model.parameters()) as live:
            asyncio.run(route.push(model))
        peaks[name] = live.peak
    with LiveTensors(local_part(p) for p in model.parameters()) as live:
        everything = dict(served_tensors(model, torch.bfloat16, mesh))
    peaks["all at once"] = live.peak
    shapes = {name: list(tensor.shape) for name, tensor in everything.items()}
    assert served_shapes(model, mesh) == shapes
    return peaks


@pytest.mark.parametrize("name", MESHES)
def test_no_rank_holds_more_than_a_few_tensors(name, tmp_path):
    fake, degrees = FakeTransfer(), MESHES[name]
    with serving(fake) as (url,):
        by_rank = on_ranks(2 if name in ("data", "sequence", "expert") else 4, push, degrees, url, tmp_path)
    model = whole_model(**SHAPE)
    largest = max(p.numel() for p in model.parameters()) * 2
    total = sum(p.numel() for p in model.parameters()) * 2
    assert total > 10 * largest
    for peaks in by_rank:
        # What is gathered, the parts it is put together of, and what is made of it for its way.
        assert largest <= peaks["transfer"] < 4 * largest
        assert largest <= peaks["folder"] < 4 * largest
        assert peaks["all at once"] >= total, "the test can see a whole copy"
    sent = dict(served_tensors(model, torch.bfloat16))
    assert list(fake.received) == list(sent)
    assert all(torch.equal(fake.received[key], value) for key, value in sent.items())
    assert fake.announced == {key: list(value.shape) for key, value in sent.items()}
    (folder,) = (tmp_path / "weights").iterdir()
    for key, value in load_model(folder, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[key].bfloat16()), key


def push_in_vain(degrees, url):
    mesh = mesh_of(degrees)
    model = split_model(mesh)
    route = TransferRoute(Servers([url]), KIND, timeout_s=300.0, mesh=mesh)
    with pytest.raises(SyncError) as caught:
        asyncio.run(route.push(model))
    with pytest.raises(SyncError, match="a mesh keeps no copy"):
        asyncio.run(route.give(url))
    return str(caught.value)


def test_a_server_that_gives_up_leaves_no_rank_waiting():
    with serving(FakeTransfer(gives_up=5)) as (url,):
        first, second = on_ranks(2, push_in_vain, MESHES["data"], url)
    assert "the worker has no more memory" in first
    assert first == second


def test_nobody_waits_for_a_group_that_a_server_does_not_join():
    class Refuses(FakeTransfer):
        async def init(self, request):
            return JSONResponse({"error": "no group for me"}, status_code=400)

    with serving(Refuses()) as (url,), pytest.raises(SyncError, match="no group for me"):
        asyncio.run(TransferRoute(Servers([url]), KIND, timeout_s=60.0).push(whole_model()))
    assert "process group" in {thread.name for thread in threading.enumerate()}, "the loop waited for it to the end"


def test_a_server_says_why_it_hung_up_also_where_that_comes_later():
    class HangsUp(FakeTransfer):
        async def update(self, request):
            self.group = None
            await asyncio.sleep(0.3)
            return JSONResponse({"error": "the worker has no more memory"}, status_code=400)

    with serving(HangsUp()) as (url,), pytest.raises(SyncError, match="the worker has no more memory"):
        asyncio.run(TransferRoute(Servers([url]), KIND, timeout_s=300.0).push(whole_model()))


class LateGroup:
    """A process group whose last broadcast is seen to end long after it did, as on a busy machine."""

    def __init__(self, group, num_tensors):
        self.group, self.num_left = group, num_tensors

    def broadcast(self, tensors, options):
        work = self.group.broadcast(tensors, options)
        self.num_left -= 1
        polls = iter(range(0 if self.num_left else 500))  # 0.25 s at least: the servers' answers are here by then
        return SimpleNamespace(
            is_completed=lambda: next(polls, None) is None and work.is_completed(), wait=lambda: work.wait()
        )


def test_an_answer_may_come_before_the_last_broadcast_is_seen_to_end(monkeypatch):
    fake, model = FakeTransfer(), whole_model()
    make_group, num_tensors = broadcast._process_group, len(served_shapes(model))
    monkeypatch.setattr(broadcast, "_process_group", lambda *arguments: LateGroup(make_group(*arguments), num_tensors))
    with serving(fake) as (url,):
        asyncio.run(TransferRoute(Servers([url]), KIND, timeout_s=300.0).push(model))
    sent = dict(served_tensors(model, torch.bfloat16))
    assert all(torch.equal(fake.received[key], value) for key, value in sent.items())


def test_a_push_that_is_cancelled_leaves_no_group_in_the_middle_of_an_update():
    class Holding(FakeTransfer):
        """Its first update begins and never ends."""

        async def update(self, request):
            if held.is_set():
                return await super().update(request)
            held.set()
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            return JSONResponse({})

    fake, model, held = Holding(), whole_model(), threading.Event()
    with serving(fake) as (url,):

        async def run():
            route = TransferRoute(Servers([url]), KIND, timeout_s=300.0)
            first = asyncio.create_task(route.push(model))
            await asyncio.to_thread(held.wait)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert route._group is None
            await route.push(model)

        asyncio.run(run())
    assert fake.received.keys() == dict(served_tensors(model, torch.bfloat16)).keys()


def test_one_process_keeps_what_it_sent_for_a_server_that_comes_back():
    fake, model = FakeTransfer(), whole_model()
    with serving(fake) as (url,):

        async def run():
            route = TransferRoute(Servers([url]), KIND, timeout_s=300.0)
            before = dict(served_tensors(model, torch.bfloat16))
            await route.push(model)
            assert route.older() is None
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            await route.push(model)
            pushed, fake.received = fake.received, {}
            await route.give(url)
            assert all(torch.equal(fake.received[key], value) for key, value in pushed.items())
            stack = "model.layers.1.mlp.experts.down_proj"
            expected = torch.stack([before[stack.replace("experts", f"experts.{i}")] for i in range(4)])
            assert torch.equal(route.older()(stack), expected)

        asyncio.run(run())
    sent = dict(served_tensors(model, torch.bfloat16))
    assert fake.received.keys() == sent.keys()
    assert all(torch.equal(fake.received[key], value) for key, value in sent.items())
