"""The embedded engine behind vLLM's token endpoints: what samples from vLLM can sample from poise.

Needs the extra ``serve`` (starlette, uvicorn). Requests that arrive together share the engine's forwards.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poise.engine.answers import encoded_routes
from poise.engine.embedded import EmbeddedEngine
from poise.harmony import HarmonyTokenizer
from poise.model import GptOss, load_model, packed_attend, top_k_route
from poise.ops.log_probs import token_log_probs
from poise.types import Action

# Keys of vLLM's sampling_params that are taken only with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "min_tokens": (0,), "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "detokenize": (True, False),
    "skip_special_tokens": (True, False),
}  # fmt: skip
SAMPLING_KEYS = {"temperature", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs"}
MAX_TOP = 20


class _Refusal(Exception):
    """A request that cannot be served; the message goes to the client with status 400."""


class EngineServer:
    """The application ``app`` around one engine; ``name`` is what ``/v1/models`` calls the model.

    Weights are named by whoever pushes them, "default" until then: a client sees that a process was restarted.
    """

    def __init__(self, engine: EmbeddedEngine, tokenizer: HarmonyTokenizer, *, name: str) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.weight_version = "default"
        self.names = {engine.policy_version: self.weight_version}
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/inference/v1/generate", _answering(self._generate), methods=["POST"]),
                Route("/v1/completions", _answering(self._complete), methods=["POST"]),
                Route("/pause", _answering(self._pause), methods=["POST"]),
                Route("/resume", _answering(self._resume), methods=["POST"]),
                Route("/is_paused", self._is_paused),
                Route("/reset_prefix_cache", _answering(self._forget_cached_keys), methods=["POST"]),
                Route("/weight_info", self._weight_info),
                Route("/update_weight_version", _answering(self._rename_weights), methods=["POST"]),
                Route("/load_checkpoint", _answering(self._load_checkpoint), methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "owned_by": "poise", "root": self.name}
        model["dtype"] = str(self.engine.model.lm_head.weight.dtype).removeprefix("torch.")
        model["max_model_len"] = self.engine.max_context_tokens  # type: ignore[assignment]
        return JSONResponse({"object": "list", "data": [model]})

    async def _generate(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        _require_known(body, {"token_ids", "sampling_params", "stream", "request_id", "model", "priority"}, "request")
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict):
            raise _Refusal("sampling_params must be an object")
        request_id = str(body.get("request_id") or secrets.token_hex(8))
        sampling, start = _without_route_start(sampling, body.get("token_ids"))
        action, tops = await self._sample(
            body.get("token_ids"), sampling, request, request_id, stream=body.get("stream")
        )
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": list(action.token_ids),
            "finish_reason": "stop" if action.is_stopped else "length",
            "routed_experts": None if action.routes is None else encoded_routes(action.routes, start=start),
            "weight_versions": self._weight_versions(action),
        }
        if sampling.get("logprobs") is not None:
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token_id}", "logprob": log_prob, "top_logprobs": _top_entries(top)}
                    for token_id, log_prob, top in zip(action.token_ids, action.log_probs, tops, strict=True)
                ]
            }
        answer = {"request_id": request_id, "model": self.name, "choices": [choice]}
        return answer | self._prompt_log_probs(body["token_ids"], sampling) | _usage(body["token_ids"], action)

    async def _complete(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        own = {"model", "prompt", "stream", "return_token_ids", "request_id", "echo", "best_of", "user", "suffix"}
        _require_known(body, own | SAMPLING_KEYS | set(NEUTRAL), "request")
        for key, neutral in (("echo", (False, None)), ("best_of", (1, None)), ("suffix", (None,))):
            if body.get(key) not in neutral:
                raise _Refusal(f"{key} {body[key]!r} is not supported; leave it out")
        sampling = {key: value for key, value in body.items() if key in SAMPLING_KEYS | set(NEUTRAL)}
        prompt = body.get("prompt")
        prompt_ids: Any = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request_id = str(body.get("request_id") or f"cmpl-{secrets.token_hex(8)}")
        action, tops = await self._sample(
            prompt_ids, {"max_tokens": 16} | sampling, request, request_id, stream=body.get("stream")
        )
        text_ids = action.token_ids[:-1] if action.is_stopped else action.token_ids
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.tokenizer.decode(text_ids),
            "finish_reason": "stop" if action.is_stopped else "length",
            "stop_reason": action.token_ids[-1] if action.is_stopped else None,
            "logprobs": None,
        }
        if sampling.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token_id}" for token_id in action.token_ids],
                "token_logprobs": list(action.log_probs),
                "top_logprobs": [{f"token_id:{token_id}": value for token_id, value in top.items()} for top in tops],
            }
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(action.token_ids), "prompt_token_ids": list(prompt_ids)}
        choice |= self._prompt_log_probs(prompt_ids, sampling)
        answer = {"id": request_id, "object": "text_completion", "model": self.name, "choices": [choice]}
        return answer | _usage(prompt_ids, action)

    async def _sample(
        self, token_ids: Any, sampling: Mapping[str, Any], request: Request, request_id: str, *, stream: Any
    ) -> tuple[Action, list[dict[int, float]]]:
        """Raises _Refusal for what the engine cannot do; stops sampling when the client goes away."""
        if stream:
            raise _Refusal("stream true is not supported")
        vocab_size = self.engine.model.config.vocab_size
        _require_ids(token_ids, vocab_size, "token_ids")
        wanted = _sampling(sampling, vocab_size)
        if len(token_ids) + wanted["max_tokens"] > self.engine.max_context_tokens:
            # "maximum context length" is what clients of vLLM look for, to end an episode without an error.
            raise _Refusal(
                f"{len(token_ids)} tokens + max_tokens {wanted['max_tokens']} exceed max_context_tokens "
                f"{self.engine.max_context_tokens}, the maximum context length"
            )
        if not sampling.get("ignore_eos", False):
            wanted["stop_ids"] = {*wanted["stop_ids"], *self.engine.stop_ids}
        episode_id = request.headers.get("x-session-id") or request_id
        try:
            work = asyncio.ensure_future(self.engine.sample(token_ids, episode_id=episode_id, **wanted))
            action, tops = await _unless_gone(work, request)
            return action, tops or [{}] * len(action.token_ids)
        except ValueError as error:
            raise _Refusal(str(error)) from error

    def _weight_versions(self, action: Action) -> list[str]:
        """The name of the weights that sampled each token."""
        versions = action.policy_versions or (action.policy_version,) * len(action.token_ids)
        return [self.names[version] for version in versions]

    def _prompt_log_probs(self, token_ids: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """At temperature 1, and of the prompt's own tokens only, however many of the most probable are asked for."""
        if sampling.get("prompt_logprobs") is None:
            return {}
        entries: list[Any] = [None]
        if len(token_ids) == 1:
            return {"prompt_logprobs": entries}
        for token_id, log_prob in zip(token_ids[1:], _scores(self.engine, token_ids), strict=True):
            entries.append({str(token_id): {"logprob": log_prob, "decoded_token": None}})
        return {"prompt_logprobs": entries}

    async def _pause(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        mode = request.query_params.get("mode", "keep")
        if mode not in ("keep", "wait"):
            raise _Refusal(f'mode must be "keep" or "wait", got {mode!r}')
        while mode == "wait" and self.engine.num_running:
            await asyncio.sleep(0.01)
        self.engine.pause()
        return {"status": "paused"}

    async def _resume(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        self.engine.resume()
        return {"status": "resumed"}

    async def _forget_cached_keys(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        """Those of requests under way too, which read their streams again."""
        self.engine.new_policy_version(self.engine.policy_version, in_flight=True)
        return {"success": True}

    async def _is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.engine.is_paused})

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.weight_version})

    async def _rename_weights(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        """The weights stay; what is sampled from now on counts as of this name."""
        _require_known(body, {"new_version"}, "request")
        self._name_weights(body.get("new_version"))
        return {"success": True, "new_version": self.weight_version}

    async def _load_checkpoint(self, body: Mapping[str, Any], request: Request) -> dict[str, Any]:
        """Takes over the weights of a checkpoint folder on this machine; requests under way go on with them."""
        _require_known(body, {"path", "weight_version"}, "request")
        folder, model = Path(str(body.get("path"))), self.engine.model
        try:
            weight = model.lm_head.weight
            # In a thread, since sampling goes on with the old weights until the new ones are there whole.
            new = await asyncio.to_thread(load_model, folder, dtype=weight.dtype, device=weight.device)
        except (OSError, ValueError) as error:
            raise _Refusal(f"{folder} cannot be loaded: {error}") from error
        if _shapes(new) != _shapes(model):
            raise _Refusal(f"{folder} holds another model than the one that is served")
        version = self._name_weights(body.get("weight_version"))
        model.load_state_dict(new.state_dict())
        self.engine.new_policy_version(version, in_flight=True)
        return {"success": True, "weight_version": self.weight_version}

    def _name_weights(self, name: Any) -> int:
        """The engine's version from now on."""
        if not isinstance(name, str) or not name:
            raise _Refusal(f"the name of the weights must be a string, got {name!r}")
        self.weight_version = name
        self.engine.policy_version += 1
        self.names[self.engine.policy_version] = name
        return self.engine.policy_version


Handler = Callable[[Mapping[str, Any], Request], Awaitable[dict[str, Any]]]


def _answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Reads the body as JSON (none is an empty object); what cannot be served is answered with 400 and the reason."""

    async def answer(request: Request) -> Response:
        try:
            raw = await request.body()
            body = json.loads(raw) if raw else {}
            if not isinstance(body, dict):
                raise _Refusal("the body must be a JSON object")
            return JSONResponse(await handler(body, request))
        except (_Refusal, json.JSONDecodeError) as error:
            return JSONResponse({"error": {"message": str(error), "code": 400}}, status_code=400)

    return answer


async def _unless_gone(
    work: "asyncio.Future[tuple[Action, list[dict[int, float]]]]", request: Request
) -> tuple[Action, list[dict[int, float]]]:
    """The result of ``work``, which is cancelled when nobody waits for it any more: its slot is free then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    either: set[asyncio.Future[Any]] = {work, watch}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise _Refusal("the client has gone")
        return work.result()
    finally:
        watch.cancel()
        work.cancel()


def _sampling(sampling: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Arguments of ``EmbeddedEngine.sample``. Raises _Refusal for what would sample from another distribution."""
    _require_known(sampling, SAMPLING_KEYS | set(NEUTRAL), "sampling_params")
    for key, values in NEUTRAL.items():
        if sampling.get(key) is not None and sampling[key] not in values:
            raise _Refusal(f"sampling_params.{key} {sampling[key]!r} is not supported; it can only be {values[0]!r}")
    temperature = sampling.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
        raise _Refusal(f"sampling_params.temperature must be a positive number, got {temperature!r}")
    max_tokens, num_top, seed = sampling.get("max_tokens", 16), sampling.get("logprobs") or 0, sampling.get("seed")
    for key, value, low, high in (
        ("max_tokens", max_tokens, 1, 2**31),
        ("logprobs", num_top, 0, min(MAX_TOP, vocab_size)),
        ("seed", 0 if seed is None else seed, -(2**63), 2**64 - 1),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise _Refusal(f"sampling_params.{key} must be a whole number from {low} to {high}, got {value!r}")
    stop_ids = sampling.get("stop_token_ids") or []
    if stop_ids:
        _require_ids(stop_ids, vocab_size, "stop_token_ids")
    return {
        "temperature": float(temperature),
        "max_tokens": max_tokens,
        "num_top": num_top,
        "seed": secrets.randbits(64) if seed is None else seed % 2**64,
        "stop_ids": set(stop_ids),
    }


def _without_route_start(sampling: Mapping[str, Any], token_ids: Any) -> tuple[dict[str, Any], int]:
    """Without the position of the prompt that routes are returned from: who has those before need not get them again.

    Raises _Refusal for a number that is no position of the prompt.
    """
    rest = dict(sampling)
    start = rest.pop("routed_experts_prompt_start", None) or 0
    num_tokens = len(token_ids) if isinstance(token_ids, list) else 1
    if not isinstance(start, int) or not 0 <= start < num_tokens:
        raise _Refusal(f"sampling_params.routed_experts_prompt_start must be a position of the prompt, got {start!r}")
    return rest, start


def _require_known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(key for key in given.keys() - known if given[key] is not None)
    if unknown:
        raise _Refusal(f"{where}: {', '.join(unknown)} not supported; known are {', '.join(sorted(known))}")


def _require_ids(ids: Any, vocab_size: int, name: str) -> None:
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise _Refusal(f"{name} must be ids from 0 to {vocab_size - 1}, at least one; one is out of vocabulary or none")


def _top_entries(top: Mapping[int, float]) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token_id}", "logprob": value} for token_id, value in top.items()]


def _usage(token_ids: list[int], action: Action) -> dict[str, Any]:
    num_prompt, num_new = len(token_ids), len(action.token_ids)
    return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}}


@torch.inference_mode()
def _scores(engine: EmbeddedEngine, token_ids: list[int]) -> list[float]:
    """Log-probs of tokens 1 .. n-1 at temperature 1, by one forward beside the cache."""
    model = engine.model
    device = model.lm_head.weight.device
    ids = torch.tensor(token_ids, device=device)
    with torch.inference_mode(False):
        cu_seqlens = torch.tensor([0, len(ids) - 1], dtype=torch.int32, device=device)
    positions = torch.arange(len(ids) - 1, device=device)
    hidden = model(ids[:-1], positions, packed_attend(cu_seqlens), top_k_route(model.config.experts_per_token))
    return token_log_probs(hidden, model.lm_head.weight, ids[1:])[0].tolist()


def _shapes(model: GptOss) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}
