"""The embedded engine: continuous batching on the trainer's own parameters.

It reads the parameters in place, so there is nothing to bring over. What goes stale when they move are the cached keys
and values, which ``new_policy_version`` drops, and on some CPUs matrices that were laid out for sampling
(``poise.engine.prepared``), which are made again.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from poise.engine.cache import Chunk, KeyValueCache, split_chunks
from poise.engine.prepared import SamplingModel
from poise.engine.sampler import request_uniforms, sample
from poise.engine.slots import Request, Slot, num_to_feed, occupy, tokens_to_feed
from poise.model import GptOss
from poise.model.gpt_oss import top_k_route
from poise.types import Action

# Cached prefixes longer than this many new tokens are fed in pieces: their scores take [heads, piece, context].
MAX_CONTINUING_TOKENS = 512


class EmbeddedEngine:
    """A ``Policy`` over a ``GptOss`` on one device.

    ``return_id``: the stop token that ends an episode for good (its slot is reused first); every id of ``stop_ids``
    ends an action. More episodes than ``num_slots`` may run: the slot idle longest is evicted and its episode prefilled
    again. Requests that start together from the same prompt, as the episodes of a group do, prefill it once.
    """

    def __init__(
        self,
        model: GptOss,
        *,
        stop_ids: Collection[int],
        return_id: int,
        num_slots: int,
        max_context_tokens: int,
        max_prefill_tokens: int = 8192,
        temperature: float = 1.0,
    ) -> None:
        self.model = model
        self.stop_ids = frozenset(stop_ids)
        self.return_id = return_id
        self.max_context_tokens = max_context_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.temperature = temperature
        self.policy_version = 0
        self.num_sampled_tokens = 0
        weight = model.lm_head.weight
        config = model.config
        self._cache = KeyValueCache(
            config,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            device=weight.device,
            dtype=weight.dtype,
        )
        self._routes = torch.full(
            (num_slots, max_context_tokens, config.num_layers, config.experts_per_token),
            -1,
            dtype=torch.int16,
            device=weight.device,
        )
        self._slots = [Slot(index=i) for i in range(num_slots)]
        self._sampling_model = SamplingModel(model, num_slots)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self.is_paused = False
        self._clock = 0
        self._route = top_k_route(config.experts_per_token)

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        """Samples until a stop id or ``max_tokens``. Raises ValueError where the context cannot hold both."""
        return (await self.sample(token_ids, episode_id=episode_id, seed=seed, max_tokens=max_tokens))[0]

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        episode_id: str,
        seed: int,
        max_tokens: int,
        temperature: float | None = None,
        stop_ids: Collection[int] | None = None,
        num_top: int = 0,
    ) -> tuple[Action, list[dict[int, float]]]:
        """The same with a temperature and stop ids of this request's own, in the forwards of all others.

        Also returns, per sampled token, the log-probs of the ``num_top`` most probable ones.
        """
        request = Request(
            token_ids=list(token_ids),
            episode_id=episode_id,
            max_tokens=max_tokens,
            uniforms=request_uniforms(seed, max_tokens),
            future=asyncio.get_running_loop().create_future(),
            temperature=self.temperature if temperature is None else temperature,
            stop_ids=self.stop_ids if stop_ids is None else frozenset(stop_ids),
            num_top=num_top,
        )
        return await self._answer(request), request.tops

    async def score(self, token_ids: Sequence[int], action_ids: Sequence[int], *, episode_id: str) -> Action:
        """The action ``action_ids`` as if it had been drawn after ``token_ids``: decoded token by token through the
        cache, and no stop id ends it. Raises ValueError where the context cannot hold both, or one of them is empty."""
        request = Request(
            token_ids=list(token_ids),
            episode_id=episode_id,
            max_tokens=len(action_ids),
            uniforms=np.zeros(len(action_ids)),
            future=asyncio.get_running_loop().create_future(),
            temperature=self.temperature,
            stop_ids=frozenset(),
            given_ids=tuple(action_ids),
        )
        return await self._answer(request)

    async def _answer(self, request: Request) -> Action:
        num_tokens, max_tokens = len(request.token_ids), request.max_tokens
        if not num_tokens or max_tokens < 1:
            raise ValueError(f"token_ids must not be empty and max_tokens at least 1, got {num_tokens}, {max_tokens}")
        if num_tokens + max_tokens > self.max_context_tokens:
            raise ValueError(
                f"{num_tokens} tokens + max_tokens {max_tokens} exceed max_context_tokens {self.max_context_tokens}"
            )
        self._waiting.append(request)
        self._start()
        return await request.future

    def pause(self) -> None:
        """Freezes sampling after the forward under way; requests go on after ``resume``."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        if self._waiting or self.num_running:
            self._start()

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return sum(slot.request is not None for slot in self._slots)

    def _start(self) -> None:
        if not self.is_paused and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def new_policy_version(self, version: int, *, in_flight: bool = False) -> None:
        """The parameters moved: forgets every episode, as a new engine would, so that a resumed run batches alike.

        ``in_flight``: requests under way go on with the new policy, which first reads their whole stream again; their
        tokens so far keep version and routes. Otherwise raises RuntimeError while requests are being sampled.
        """
        if not in_flight and (self.num_running or self._waiting):
            raise RuntimeError(
                "new_policy_version while episodes are being sampled: their cache would mix two policies"
            )
        self.policy_version = version
        self.rest()
        for slot in self._slots:
            if slot.request is not None:
                self._keep_routes(slot, slot.request)
                slot.request.leader = None
            else:
                slot.episode_id, slot.is_finished, slot.last_used = None, False, 0
            slot.cached_ids.clear()

    def rest(self) -> None:
        """Gives up what sampling alone needs beside the cache, a copy of matrices, until the next forward."""
        self._sampling_model.forget()

    def _keep_routes(self, slot: Slot, request: Request) -> None:
        """Of what the old policy has read; the new one overwrites them when it reads the stream again."""
        before = request.routes_before
        num_before = 0 if before is None else len(before)
        if request.sampled_ids and len(slot.cached_ids) > num_before:
            routes = self._routes[slot.index, : len(slot.cached_ids)].clone()
            if before is not None:
                routes[:num_before] = before
            request.routes_before = routes

    async def _run(self) -> None:
        """Steps until no request is left. An error in a step reaches every caller that waits."""
        try:
            while not self.is_paused:
                self._admit()
                active = [slot for slot in self._slots if slot.request is not None]
                if not active:
                    return
                self._step(active)
                # Tools, environments and new requests get their turn between two forwards.
                await asyncio.sleep(0)
        except BaseException as error:
            for request in [*self._waiting, *(slot.request for slot in self._slots if slot.request)]:
                if not request.future.done():
                    if isinstance(error, asyncio.CancelledError):
                        request.future.cancel()
                    else:
                        request.future.set_exception(error)
            self._waiting.clear()
            for slot in self._slots:
                slot.request, slot.episode_id = None, None
                slot.cached_ids.clear()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _admit(self) -> None:
        """Gives waiting requests a slot: their own if it still holds their prefix, else the one idle longest."""
        for slot in self._slots:
            if slot.request is not None and slot.request.future.cancelled():
                slot.request = None
        if not self._waiting:
            return
        idle = [slot for slot in self._slots if slot.request is None]
        own = {slot.episode_id: slot for slot in idle if slot.episode_id is not None}
        # Prefixes that a waiting request is about to extend are the last to be evicted, empty slots the first.
        wanted = {request.episode_id for request in self._waiting}
        idle.sort(key=lambda s: (s.episode_id in wanted, s.episode_id is not None, not s.is_finished, s.last_used))
        still_waiting: deque[Request] = deque()
        for request in self._waiting:
            if request.future.cancelled():
                continue
            slot_or_none = own.get(request.episode_id)
            if slot_or_none is None or slot_or_none.request is not None:
                slot_or_none = next((slot for slot in idle if slot.request is None), None)
            if slot_or_none is None:
                still_waiting.append(request)
            else:
                occupy(slot_or_none, request)
        self._waiting = still_waiting
        self._share_prompts()

    def _share_prompts(self) -> None:
        """Of new requests with the same prompt the first prefills it; the others follow."""
        leaders: dict[tuple[int, ...], Slot] = {}
        for slot in self._slots:
            request = slot.request
            if (
                request is not None
                and not slot.cached_ids
                and not request.sampled_ids  # under way already when the policy moved
                and request.leader is None
                and len(request.token_ids) > 1
            ):
                leader = leaders.setdefault(tuple(request.token_ids), slot)
                request.leader = None if leader is slot else leader

    def _follow(self, active: Sequence[Slot]) -> None:
        """Followers take over a prompt that their leader has just finished; without its last token, which they feed
        themselves to get their own logits."""
        followers: dict[int, list[Slot]] = {}
        for slot in active:
            request = slot.request
            if request is None or request.leader is None:
                continue
            leader, prompt = request.leader, request.token_ids
            if leader.cached_ids == prompt:
                slot.cached_ids = prompt[:-1]
                followers.setdefault(leader.index, []).append(slot)
                request.leader = None
            elif leader.request is None or leader.request.token_ids != prompt:
                request.leader = None  # it was cancelled: everybody for himself
        for index, slots in followers.items():
            num_tokens = len(slots[0].cached_ids)
            copies = torch.tensor([slot.index for slot in slots], device=self._routes.device)
            self._cache.copy(index, copies, num_tokens)
            self._routes[copies, :num_tokens] = self._routes[index, :num_tokens]

    @torch.inference_mode()
    def _step(self, active: Sequence[Slot]) -> None:
        """One forward for every active slot: a sampled token, or a piece of its prompt."""
        self._clock += 1
        self._follow(active)
        slot_of = {slot.index: slot for slot in active}
        chunks = self._next_chunks(active)
        fed = [token for c in chunks for token in tokens_to_feed(slot_of[c.slot], c.num_tokens)]  # packed
        device = self._routes.device
        attend = self._cache.attend(chunks)
        recorded: list[Tensor] = []

        def route(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
            expert_ids, expert_weights = self._route(layer, router_logits)
            recorded.append(expert_ids)
            return expert_ids, expert_weights

        input_ids = torch.tensor(fed, device=device)
        model = self._sampling_model.current()
        hidden = model(input_ids, attend.position_ids, attend, route)
        self._routes[attend.token_slots, attend.position_ids] = torch.stack(recorded, dim=1).to(torch.int16)

        sampling, last_rows, row = [], [], 0
        for chunk in chunks:
            slot = slot_of[chunk.slot]
            slot.cached_ids.extend(fed[row : row + chunk.num_tokens])
            row += chunk.num_tokens
            slot.last_used = self._clock
            if not num_to_feed(slot):
                sampling.append(slot)
                last_rows.append(row - 1)
        if sampling:
            self._sample(sampling, model.lm_head(hidden[torch.tensor(last_rows, device=device)]))

    def _next_chunks(self, active: Sequence[Slot]) -> list[Chunk]:
        budget = self.max_prefill_tokens
        chunks = []
        for slot in active:
            if slot.request is not None and slot.request.leader is not None:
                continue
            start, num_tokens = len(slot.cached_ids), num_to_feed(slot)
            if num_tokens > 1 or start == 0:
                num_tokens = min(num_tokens, budget, MAX_CONTINUING_TOKENS if start else num_tokens)
                budget -= num_tokens
            if num_tokens:
                chunks.append(Chunk(slot=slot.index, start=start, num_tokens=num_tokens))
        return [chunk for kind in split_chunks(chunks) for chunk in kind]

    def _sample(self, slots: Sequence[Slot], logits: Tensor) -> None:
        requests = [slot.request for slot in slots if slot.request is not None]
        uniforms = torch.tensor(
            [request.uniforms[len(request.sampled_ids)] for request in requests],
            dtype=torch.float64,
            device=logits.device,
        )
        temperatures = [request.temperature for request in requests]
        temperature = torch.tensor(temperatures, device=logits.device)[:, None] if len(set(temperatures)) > 1 else None
        token_ids, log_probs = sample(
            logits,
            uniforms,
            temperature=temperatures[0] if temperature is None else temperature,
            given_ids=[r.given_ids[len(r.sampled_ids)] if r.given_ids else -1 for r in requests],
        )
        for row, request in enumerate(requests):
            if request.num_top:
                top = torch.log_softmax(logits[row].float() / request.temperature, dim=-1).topk(request.num_top)
                request.tops.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        self.num_sampled_tokens += len(requests)
        for slot, request, token_id, log_prob in zip(
            slots, requests, token_ids.tolist(), log_probs.tolist(), strict=True
        ):
            request.sampled_ids.append(token_id)
            request.log_probs.append(log_prob)
            request.versions.append(self.policy_version)
            is_stopped = token_id in request.stop_ids
            if is_stopped or len(request.sampled_ids) == request.max_tokens:
                self._finish(slot, request, is_stopped=is_stopped)

    def _finish(self, slot: Slot, request: Request, *, is_stopped: bool) -> None:
        slot.request = None
        slot.is_finished = request.sampled_ids[-1] == self.return_id
        # Row i of the cache's routes belongs to input i, which predicted token i + 1.
        num_inputs = len(request.token_ids) + len(request.sampled_ids) - 1
        routes = self._routes[slot.index, :num_inputs].clone()
        if request.routes_before is not None:
            routes[: len(request.routes_before)] = request.routes_before
        is_one_version = request.versions[0] == request.versions[-1]
        if not request.future.done():
            request.future.set_result(
                Action(
                    token_ids=tuple(request.sampled_ids),
                    log_probs=tuple(request.log_probs),
                    is_stopped=is_stopped,
                    policy_version=request.versions[0],
                    policy_versions=() if is_one_version else tuple(request.versions),
                    routes=routes.cpu().numpy(),
                )
            )
