"""The client of SGLang against a server on a real socket that speaks its documented protocol."""

import asyncio
import base64

import numpy as np
import pytest
from fake_vllm import EXPERTS_PER_TOKEN, LAYERS, STOPS, VOCAB, FakeVllm, log_softmax
from serving import serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poise.engine import EngineError, Servers
from poise.engine.sglang import SglangEngine

PROMPT = [3, 1, 4, 1, 5]


class FakeSglang:
    """The table of ``FakeVllm``, with the bodies that SGLang documents."""

    def __init__(self, defect=""):
        self.inner, self.defect = FakeVllm(defect), defect
        self.seen, self.calls, self.mark = [], [], "default"

    def app(self):
        posts = ("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/update_weight_version")
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/health", lambda request: Response()),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "x", "max_model_len": 4096}]})),
                Route("/get_model_info", lambda request: JSONResponse({"weight_version": self.mark})),
                *(Route(path, self.called, methods=["POST"]) for path in posts),
            ]
        )

    async def called(self, request):
        body = await request.json()
        self.calls.append((request.url.path, body))
        self.mark = body.get("new_version", self.mark)
        failed = request.url.path == "/update_weights_from_disk" and self.defect == "no weights"
        return JSONResponse({"success": not failed, "message": "no such folder"})

    async def generate(self, request):
        body = await request.json()
        self.seen.append(body)
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if max(prompt) >= VOCAB:
            return JSONResponse({"error": {"message": "greater than the vocab size"}}, status_code=400)
        (choice,) = self.inner.answer(
            prompt,
            {
                "temperature": sampling["temperature"], "seed": sampling.get("sampling_seed"),
                "max_tokens": sampling["max_new_tokens"], "stop_token_ids": sampling.get("stop_token_ids", []),
                "logprobs": body.get("top_logprobs_num", 0),
            },
        )["choices"]  # fmt: skip
        ids = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content")
        finish = (
            {"type": "length", "length": len(ids or [])} if choice["finish_reason"] == "length" else {"type": "stop"}
        )
        meta = {"finish_reason": {"type": "abort"} if choice["finish_reason"] == "abort" else finish}
        if content is not None:
            named = [int(e["token"].removeprefix("token_id:")) for e in content]
            meta["output_token_logprobs"] = [[e["logprob"], i, None] for e, i in zip(content, named, strict=True)]
            meta["output_top_logprobs"] = [
                [[t["logprob"], int(t["token"].removeprefix("token_id:")), None] for t in e["top_logprobs"]]
                for e in content
            ]
        if body.get("logprob_start_len") == 0:
            rows = [log_softmax(self.inner.table[i][:VOCAB]) for i in prompt[:-1]]
            meta["input_token_logprobs"] = [[None, prompt[0], None]] + [
                [float(row[token]), token, None] for row, token in zip(rows, prompt[1:], strict=True)
            ]
        if body.get("return_routed_experts") and self.defect != "no routes":
            rows = len(prompt) + len(ids or []) - 1
            routes = np.arange(rows * LAYERS * EXPERTS_PER_TOKEN, dtype=np.int32) % 7
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return JSONResponse({"text": "", "output_ids": ids, "meta_info": meta})


def with_client(work, fake, *, routes=False, temperature=1.0):
    async def main(url):
        engine = SglangEngine(
            Servers([url], timeout_s=300.0, retries=1, max_wait_s=300.0),
            stop_ids=STOPS, vocab_size=VOCAB, temperature=temperature,
            routes_shape=(LAYERS, EXPERTS_PER_TOKEN) if routes else None,
        )  # fmt: skip
        try:
            return await work(engine)
        finally:
            await engine.close()

    with serving(fake) as (url,):
        return asyncio.run(main(url))


async def act(engine):
    return await engine(PROMPT, episode_id="e", seed=2**63 + 1, max_tokens=6)


def test_it_samples_tokens_with_the_log_probs_of_the_tempered_distribution():
    fake = FakeSglang()
    action = with_client(act, fake, temperature=0.7, routes=True)
    stream = [*PROMPT, *action.token_ids]
    expected = [log_softmax(fake.inner.table[stream[i - 1]] / 0.7)[stream[i]] for i in range(5, len(stream))]
    assert action.log_probs == pytest.approx(expected, abs=1e-12)
    # Row 1, layer 0 and place 0 is entry 6 of 0, 1, 2, ... modulo 7.
    assert action.routes[1].tolist() == [[6, 0], [1, 2], [3, 4]]
    assert len(action.routes) == len(stream) - 1
    (body,) = fake.seen
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == sorted(STOPS)
    assert {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "no_stop_trim": True}.items() <= sampling.items()
    assert "ignore_eos" not in sampling  # it would switch off the stop ids too
    assert sampling["sampling_seed"] == 1


def test_scores_are_the_log_probs_of_the_prompt():
    fake = FakeSglang()
    scores = with_client(lambda engine: engine.score(PROMPT), fake, temperature=0.5)
    expected = [log_softmax(fake.inner.table[a])[b] for a, b in [(3, 1), (1, 4), (4, 1), (1, 5)]]
    assert scores == pytest.approx(expected, abs=1e-12)


def test_an_honest_server_passes_the_handshake():
    with_client(lambda engine: engine.handshake(max_context_tokens=1024), FakeSglang(), routes=True)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("no ids", "without token ids"),
        ("one id less", "token ids and"),
        ("no log-probs", "without log-probs"),
        ("nan", "which is no number"),
        ("other id named", "is of 1000"),
        ("abort", "aborted"),
        ("top-p", "nats above its scores"),
        ("raw", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("eos", "none of the stop ids"),
        ("no routes", "--enable-return-routed-experts"),
    ],
)
def test_a_defect_is_refused_with_its_reason(defect, reason):
    with pytest.raises(EngineError, match=reason):
        with_client(lambda engine: engine.handshake(max_context_tokens=1024), FakeSglang(defect), routes=True)


def test_weights_are_read_from_a_folder_and_named():
    async def work(engine):
        await engine.pause()
        await engine.load_folder(engine.servers.all[0].url, "/weights")
        await engine.set_policy_version(3, mark="run-3")
        await engine.resume()
        assert await engine.read_mark(engine.servers.all[0].url) == "run-3"
        return await act(engine)

    fake = FakeSglang()
    assert with_client(work, fake).policy_version == 3
    assert fake.calls == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": "/weights", "flush_cache": True, "abort_all_requests": False}),
        ("/update_weight_version", {"new_version": "run-3", "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]
    with pytest.raises(EngineError, match="did not load /weights: no such folder"):
        with_client(lambda e: e.load_folder(e.servers.all[0].url, "/weights"), FakeSglang("no weights"))
