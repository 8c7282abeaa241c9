"""`poise serve`: the embedded engine behind sockets, asked by poise's own client of vLLM and by plain HTTP."""

import asyncio
import base64
import contextlib
import threading

import httpx2
import numpy as np
import pytest
import torch
from serving import serving

from poise.engine import EmbeddedEngine, EngineError, Servers, VllmEngine
from poise.engine.server import EngineServer
from poise.harmony import byte_tokenizer
from poise.model import GptOss, GptOssConfig, packed_attend, save_model
from poise.model.gpt_oss import top_k_route

TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode("What is 2 + 2?")


def tiny(seed=0, **changes) -> GptOss:
    shape = {
        "vocab_size": TOKENIZER.vocab_size, "hidden_size": 24, "intermediate_size": 20, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "num_experts": 6, "experts_per_token": 2, "sliding_window": 8,
    }  # fmt: skip
    model = GptOss(GptOssConfig(**(shape | changes))).init_weights(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # probabilities far from uniform
    return model


def engine_of(model, **changes) -> EmbeddedEngine:
    arguments = {"stop_ids": TOKENIZER.stop_ids, "return_id": TOKENIZER.return_, "num_slots": 8}
    return EmbeddedEngine(model, **(arguments | {"max_context_tokens": 128, "temperature": 1.0} | changes))


class Served:
    def __init__(self, model, **changes):
        self.engine = engine_of(model, **changes)
        self.server = EngineServer(self.engine, TOKENIZER, name="tiny")

    def app(self):
        return self.server.app


def client(url, *, temperature=1.0, **settings) -> VllmEngine:
    servers = Servers([url], **({"timeout_s": 300.0, "retries": 1, "max_wait_s": 300.0} | settings))
    return VllmEngine(
        servers,
        stop_ids=TOKENIZER.stop_ids,
        vocab_size=TOKENIZER.vocab_size,
        temperature=temperature,
        routes_shape=(3, 2),
    )


def post(url, **arguments):
    return httpx2.post(url, timeout=300.0, **arguments)


def ask(served, work, **settings):
    async def main(url):
        engine = client(url, **settings)
        try:
            return await work(engine)
        finally:
            await engine.close()

    with serving(served) as (url,):
        return asyncio.run(main(url))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_client_samples_what_the_embedded_engine_would(temperature):
    async def work(engine):
        await engine.handshake(max_context_tokens=128)
        served.engine.num_sampled_tokens = 0
        return await asyncio.gather(
            *(engine(PROMPT[: 3 + i], episode_id=f"{i}", seed=2**63 + i, max_tokens=20) for i in range(5))
        )

    served = Served(tiny())
    actions = ask(served, work, temperature=temperature)
    for i, action in enumerate(actions):
        alone = asyncio.run(
            engine_of(tiny(), temperature=temperature)(PROMPT[: 3 + i], episode_id="e", seed=2**63 + i, max_tokens=20)
        )
        assert action.token_ids == alone.token_ids
        assert action.log_probs == pytest.approx(alone.log_probs, abs=1e-5)
        assert np.array_equal(np.sort(action.routes, -1), np.sort(alone.routes, -1))
        assert action.is_stopped == alone.is_stopped


def test_requests_at_the_same_time_share_forwards():
    model = tiny()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    served = Served(model)

    async def work(engine):
        return await asyncio.gather(*(engine(PROMPT, episode_id=f"{i}", seed=i, max_tokens=30) for i in range(6)))

    actions = ask(served, work)
    lengths = [len(action.token_ids) for action in actions]
    assert len(forwards) < sum(lengths) / 2


def reference_scores(model, token_ids):
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = model(
            ids,
            torch.arange(len(ids)),
            packed_attend(torch.tensor([0, len(ids)], dtype=torch.int32), kernel="reference"),
            top_k_route(2),
        )
        log_probs = torch.log_softmax(hidden @ model.lm_head.weight.T, dim=-1)
    return [log_probs[i, token_ids[i + 1]].item() for i in range(len(token_ids) - 1)]


def test_scores_are_those_of_one_full_forward_at_temperature_1():
    scores = ask(Served(tiny()), lambda engine: engine.score(PROMPT), temperature=0.7)
    assert scores == pytest.approx(reference_scores(tiny(), PROMPT), abs=1e-5)


def test_weights_are_pushed_while_requests_run_and_each_token_knows_its_own(tmp_path):
    folder = tmp_path / "new"
    save_model(tiny(1), folder, format="fp32", tokenizer=TOKENIZER.save)
    model, is_frozen = tiny(0), threading.Event()
    served = Served(model, max_context_tokens=512)

    def freeze(*_):
        """Once, from within: whoever pauses it from outside may come too late."""
        if served.engine.num_sampled_tokens >= 5 and not is_frozen.is_set():
            served.engine.pause()
            is_frozen.set()

    model.register_forward_hook(freeze)

    async def work(engine):
        engine.stop_ids = frozenset()  # it goes on to the end
        await engine.set_policy_version(6, mark="run-6")
        url = engine.servers.all[0].url
        assert await engine.read_mark(url) == "run-6"
        task = asyncio.create_task(engine(PROMPT, episode_id="e", seed=1, max_tokens=300))
        await asyncio.to_thread(is_frozen.wait)
        await engine.pause()
        await engine.post("/load_checkpoint", {"path": str(folder), "weight_version": "run-7"})
        await engine.set_policy_version(7, mark="run-7")
        await engine.resume()
        return await task, await engine.score(PROMPT)

    action, scores = ask(served, work)
    assert scores == pytest.approx(reference_scores(tiny(1), PROMPT), abs=1e-5)
    # Each token is explained by the policy whose version it carries, and not by the other.
    assert action.policy_version == 6
    assert action.policy_versions.count(6) >= 5
    assert action.policy_versions == tuple(sorted(action.policy_versions))
    assert action.policy_versions[-1] == 7
    stream = [*PROMPT, *action.token_ids]
    said = {version: reference_scores(tiny(version - 6), stream)[len(PROMPT) - 1 :] for version in (6, 7)}
    expected = [said[version][i] for i, version in enumerate(action.policy_versions)]
    assert action.log_probs == pytest.approx(expected, abs=1e-4)
    assert np.abs(np.subtract(said[6], said[7])).mean() > 0.1


def test_another_model_is_not_loaded_and_nothing_has_changed(tmp_path):
    folder = tmp_path / "other"
    save_model(tiny(1, num_experts=8), folder, format="fp32", tokenizer=TOKENIZER.save)

    async def work(engine):
        for path in (folder, tmp_path / "nowhere"):
            with pytest.raises(EngineError, match=r"refused: 400: .*(another model|cannot be loaded)"):
                await engine.post("/load_checkpoint", {"path": str(path), "weight_version": "x"})
        return await engine.score(PROMPT)

    assert ask(Served(tiny()), work) == pytest.approx(reference_scores(tiny(), PROMPT), abs=1e-5)


def test_pause_freezes_and_resume_goes_on():
    async def work(engine):
        await engine.pause()
        task = asyncio.create_task(engine(PROMPT, episode_id="e", seed=0, max_tokens=5))
        await asyncio.sleep(0.1)
        assert not task.done()
        await engine.resume()
        return await task

    assert ask(Served(tiny()), work).log_probs


def completion(body):
    with serving(Served(tiny())) as (url,):
        return post(f"{url}/v1/completions", json=body)


def test_completions_return_ids_log_probs_and_prompt_log_probs():
    body = {"model": "tiny", "prompt": "What is 2 + 2?", "max_tokens": 9, "temperature": 0.7, "seed": 3, "logprobs": 2}
    answer = completion(body | {"return_token_ids": True, "prompt_logprobs": 0}).json()
    choice = answer["choices"][0]
    action = asyncio.run(engine_of(tiny(), temperature=0.7)(PROMPT, episode_id="e", seed=3, max_tokens=9))
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == list(action.token_ids)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(action.log_probs, abs=1e-5)
    assert choice["text"] == TOKENIZER.decode(action.token_ids[:-1] if action.is_stopped else action.token_ids)
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    said = [row[str(i)]["logprob"] for row, i in zip(rows[1:], PROMPT[1:], strict=True)]
    assert said == pytest.approx(reference_scores(tiny(), PROMPT), abs=1e-5)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * len(action.token_ids)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_routes_from_a_position_on_are_the_end_of_all_routes():
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 1, "ignore_eos": True}}

    def routes(url, start):
        sampling = body["sampling_params"] | {"routed_experts_prompt_start": start}
        answer = post(f"{url}/inference/v1/generate", json=body | {"sampling_params": sampling})
        # verifiers cuts the data out of the text, and finds it by these characters.
        assert '"routed_experts":{"data":"' in answer.text
        sent = answer.json()["choices"][0]["routed_experts"]
        assert (sent["dtype"], sent["start"]) == ("uint8", start)
        return np.frombuffer(base64.b64decode(sent["data"]), np.uint8).reshape(sent["shape"])

    with serving(Served(tiny())) as (url,):
        whole, end = routes(url, 0), routes(url, 5)
        assert whole.shape == (len(PROMPT) + 4 - 1, 3, 2)
        assert np.array_equal(end, whole[5:])
        for start in (len(PROMPT), -1, "x"):
            sampling = {"max_tokens": 4, "routed_experts_prompt_start": start}
            answer = post(f"{url}/inference/v1/generate", json=body | {"sampling_params": sampling})
            assert answer.status_code == 400
            assert "must be a position of the prompt" in answer.json()["error"]["message"]


REFUSED = {
    "top_p": (0.9, "can only be 1.0"),
    "temperature": (0, "positive"),
    "n": (2, "can only be 1"),
    "max_tokens": (0, "from 1"),
    "seed": (2**64, "seed must be"),
    "logprobs": (21, "from 0 to 20"),
    "stop_token_ids": ([10**6], "out of vocabulary"),
    "prompt": ([], "at least one"),
    "stream": (True, "stream"),
    "echo": (True, "echo"),
    "guided_json": ({}, "guided_json not supported"),
}


def test_what_would_sample_from_another_distribution_is_refused():
    base = {"prompt": PROMPT, "max_tokens": 2}
    with serving(Served(tiny())) as (url,):
        for key, (value, reason) in REFUSED.items():
            answer = post(f"{url}/v1/completions", json=base | {key: value})
            assert answer.status_code == 400, key
            assert reason in answer.json()["error"]["message"], key
        too_long = post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 500})
        assert "exceed max_context_tokens 128, the maximum context length" in too_long.json()["error"]["message"]


def test_a_client_that_goes_away_frees_its_slot():
    served = Served(tiny())
    served.engine.stop_ids = frozenset()

    async def work(engine):
        await engine.pause()
        task = asyncio.create_task(engine(PROMPT, episode_id="e", seed=0, max_tokens=50))
        while not served.engine._waiting:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        (request,) = served.engine._waiting
        while not request.future.cancelled():
            await asyncio.sleep(0.005)

    ask(served, work)
