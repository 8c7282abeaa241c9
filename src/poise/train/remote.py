"""Servers as the engine of a run: they get the weights of each step before they sample from them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch

from poise.engine import EngineError, SglangEngine, VllmEngine
from poise.engine.http import FAILURES, Marks, Outage, ServerGone
from poise.model import GptOss
from poise.parallel import ALONE, Mesh, led, settled, together
from poise.train.sync import WeightSync
from poise.train.weights import SyncError
from poise.types import Action


class RemoteEngine:
    """A ``Policy`` over servers that follow ``model``.

    ``new_policy_version`` only says that the weights have moved; they are pushed before the next token is sampled, so
    that a push that fails comes when the step is written down. A push gives the servers the weights under a name that
    no other run has (it begins with ``run``), and proves that they arrived (``WeightSync``). A server that was
    restarted has lost the name: it gets the weights again before anything it samples is taken. ``make_sync`` is called
    when the servers have passed the handshake, ``on_close`` when the engine closes.

    On a mesh each rank has such an engine and samples for itself. ``handshake`` and ``update`` are for all ranks
    together: the first talks to the servers, all gather the weights. All must have called ``update`` before one
    samples, and what one of them raises, all raise. ``is_ahead``: there may be requests between a step and its update,
    whose tokens are still of the version before.
    """

    def __init__(
        self,
        client: VllmEngine | SglangEngine,
        model: GptOss,
        *,
        run: str,
        make_sync: Callable[[], Awaitable[WeightSync]],
        max_context_tokens: int,
        is_ahead: bool = False,
        on_close: Callable[[], None] = lambda: None,
        mesh: Mesh = ALONE,
    ) -> None:
        self.client, self.model, self.make_sync, self.on_close = client, model, make_sync, on_close
        self.max_context_tokens, self.mesh, self.is_ahead = max_context_tokens, mesh, is_ahead
        self._run = run
        self._wanted = 0
        self._pushed: int | None = None
        self._num_pushes = 0
        self._newest = ""
        self._sync: WeightSync | None = None
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        client.servers.marks = Marks(read=client.read_mark, restore=self._restore)

    @property
    def num_sampled_tokens(self) -> int:
        return self.client.num_sampled_tokens

    def new_policy_version(self, version: int) -> None:
        """The weights are those of ``version`` from now on; the same version again means that they have not moved."""
        self._wanted = version

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        """Raises RunError where no server can be had, or none that computes what the trainer does."""
        if self._pushed != self._wanted:
            if self.mesh.shards is None:
                await self.update()
            elif self._pushed is None or not self.is_ahead:
                raise RuntimeError(f"the weights of step {self._wanted} were not pushed before sampling: call update")
        return await self.client(token_ids, episode_id=episode_id, seed=seed, max_tokens=max_tokens)

    async def handshake(self) -> WeightSync:
        """Once: refuses servers that cannot be trained with. Raises RunError with the reason."""
        if self._sync is None:
            # Every rank must reach every server; what they are is asked once.
            together(self.mesh, await settled(self.mesh, self.client.servers.wait_until_all_healthy()))
            await led(self.mesh, self._shake_hands, carries=FAILURES)
            self._sync = await self.make_sync()
        return self._sync

    async def update(self) -> None:
        """Every server holds the weights as they are now. Tries again where one goes away meanwhile."""
        if self.mesh.device is not None and self.mesh.device.type == "cuda":
            torch.cuda.set_device(self.mesh.device)  # a loop of its own runs in a thread that begins with the first GPU
        async with self._one_at_a_time():
            if self._pushed == self._wanted:  # another request has done it
                return
            sync, servers, version = await self.handshake(), self.client.servers, self._wanted
            for attempt in range(servers.retries + 1):
                try:
                    await self._push(sync, version)
                    return
                except FAILURES as error:
                    if not await led(self.mesh, partial(self._may_try_again, error)):
                        raise
                    if attempt == servers.retries:
                        raise EngineError(f"the weights of step {version} did not arrive: {error}") from error
                    servers.tell(f"the weights of step {version} did not arrive everywhere ({error}); trying again")
                    await led(self.mesh, servers.wait_until_all_healthy)

    async def close(self) -> None:
        """Removes what was kept for the servers, and closes connections."""
        try:
            if self._sync is not None:
                await self._sync.route.close()
            await self.client.close()
        finally:
            self.on_close()

    def _one_at_a_time(self) -> asyncio.Lock:
        """Two updates at once could leave a server with the weights of one and the name of the other."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]

    async def _shake_hands(self) -> None:
        await self.client.resume()  # an earlier run may have ended while they were paused
        await self.client.handshake(max_context_tokens=self.max_context_tokens)

    async def _push(self, sync: WeightSync, version: int) -> None:
        servers = self.client.servers
        self._num_pushes += 1
        self._newest = mark = f"{self._run}-{version}-{self._num_pushes}."  # a rehearsal's name goes on from there
        servers.valid_marks |= {mark}  # what is under way may be answered before or after
        if self._pushed is None:
            await sync.rehearse(self.model, version, mark=mark)
        else:
            await sync.sync(self.model, version, mark=mark)
        servers.valid_marks = frozenset({mark})
        await servers.welcome_all()
        self._pushed = version

    async def _may_try_again(self, error: Exception) -> bool:
        return is_outage(error) or await self._is_forgotten()

    async def _is_forgotten(self) -> bool:
        """Whether a server has lost the name of its weights: it was restarted during a push, which failed for that."""
        for server in self.client.servers.all:
            try:
                if not (await self.client.read_mark(server.url)).startswith(self._newest):
                    return True
            except Outage:
                return True
        return False

    async def _restore(self, url: str) -> None:
        """For one server that came back. Raises Outage where it has gone again."""
        async with self._one_at_a_time():
            mark = self._newest
            if self._sync is None or await self.client.read_mark(url) == mark:
                return  # an update has reached it meanwhile, or another rank
            try:
                await self._sync.give(url, mark=mark)
            except SyncError as error:
                if is_silent(error):
                    raise Outage(str(error)) from error
                raise


def is_outage(error: BaseException | None) -> bool:
    """Whether a server that did not answer is at the bottom of it, and has not been waited for: try again then."""
    while error is not None and not isinstance(error, ServerGone):
        if isinstance(error, Outage):
            return True
        error = error.__cause__
    return False


def is_silent(error: BaseException | None) -> bool:
    """Whether no answer at all is at the bottom of it, not even one of 5xx."""
    while error is not None and not isinstance(error, ServerGone):
        if isinstance(error, Outage):
            return error.__cause__ is not None
        error = error.__cause__
    return False
