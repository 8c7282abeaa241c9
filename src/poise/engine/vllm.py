"""A policy over vLLM's token endpoint: ids in, ids out, log-probs of the distribution that was sampled from.

Start the servers with ``--enable-scale-out --logprobs-mode processed_logprobs`` and ``VLLM_SERVER_DEV_MODE=1``, which
opens the endpoints that training needs (pause, weights, the name of the weights).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from poise.engine.answers import checked_action, checked_log_prob, decoded_routes, signed_seed
from poise.engine.handshake import Sampled, TokenServer
from poise.engine.http import EngineError, Outage, Server
from poise.engine.server_engine import ServerEngine
from poise.types import Action

GENERATE = "/inference/v1/generate"
# Everything that changes the distribution, said: what is left out, a server may fill in from generation_config.json.
PLAIN_SAMPLING: Mapping[str, Any] = {
    "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": True, "detokenize": False, "skip_special_tokens": False,
}  # fmt: skip


class VllmEngine(ServerEngine):
    """A ``Policy`` over ``servers``.

    ``stop_ids`` end an action, and nothing else does; every logit is divided by ``temperature``. ``routes_shape``:
    (layers, experts per token) where the experts are wanted, which takes ``--enable-return-routed-experts``; an answer
    without them is then an error. Raises EngineError for an answer that cannot be trained on.
    """

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        """Samples until a stop id or ``max_tokens``; waits while no server is ready."""
        version = self.policy_version
        sampling = self._sampling(seed=seed, max_tokens=max_tokens, temperature=self.temperature)
        server, answer = await self.servers.post(
            GENERATE,
            {"token_ids": list(token_ids), "sampling_params": sampling, "stream": False},
            episode_id=episode_id,
            headers={"X-Session-ID": episode_id},
        )
        action = self._action(answer, server, num_prompt_tokens=len(token_ids), max_tokens=max_tokens, version=version)
        self.num_sampled_tokens += len(action.token_ids)
        return action

    async def score(self, token_ids: Sequence[int], *, url: str | None = None) -> list[float]:
        """Log-probs of tokens 1 .. n-1, each given those before it, at temperature 1; by the first server or ``url``.

        Raises Outage where it does not answer, and EngineError for log-probs that are missing or not finite.
        """
        url = self.servers.all[0].url if url is None else url
        sampling = dict(PLAIN_SAMPLING) | {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 1}
        answer = await self.servers.ask(
            url, "POST", GENERATE, json={"token_ids": list(token_ids), "sampling_params": sampling, "stream": False}
        )
        rows = answer.get("prompt_logprobs")
        if rows is None or len(rows) != len(token_ids):
            raise EngineError(f"{url}: prompt_logprobs has {len(rows or [])} entries for {len(token_ids)} tokens")
        scores = []
        for index, (row, token_id) in enumerate(zip(rows[1:], token_ids[1:], strict=True), start=1):
            entry = (row or {}).get(str(token_id)) or {}
            scores.append(checked_log_prob(entry.get("logprob"), where=f"{url}: prompt token {index}"))
        return scores

    async def pause(self) -> None:
        """Freezes sampling everywhere; requests under way go on after ``resume``, with what was sampled so far."""
        await self.post("/pause", params={"mode": "keep"})

    async def resume(self) -> None:
        await self.post("/resume")

    async def write_mark(self, url: str, mark: str) -> None:
        """Tells one server the name of the weights it holds."""
        await self.servers.ask(url, "POST", "/update_weight_version", json={"new_version": mark})

    async def read_mark(self, url: str) -> str:
        """The name of the weights that one server holds: what it was told, or "default". Raises Outage."""
        answer = await self.servers.ask(url, "GET", "/weight_info")
        mark = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(mark, str):
            raise EngineError(f"{url}/weight_info does not name the weights: {answer!r}")
        return mark

    def _sampling(self, *, seed: int, max_tokens: int, temperature: float, num_top: int = 0) -> dict[str, Any]:
        return dict(PLAIN_SAMPLING) | {
            "temperature": temperature,
            "seed": signed_seed(seed),
            "max_tokens": max_tokens,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": num_top,
        }

    def _action(
        self, answer: Any, server: Server, *, num_prompt_tokens: int, max_tokens: int, version: int = 0
    ) -> Action:
        where = f"{server.url}{GENERATE}"
        choice = _only_choice(answer, where)
        token_ids = choice.get("token_ids") or []
        log_probs = _log_probs(choice, token_ids, where)
        routes = None
        if self.routes_shape is not None:
            num_layers, experts_per_token = self.routes_shape
            routes = decoded_routes(
                choice.get("routed_experts"),
                where=where,
                num_rows=num_prompt_tokens + len(token_ids) - 1,
                num_layers=num_layers,
                experts_per_token=experts_per_token,
            )
            if routes is None:
                raise EngineError(
                    f"{where} returned no routed experts, which algorithm.replay_routes needs: start vLLM with "
                    "--enable-return-routed-experts (0.27.1 to 0.30.0 return them on CPU too, 0.32.0 does not)"
                )
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise EngineError(f"{where} ended an action with finish_reason {finish!r}: it was aborted")
        action = checked_action(
            token_ids,
            log_probs,
            where=where,
            stop_ids=self.stop_ids,
            max_tokens=max_tokens,
            vocab_size=self.vocab_size,
            stopped_by_server=finish == "stop",
            policy_version=version,
            routes=routes,
        )
        versions = [self._version_of.get(mark, version) for mark in choice.get("weight_versions") or ()]
        if len(versions) != len(token_ids):  # vLLM names the weights of a server only, not those of each token
            return action
        is_one = versions[0] == versions[-1]
        return replace(action, policy_version=versions[0], policy_versions=() if is_one else tuple(versions))

    def _token_server(self, url: str, max_context_tokens: int) -> TokenServer:
        """What the handshake needs of one server."""
        where = f"{url}{GENERATE}"

        async def generate(token_ids: Sequence[int], sampling: dict[str, Any]) -> Any:
            body = {"token_ids": list(token_ids), "sampling_params": sampling, "stream": False}
            return await self.servers.ask(url, "POST", GENERATE, json=body)

        async def sample(
            token_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float, num_top: int
        ) -> Sampled:
            sampling = self._sampling(seed=seed, max_tokens=max_tokens, temperature=temperature, num_top=num_top)
            answer = await generate(token_ids, sampling)
            action = self._action(answer, Server(url), num_prompt_tokens=len(token_ids), max_tokens=max_tokens)
            return Sampled(action=action, top=_top(_only_choice(answer, where)))

        async def has_token(token_id: int) -> bool:
            """Whether the id is in the vocabulary: as a token to read, and as one to stop at."""
            for prompt, stops in (([token_id], []), ([0], [token_id])):
                sampling = self._sampling(seed=0, max_tokens=1, temperature=1.0)
                try:
                    await generate(prompt, sampling | {"stop_token_ids": stops})
                except EngineError:
                    return False
                except Outage as error:
                    if error.__cause__ is not None:  # no answer at all; some versions answer 500 to such an id
                        raise
                    return False
            return True

        return TokenServer(
            url=url,
            sample=sample,
            score=lambda token_ids: self.score(token_ids, url=url),
            has_token=has_token,
            context=lambda: self._max_context(url),
            vocab_size=self.vocab_size,
            max_context_tokens=max_context_tokens,
            processed_hint="start vLLM with --logprobs-mode processed_logprobs",
        )


def _only_choice(answer: Any, where: str) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1:
        raise EngineError(f"{where} answered no single choice: {str(answer)[:300]}")
    return choices[0]


def _log_probs(choice: Mapping[str, Any], token_ids: Sequence[int], where: str) -> list[Any] | None:
    """Of the sampled tokens, each checked to speak of the id beside it where the server names it."""
    content = (choice.get("logprobs") or {}).get("content")
    if content is None:
        return None
    for index, (entry, token_id) in enumerate(zip(content, token_ids, strict=False)):
        named = str(entry.get("token", ""))
        if named.startswith("token_id:") and named != f"token_id:{token_id}":
            raise EngineError(f"{where}: log-prob {index} is of {named}, the token is {token_id}")
    return [entry.get("logprob") for entry in content]


def _top(choice: Mapping[str, Any]) -> list[dict[str, float]]:
    """Per sampled token the most probable ones, by name."""
    content = (choice.get("logprobs") or {}).get("content") or []
    return [{str(e["token"]): float(e["logprob"]) for e in entry.get("top_logprobs", [])} for entry in content]
