"""A server that speaks vLLM's token protocol over a table of logits, honestly or with one defect."""

import base64
import io

import numpy as np
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

VOCAB, STOPS, LAYERS, EXPERTS_PER_TOKEN = 40, (38, 39), 3, 2


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


class FakeVllm:
    """The next token depends on the last alone: logits are rows of a fixed table. ``defect`` names what is wrong.

    ``mark`` is what the server calls its weights; ``seen`` the bodies it was asked to generate from.
    """

    def __init__(self, defect="", *, vocab=VOCAB, context=4096, name="default"):
        self.defect, self.vocab, self.context = defect, vocab, context
        self.table = 2.0 * np.random.default_rng(0).normal(size=(vocab + 1, vocab))
        self.mark, self.seen, self.headers, self.paused = name, [], [], False
        self.fail_next = 0
        self.hold = None  # an asyncio.Event that requests wait for, when set

    def app(self):
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/weight_info", self.weight_info),
                Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            ]
        )

    async def health(self, request):
        return Response(status_code=503 if self.defect == "ill" else 200)

    async def models(self, request):
        return JSONResponse({"object": "list", "data": [{"id": "fake", "max_model_len": self.context}]})

    async def pause(self, request):
        self.paused = request.query_params["mode"]
        return JSONResponse({"status": "paused"})

    async def resume(self, request):
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def weight_info(self, request):
        return JSONResponse({"weight_version": self.mark})

    async def update_weight_version(self, request):
        self.mark = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def generate(self, request):
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        if self.fail_next:
            self.fail_next -= 1
            return JSONResponse({"error": "EngineDeadError"}, status_code=500)
        sampling, prompt = body["sampling_params"], body["token_ids"]
        asked = [*prompt, *sampling.get("stop_token_ids", [])]
        if max(asked) >= self.vocab and self.defect != "any token":
            return JSONResponse({"error": f"Token id {max(asked)} is out of vocabulary"}, status_code=400)
        if self.hold is not None:
            await self.hold.wait()
        return JSONResponse(self.answer(prompt, sampling))

    def answer(self, prompt, sampling):
        generator = np.random.default_rng(abs(sampling.get("seed") or 0))
        stream, content = list(prompt), []
        for _ in range(sampling["max_tokens"]):
            logits = self.table[stream[-1]][: self.vocab]
            sampled_from = log_softmax(logits / sampling["temperature"])
            if self.defect in ("top-k", "top-k raw"):
                kept = np.argsort(sampled_from)[-3:]
                sampled_from = log_softmax(np.where(np.isin(np.arange(self.vocab), kept), sampled_from, -np.inf))
            if self.defect == "top-p":  # renormalized over the 4 most likely, and all others left out of the report
                kept = np.argsort(sampled_from)[-6:]
                sampled_from = log_softmax(np.where(np.isin(np.arange(self.vocab), kept), sampled_from, -np.inf))
            reported = log_softmax(logits) if self.defect in ("raw", "top-k raw") else sampled_from
            token = int(generator.choice(self.vocab, p=np.exp(sampled_from)))
            stream.append(token)
            top = np.argsort(reported)[::-1][: max(1, sampling.get("logprobs") or 0)]
            content.append(
                {
                    "token": f"token_id:{token}",
                    "logprob": max(float(reported[token]), -9999.0),
                    "top_logprobs": [
                        {"token": f"token_id:{i}", "logprob": max(float(reported[i]), -9999.0)} for i in top
                    ],
                }
            )
            if token in sampling.get("stop_token_ids", []) or (self.defect == "eos" and token < 20):
                break
        ids = stream[len(prompt) :]
        stopped = len(ids) < sampling["max_tokens"] or ids[-1] in sampling.get("stop_token_ids", [])
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop" if stopped else "length",
        }
        choice["routed_experts"] = self.routes(len(stream) - 1)
        self.damage(choice)
        answer = {"choices": [choice]}
        if sampling.get("prompt_logprobs") is not None:
            rows = [log_softmax(self.table[i][: self.vocab]) for i in prompt[:-1]]
            answer["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(row[token]), "rank": 1, "decoded_token": None}}
                for row, token in zip(rows, prompt[1:], strict=True)
            ]
            if self.defect == "nan score":
                answer["prompt_logprobs"][3] = None
        return answer

    def routes(self, num_rows):
        """Row i, layer l, place a holds 10 l + a + i modulo 7."""
        i, layer, a = np.meshgrid(np.arange(num_rows), np.arange(LAYERS), np.arange(EXPERTS_PER_TOKEN), indexing="ij")
        file = io.BytesIO()
        kind = np.float32 if self.defect == "float routes" else np.uint8
        np.save(file, ((10 * layer + a + i) % 7).astype(kind))
        return base64.b64encode(file.getvalue()).decode()

    def damage(self, choice):
        content = choice["logprobs"]["content"]
        if self.defect == "no ids":
            choice["token_ids"] = None
        elif self.defect == "one id less":
            choice["token_ids"] = choice["token_ids"][:-1]
        elif self.defect == "no log-probs":
            choice["logprobs"] = None
        elif self.defect == "missing log-prob":
            content[0] = {"token": content[0]["token"], "logprob": -9999.0, "top_logprobs": []}
        elif self.defect == "nan":
            content[0]["logprob"] = "NaN"
        elif self.defect == "logits":
            for entry in content:
                entry["logprob"] = 12.5
        elif self.defect == "other id named":
            content[0]["token"] = "token_id:1000"
        elif self.defect == "abort":
            choice["finish_reason"] = "abort"
        elif self.defect == "no routes":
            choice["routed_experts"] = None
        elif self.defect == "short routes":
            choice["routed_experts"] = self.routes(2)
        elif self.defect == "cut short":
            choice["token_ids"], choice["logprobs"]["content"] = [1], content[:1]
            content[0]["token"] = "token_id:1"
            choice["finish_reason"] = "length"
