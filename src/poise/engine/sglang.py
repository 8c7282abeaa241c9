"""A policy over SGLang's native endpoint ``/generate``: ids in, ids out.

Written after SGLang's documentation and tested against a server that plays its part; it has not been run with SGLang.
Leave ``SGLANG_RETURN_ORIGINAL_LOGPROB`` unset: set, it reports log-probs of another temperature than is sampled from.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.engine.answers import checked_action, checked_log_prob, signed_seed
from poise.engine.handshake import Sampled, TokenServer
from poise.engine.http import EngineError, Outage
from poise.engine.server_engine import ServerEngine
from poise.types import Action

GENERATE = "/generate"
# Not ``ignore_eos``: it would switch off ``stop_token_ids`` too.
PLAIN_SAMPLING: Mapping[str, Any] = {
    "n": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False, "no_stop_trim": True,
}  # fmt: skip


class SglangEngine(ServerEngine):
    """A ``Policy`` over ``servers``, with the arguments and the methods of ``VllmEngine``.

    Seeds are honoured where the servers run with ``--enable-deterministic-inference``. An update while requests run
    cannot tell which of their tokens came before it: ``rollout.max_staleness`` needs vLLM or poise serve.
    """

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        """Samples until a stop id or ``max_tokens``; waits while no server is ready."""
        version = self.policy_version
        body = self._body(token_ids, seed=seed, max_tokens=max_tokens, temperature=self.temperature)
        server, answer = await self.servers.post(GENERATE, body, episode_id=episode_id)
        action = self._action(answer, server.url, len(token_ids), max_tokens, version)
        self.num_sampled_tokens += len(action.token_ids)
        return action

    async def score(self, token_ids: Sequence[int], *, url: str | None = None) -> list[float]:
        """Log-probs of tokens 1 .. n-1, each given those before it, at temperature 1; by the first or ``url``."""
        url = self.servers.all[0].url if url is None else url
        sampling = dict(PLAIN_SAMPLING) | {"temperature": 1.0, "max_new_tokens": 1}
        body = {
            "input_ids": list(token_ids), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0,
        }  # fmt: skip
        rows = _meta(await self.servers.ask(url, "POST", GENERATE, json=body), url).get("input_token_logprobs")
        if rows is None or len(rows) != len(token_ids):
            raise EngineError(f"{url}: input_token_logprobs has {len(rows or [])} entries for {len(token_ids)} tokens")
        scores = []
        for index, (row, token_id) in enumerate(zip(rows[1:], token_ids[1:], strict=True), start=1):
            if row[1] != token_id:
                raise EngineError(f"{url}: prompt token {index} is {token_id}, its log-prob is of {row[1]}")
            scores.append(checked_log_prob(row[0], where=f"{url}: prompt token {index}"))
        return scores

    async def pause(self) -> None:
        """Freezes sampling everywhere; requests under way go on after ``resume`` and read their tokens again."""
        await self.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def write_mark(self, url: str, mark: str) -> None:
        """Tells one server the name of the weights it holds."""
        body = {"new_version": mark, "abort_all_requests": False}
        await self.servers.ask(url, "POST", "/update_weight_version", json=body)

    async def read_mark(self, url: str) -> str:
        """The name of the weights that one server holds. Raises Outage."""
        answer = await self.servers.ask(url, "GET", "/get_model_info")
        mark = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(mark, str):
            raise EngineError(f"{url}/get_model_info does not name the weights: {answer!r}")
        return mark

    async def load_folder(self, url: str, path: str) -> None:
        """One server takes over a checkpoint folder and forgets what the old weights cached. Raises EngineError."""
        body = {"model_path": path, "flush_cache": True, "abort_all_requests": False}
        answer = await self.servers.ask(url, "POST", "/update_weights_from_disk", json=body)
        if not answer.get("success"):
            raise EngineError(f"{url} did not load {path}: {answer.get('message', answer)}")

    def _body(
        self, token_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float, num_top: int = 0
    ) -> dict[str, Any]:
        sampling = dict(PLAIN_SAMPLING) | {
            "temperature": temperature, "sampling_seed": signed_seed(seed) & (2**63 - 1), "max_new_tokens": max_tokens,
            "stop_token_ids": sorted(self.stop_ids),
        }  # fmt: skip
        body = {"input_ids": list(token_ids), "sampling_params": sampling, "return_logprob": True}
        return body | {"top_logprobs_num": num_top, "return_routed_experts": self.routes_shape is not None}

    def _action(self, answer: Any, url: str, num_prompt_tokens: int, max_tokens: int, version: int) -> Action:
        where = f"{url}{GENERATE}"
        meta, token_ids = _meta(answer, where), answer.get("output_ids") or []
        rows = meta.get("output_token_logprobs")
        for index, (row, token_id) in enumerate(zip(rows or [], token_ids, strict=False)):
            if row[1] != token_id:
                raise EngineError(f"{where}: log-prob {index} is of {row[1]}, the token is {token_id}")
        finish = (meta.get("finish_reason") or {}).get("type")
        if finish not in ("stop", "length"):
            raise EngineError(f"{where} ended an action with finish_reason {finish!r}: it was aborted")
        return checked_action(
            token_ids,
            None if rows is None else [row[0] for row in rows],
            where=where,
            stop_ids=self.stop_ids,
            max_tokens=max_tokens,
            vocab_size=self.vocab_size,
            stopped_by_server=finish == "stop",
            policy_version=version,
            routes=self._routes(meta.get("routed_experts"), where, num_prompt_tokens + len(token_ids) - 1),
        )

    def _routes(self, text: str | None, where: str, num_rows: int) -> NDArray[np.int16] | None:
        """Base64 of int32 [rows, layers, A]; row i holds the experts of input i."""
        if self.routes_shape is None:
            return None
        if text is None:
            raise EngineError(
                f"{where} returned no routed experts, which algorithm.replay_routes needs: start SGLang with "
                "--enable-return-routed-experts"
            )
        try:
            routes = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32)
            routes = routes.reshape(num_rows, *self.routes_shape)
        except ValueError as error:
            raise EngineError(
                f"{where}: its routed experts are no int32 of {[num_rows, *self.routes_shape]}"
            ) from error
        if routes.min() < 0 or routes.max() > np.iinfo(np.int16).max:
            raise EngineError(f"{where}: its routed experts run from {routes.min()} to {routes.max()}")
        return routes.astype(np.int16)

    def _token_server(self, url: str, max_context_tokens: int) -> TokenServer:
        """What the handshake needs of one server."""

        async def sample(
            token_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float, num_top: int
        ) -> Sampled:
            body = self._body(token_ids, seed=seed, max_tokens=max_tokens, temperature=temperature, num_top=num_top)
            answer = await self.servers.ask(url, "POST", GENERATE, json=body)
            action = self._action(answer, url, len(token_ids), max_tokens, 0)
            tops = _meta(answer, url).get("output_top_logprobs") or []
            return Sampled(action=action, top=[{str(row[1]): float(row[0]) for row in top} for top in tops])

        async def has_token(token_id: int) -> bool:
            body = self._body([token_id], seed=0, max_tokens=1, temperature=1.0)
            try:
                await self.servers.ask(url, "POST", GENERATE, json=body)
            except EngineError:
                return False
            except Outage as error:
                if error.__cause__ is not None:
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
            processed_hint="leave SGLANG_RETURN_ORIGINAL_LOGPROB unset where SGLang is started",
        )


def _meta(answer: Any, where: str) -> Mapping[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{where} answered without meta_info: {str(answer)[:300]}")
    return meta
