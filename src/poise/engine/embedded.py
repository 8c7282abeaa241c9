"""The embedded engine: continuous batching on the trainer's own parameters.

It reads the parameters in place, so there is no copy of the weights and nothing to go stale; what does go stale when
they move are the cached keys and values, which ``new_policy_version`` drops.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poise.engine.cache import Chunk, KeyValueCache, split_chunks
from poise.engine.sampler import request_uniforms, sample
from poise.model import GptOss
from poise.model.gpt_oss import top_k_route
from poise.types import Action

# Cached prefixes longer than this many new tokens are fed in pieces: their scores take [heads, piece, context].
MAX_CONTINUING_TOKENS = 512


@dataclass(eq=False)
class _Slot:
    """One row of the cache. ``cached_ids`` are the tokens whose keys and values it holds."""

    index: int
    episode_id: str | None = None
    cached_ids: list[int] = field(default_factory=list)
    is_finished: bool = False  # the last action ended the episode: first to be evicted
    last_used: int = 0
    request: "_Request | None" = None


@dataclass(eq=False)
class _Request:
    token_ids: list[int]
    episode_id: str
    max_tokens: int
    uniforms: NDArray[np.float64]
    future: "asyncio.Future[Action]"
    leader: "_Slot | None" = None  # prefills the same prompt; this request waits and copies
    sampled_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


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
        self._slots = [_Slot(index=i) for i in range(num_slots)]
        self._waiting: deque[_Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._clock = 0
        self._route = top_k_route(config.experts_per_token)

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        """Samples until a stop id or ``max_tokens``. Raises ValueError where the context cannot hold both."""
        if not token_ids or max_tokens < 1:
            raise ValueError(
                f"token_ids must not be empty and max_tokens at least 1, got {len(token_ids)}, {max_tokens}"
            )
        if len(token_ids) + max_tokens > self.max_context_tokens:
            raise ValueError(
                f"{len(token_ids)} tokens + max_tokens {max_tokens} exceed max_context_tokens {self.max_context_tokens}"
            )
        request = _Request(
            token_ids=list(token_ids),
            episode_id=episode_id,
            max_tokens=max_tokens,
            uniforms=request_uniforms(seed, max_tokens),
            future=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await request.future

    def new_policy_version(self, version: int) -> None:
        """The parameters moved: forgets every episode, as a new engine would, so that a resumed run batches alike.

        Raises RuntimeError while requests are being sampled.
        """
        if any(slot.request is not None for slot in self._slots) or self._waiting:
            raise RuntimeError(
                "new_policy_version while episodes are being sampled: their cache would mix two policies"
            )
        self.policy_version = version
        for slot in self._slots:
            slot.episode_id, slot.is_finished, slot.last_used = None, False, 0
            slot.cached_ids.clear()

    async def _run(self) -> None:
        """Steps until no request is left. An error in a step reaches every caller that waits."""
        try:
            while True:
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
        still_waiting: deque[_Request] = deque()
        for request in self._waiting:
            if request.future.cancelled():
                continue
            slot_or_none = own.get(request.episode_id)
            if slot_or_none is None or slot_or_none.request is not None:
                slot_or_none = next((slot for slot in idle if slot.request is None), None)
            if slot_or_none is None:
                still_waiting.append(request)
            else:
                _occupy(slot_or_none, request)
        self._waiting = still_waiting
        self._share_prompts()

    def _share_prompts(self) -> None:
        """Of new requests with the same prompt the first prefills it; the others follow."""
        leaders: dict[tuple[int, ...], _Slot] = {}
        for slot in self._slots:
            request = slot.request
            if request is not None and not slot.cached_ids and request.leader is None and len(request.token_ids) > 1:
                leader = leaders.setdefault(tuple(request.token_ids), slot)
                request.leader = None if leader is slot else leader

    def _follow(self, active: Sequence[_Slot]) -> None:
        """Followers take over a prompt that their leader has just finished; without its last token, which they feed
        themselves to get their own logits."""
        followers: dict[int, list[_Slot]] = {}
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
    def _step(self, active: Sequence[_Slot]) -> None:
        """One forward for every active slot: a sampled token, or a piece of its prompt."""
        self._clock += 1
        self._follow(active)
        slot_of = {slot.index: slot for slot in active}
        chunks = self._next_chunks(active)
        fed = [
            token for c in chunks for token in _tokens_to_feed(slot_of[c.slot])[: c.num_tokens]
        ]  # what each chunk feeds, packed
        device = self._routes.device
        attend = self._cache.attend(chunks)
        recorded: list[Tensor] = []

        def route(layer: int, router_logits: Tensor) -> tuple[Tensor, Tensor]:
            expert_ids, expert_weights = self._route(layer, router_logits)
            recorded.append(expert_ids)
            return expert_ids, expert_weights

        input_ids = torch.tensor(fed, device=device)
        hidden = self.model(input_ids, attend.position_ids, attend, route)
        self._routes[attend.token_slots, attend.position_ids] = torch.stack(recorded, dim=1).to(torch.int16)

        sampling, last_rows, row = [], [], 0
        for chunk in chunks:
            slot = slot_of[chunk.slot]
            slot.cached_ids.extend(fed[row : row + chunk.num_tokens])
            row += chunk.num_tokens
            slot.last_used = self._clock
            if not _tokens_to_feed(slot):
                sampling.append(slot)
                last_rows.append(row - 1)
        if sampling:
            self._sample(sampling, hidden[torch.tensor(last_rows, device=device)])

    def _next_chunks(self, active: Sequence[_Slot]) -> list[Chunk]:
        budget = self.max_prefill_tokens
        chunks = []
        for slot in active:
            if slot.request is not None and slot.request.leader is not None:
                continue
            start, num_tokens = len(slot.cached_ids), len(_tokens_to_feed(slot))
            if num_tokens > 1 or start == 0:
                num_tokens = min(num_tokens, budget, MAX_CONTINUING_TOKENS if start else num_tokens)
                budget -= num_tokens
            if num_tokens:
                chunks.append(Chunk(slot=slot.index, start=start, num_tokens=num_tokens))
        return [chunk for kind in split_chunks(chunks) for chunk in kind]

    def _sample(self, slots: Sequence[_Slot], hidden: Tensor) -> None:
        requests = [slot.request for slot in slots if slot.request is not None]
        uniforms = torch.tensor(
            [request.uniforms[len(request.sampled_ids)] for request in requests],
            dtype=torch.float64,
            device=hidden.device,
        )
        logits = hidden @ self.model.lm_head.weight.T
        token_ids, log_probs = sample(logits, uniforms, temperature=self.temperature)
        self.num_sampled_tokens += len(requests)
        for slot, request, token_id, log_prob in zip(
            slots, requests, token_ids.tolist(), log_probs.tolist(), strict=True
        ):
            request.sampled_ids.append(token_id)
            request.log_probs.append(log_prob)
            is_stopped = token_id in self.stop_ids
            if is_stopped or len(request.sampled_ids) == request.max_tokens:
                self._finish(slot, request, is_stopped=is_stopped)

    def _finish(self, slot: _Slot, request: _Request, *, is_stopped: bool) -> None:
        slot.request = None
        slot.is_finished = request.sampled_ids[-1] == self.return_id
        # Row i of the cache's routes belongs to input i, which predicted token i + 1.
        num_inputs = len(request.token_ids) + len(request.sampled_ids) - 1
        routes = self._routes[slot.index, :num_inputs].cpu().numpy().copy()
        if not request.future.done():
            request.future.set_result(
                Action(
                    token_ids=tuple(request.sampled_ids),
                    log_probs=tuple(request.log_probs),
                    is_stopped=is_stopped,
                    policy_version=self.policy_version,
                    routes=routes,
                )
            )


def _occupy(slot: _Slot, request: _Request) -> None:
    """Keeps the slot's prefix where the request extends it by at least one token; a ring can't be shortened."""
    num_cached = len(slot.cached_ids)
    is_extended = num_cached < len(request.token_ids) and slot.cached_ids == request.token_ids[:num_cached]
    if slot.episode_id != request.episode_id or not is_extended:
        slot.cached_ids.clear()
    slot.episode_id, slot.request, slot.is_finished = request.episode_id, request, False


def _tokens_to_feed(slot: _Slot) -> list[int]:
    """The stream's tokens that are not in the cache yet."""
    request = slot.request
    assert request is not None
    num_cached, num_given = len(slot.cached_ids), len(request.token_ids)
    if num_cached < num_given:
        return request.token_ids[num_cached:] + request.sampled_ids
    return request.sampled_ids[num_cached - num_given :]
