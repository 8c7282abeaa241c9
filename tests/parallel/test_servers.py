"""Servers that follow a mesh: every shape of it gives them the weights, whole, and sees what they kept."""

import asyncio

import pytest
import torch
from ranks import batches_of, config_of, on_ranks, split_model, whole_model
from serving import serving

from poise.config import Config, EngineConfig, ParallelConfig, RolloutConfig, RunConfig
from poise.console import Console
from poise.engine import EmbeddedEngine
from poise.engine.server import EngineServer
from poise.harmony import byte_tokenizer
from poise.model import GptOss, packed_attend, save_model
from poise.parallel import full_tensor, make_mesh
from poise.servers import connect
from poise.train.canary import CanaryError
from poise.train.trainer import Trainer

TOKENIZER = byte_tokenizer()
CONTEXT = 96
SHAPE = {"vocab_size": TOKENIZER.vocab_size}
MESHES = {"data": (2, 1, 1), "sequence": (1, 2, 1), "expert": (1, 1, 2)}
LENGTHS = (23, 9, 25)
TOLERANCE = 1e-4


class Served:
    """`poise serve` in a thread, with weights of its own."""

    def __init__(self, folder):
        self.model = GptOss(whole_model(**SHAPE).config).init_weights(9)
        save_model(self.model, folder, "fp32")
        engine = EmbeddedEngine(
            self.model, stop_ids=TOKENIZER.stop_ids, return_id=TOKENIZER.return_, num_slots=8,
            max_context_tokens=CONTEXT, temperature=1.0,
        )  # fmt: skip
        self.server = EngineServer(engine, TOKENIZER, name=str(folder))

    def app(self):
        return self.server.app


def mesh_of(degrees):
    data, sequence, expert = degrees
    degrees = ParallelConfig(data_degree=data, sequence_degree=sequence, expert_degree=expert)
    return make_mesh(degrees, torch.device("cpu"))


def engine_of(model, urls, folder, mesh):
    config = Config(
        rollout=RolloutConfig(max_context_tokens=CONTEXT, max_action_tokens=16), run=RunConfig(folder=str(folder)),
        engine=EngineConfig(kind="vllm", urls=tuple(urls), max_wait_s=600.0, retries=1),
    )  # fmt: skip
    return connect(model, TOKENIZER, config, Console(is_silent=True), mesh)


def whole(model, mesh):
    """On this rank alone, whatever the mesh."""
    copy = GptOss(model.config)
    with torch.no_grad():
        for (name, part), target in zip(model.named_parameters(), copy.parameters(), strict=True):
            target.copy_(full_tensor(name, part.detach(), mesh, torch.float32))
    return copy


@torch.no_grad()
def log_probs(model, token_ids):
    ids = torch.tensor(token_ids)
    borders = torch.tensor([0, len(ids)], dtype=torch.int32)
    hidden = model(ids, torch.arange(len(ids)), packed_attend(borders, "reference"))
    return (hidden @ model.lm_head.weight.T).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()


async def follow(mesh, url, folder):
    """One update of the trainer, and what the server then scores; after it a server that kept some of the old."""
    model = split_model(mesh, **SHAPE)
    engine = engine_of(model, [url], folder / "runs", mesh)
    sync = await engine.handshake()
    await engine.update()
    trainer = Trainer(model, config_of(), mesh=mesh)  # as in a run, after forward passes of the canary
    old, first = whole(model, mesh), sync.difference
    trainer.step(batches_of(LENGTHS))
    engine.new_policy_version(1)
    await engine.update()
    new, second = whole(model, mesh), sync.difference
    tokens = torch.randint(TOKENIZER.vocab_size, (50,), generator=torch.Generator().manual_seed(mesh.rank)).tolist()
    theirs = await engine.client.score(tokens)
    action = await engine(tokens, episode_id=f"{mesh.rank}", seed=mesh.rank, max_tokens=8)
    scores = log_probs(new, [*tokens, *action.token_ids])
    result = {
        "canary": [first, second],
        "score": max(abs(a - b) for a, b in zip(theirs, scores, strict=False)),
        "sampled": max(abs(a - b) for a, b in zip(action.log_probs, scores[len(tokens) - 1 :], strict=True)),
        "moved": max(abs(a - b) for a, b in zip(log_probs(old, tokens), scores, strict=False)),
        "version": action.policy_version,
        "parameters": dict(new.named_parameters()),
        "caught": [],
    }
    mark = await engine.client.read_mark(url)
    for is_stale in (lambda name: True, lambda name: ".1.mlp.experts." in name, lambda name: name.endswith("sinks")):
        mixture = dict(new.named_parameters()) | {n: p for n, p in old.named_parameters() if is_stale(n)}
        if mesh.is_first:
            path = folder / f"mixture{len(result['caught'])}"
            save_model(new, path, "fp32", tensors=mixture.items())
            body = {"path": str(path), "weight_version": mark}  # it claims to have the new ones
            await engine.client.servers.ask(url, "POST", "/load_checkpoint", json=body)
        mesh.gather_from_all(None)
        with pytest.raises(CanaryError) as caught:
            await sync.prove(model)
        diagnosis = caught.value.diagnosis
        result["caught"].append((diagnosis.groups, diagnosis.source, str(caught.value)))
    result["restored"] = all(
        torch.equal(a, b) for a, b in zip(whole(model, mesh).parameters(), new.parameters(), strict=True)
    )
    await engine.close()
    return result


def follow_on_mesh(degrees, url, folder):
    return asyncio.run(follow(mesh_of(degrees), url, folder))


@pytest.mark.parametrize("name", MESHES)
def test_a_server_has_the_weights_of_a_mesh_and_what_it_keeps_is_named(name, tmp_path):
    served = Served(tmp_path / "start")
    with serving(served) as (url,):
        first, second = on_ranks(2, follow_on_mesh, MESHES[name], url, tmp_path)
    for result in (first, second):
        assert max(result["canary"]) < 2e-5
        assert result["score"] < TOLERANCE
        assert result["sampled"] < TOLERANCE
        assert result["moved"] > 100 * TOLERANCE
        assert result["version"] == 1
        assert result["restored"], "the diagnosis left the trainer's weights changed"
        found = [(groups, source) for groups, source, _ in result["caught"]]
        assert [groups for groups, _ in found] == [
            ["every parameter"], ["the experts of layer 1"], ["the sinks of every layer"]
        ]  # fmt: skip
        assert {source for _, source in found} == {"of the update before"}
    assert first["caught"] == second["caught"]
    assert not list((tmp_path / "runs").iterdir()), "what was written for the servers is gone"
    # The same step on one process.
    trainer = Trainer(whole_model(**SHAPE), config_of())
    trainer.step(batches_of(LENGTHS))
    for key, value in trainer.model.named_parameters():
        torch.testing.assert_close(torch.as_tensor(first["parameters"][key]), value.detach(), rtol=0, atol=1e-5)


async def lose_and_restore(mesh, url, folder):
    """The server loses its weights while the first rank has nothing to do with it any more."""
    model = split_model(mesh, **SHAPE)
    engine = engine_of(model, [url], folder / "runs", mesh)
    await engine.handshake()
    await engine.update()
    mark = await engine.client.read_mark(url)
    tokens, token_ids = [1, 2, 3, 4, 5], None
    if mesh.rank == 1:
        body = {"path": str(folder / "start"), "weight_version": "default"}
        await engine.client.servers.ask(url, "POST", "/load_checkpoint", json=body)
        await engine.client.close()  # connections end with a server's process
        action = await engine(tokens, episode_id="e", seed=3, max_tokens=20)
        assert await engine.client.read_mark(url) == mark
        token_ids = [*tokens, *action.token_ids]
        mine = log_probs(whole_model(**SHAPE), token_ids)[len(tokens) - 1 :]
        assert max(abs(a - b) for a, b in zip(action.log_probs, mine, strict=True)) < TOLERANCE
    mesh.gather_from_all(None)
    # The next update is everybody's again.
    trainer = Trainer(model, config_of(), mesh=mesh)
    trainer.step(batches_of(LENGTHS))
    engine.new_policy_version(1)
    await engine.update()
    await engine.close()
    return token_ids


def lose_and_restore_on_mesh(degrees, url, folder):
    return asyncio.run(lose_and_restore(mesh_of(degrees), url, folder))


def test_one_rank_alone_gives_a_server_that_came_back_its_weights(tmp_path):
    with serving(Served(tmp_path / "start")) as (url,):
        _, tokens = on_ranks(2, lose_and_restore_on_mesh, MESHES["data"], url, tmp_path)
    assert len(tokens) > 5
