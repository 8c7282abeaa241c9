"""A whole run whose engine speaks SGLang's protocol: the same tokens and weights as the embedded run."""

import asyncio
import json

import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test_engine_run import config_of, left_behind

from poise.assembly import embedded_engine, new_model_config
from poise.config import EngineConfig
from poise.console import Console
from poise.engine.server import _scores
from poise.harmony import byte_tokenizer
from poise.jobs import train_job
from poise.model import GptOss, load_model
from poise.train.canary import CanaryError


class SglangOverPoise:
    """SGLang's endpoints, answered by the embedded engine. ``is_stale``: it says that it loads and does not."""

    def __init__(self, folder, *, is_stale=False):
        config, tokenizer = config_of(folder), byte_tokenizer()
        self.model = GptOss(new_model_config(config.model, tokenizer)).init_weights(9)
        self.engine = embedded_engine(self.model, tokenizer, config)
        self.is_stale, self.mark, self.calls = is_stale, "default", []

    def app(self):
        info = {"dtype": "float32", "model_path": "/nowhere"}
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/health", lambda request: Response()),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "x", "max_model_len": 300}]})),
                Route("/get_model_info", lambda request: JSONResponse({"weight_version": self.mark})),
                Route("/get_server_info", lambda request: JSONResponse(info)),
                Route("/pause_generation", self.pause, methods=["POST"]),
                Route("/continue_generation", self.resume, methods=["POST"]),
                Route("/update_weights_from_disk", self.load, methods=["POST"]),
                Route("/update_weight_version", self.rename, methods=["POST"]),
            ]
        )

    async def pause(self, request):
        self.engine.pause()
        return JSONResponse({})

    async def resume(self, request):
        self.engine.resume()
        return JSONResponse({})

    async def rename(self, request):
        self.mark = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def load(self, request):
        body = await request.json()
        self.calls.append(body)
        if not self.is_stale:
            self.model.load_state_dict(load_model(body["model_path"]).state_dict())
            self.engine.new_policy_version(self.engine.policy_version + 1, in_flight=True)
        return JSONResponse({"success": True, "message": ""})

    async def generate(self, request):
        body = await request.json()
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if max(prompt) >= self.model.config.vocab_size:
            return JSONResponse({"error": {"message": "greater than the vocab size"}}, status_code=400)
        action, tops = await self.engine.sample(
            prompt,
            episode_id=str(prompt[:20]),
            seed=sampling.get("sampling_seed", 0),
            max_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            stop_ids=sampling.get("stop_token_ids", []),
            num_top=body.get("top_logprobs_num", 0),
        )
        meta = {
            "finish_reason": {"type": "stop" if action.is_stopped else "length"},
            "output_token_logprobs": [[v, i, None] for v, i in zip(action.log_probs, action.token_ids, strict=True)],
            "output_top_logprobs": [[[value, i, None] for i, value in top.items()] for top in tops],
        }
        if body.get("logprob_start_len") == 0:
            scores = [None, *_scores(self.engine, prompt)] if len(prompt) > 1 else [None]
            meta["input_token_logprobs"] = [[score, i, None] for score, i in zip(scores, prompt, strict=True)]
        await asyncio.sleep(0)
        return JSONResponse({"text": "", "output_ids": list(action.token_ids), "meta_info": meta})


def test_a_run_over_sglangs_protocol_follows_the_trainer(tmp_path):
    fake = SglangOverPoise(tmp_path)
    with serving(fake) as urls:
        engine = EngineConfig(kind="sglang", urls=tuple(urls), max_wait_s=600.0)
        folder = train_job(config_of(tmp_path / "runs", engine), Console())
    steps, _, _ = left_behind(folder)
    assert steps == [1, 2]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Sampled by the weights of each step: the trainer finds its own log-probs, also after it has moved.
    assert all(line["mismatch_max"] < 1e-4 for line in metrics if line["step"] >= 1)
    assert all(body["flush_cache"] for body in fake.calls)
    # A rehearsal, the weights themselves, and those of step 1 and 2.
    assert len(fake.calls) == 4
    assert not any(path.name.startswith(".engine") for path in (tmp_path / "runs").iterdir())


def test_a_server_that_only_says_that_it_has_loaded_is_found_out(tmp_path):
    with serving(SglangOverPoise(tmp_path, is_stale=True)) as urls:
        engine = EngineConfig(kind="sglang", urls=tuple(urls), max_wait_s=600.0)
        with pytest.raises(CanaryError, match="does not have the trainer's weights"):
            train_job(config_of(tmp_path / "runs", engine), Console())
