"""Servers as the engine of a run: they get the weights of each step before they sample from them."""

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from poise.config import RunError
from poise.engine import EngineError, SglangEngine, VllmEngine
from poise.engine.http import Marks, Outage, ServerGone, Servers
from poise.model import GptOss, save_model
from poise.model.checkpoint import Format
from poise.train.diagnosis import Older
from poise.train.sync import WeightSync
from poise.train.weights import stored_parameters
from poise.types import Action


class ReloadRoute:
    """A checkpoint folder that every server reads when it is told to, by ``tell(url, folder)``.

    The folder must mean the same to the servers. The newest checkpoint is kept for servers that come back, and the one
    before for a diagnosis.
    """

    def __init__(
        self, servers: Servers, folder: Path, tell: Callable[[str, Path], Awaitable[None]], *, format: Format
    ) -> None:
        self.servers, self.folder, self.tell, self.format = servers, folder.resolve(), tell, format
        self._count = 0
        self._kept: list[Path] = []

    async def push(self, model: GptOss) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"weights_{self._count:06d}"
        self._count += 1
        await asyncio.to_thread(save_model, model, path, self.format)
        self._kept.append(path)
        while len(self._kept) > 2:
            shutil.rmtree(self._kept.pop(0))
        await asyncio.gather(*(self.give(server.url) for server in self.servers.all))

    async def give(self, url: str) -> None:
        await self.tell(url, self._kept[-1])

    def older(self) -> Older | None:
        return stored_parameters(self._kept[-2]) if len(self._kept) > 1 else None

    async def close(self) -> None:
        for path in self._kept:
            shutil.rmtree(path)
        self._kept.clear()


class RemoteEngine:
    """A ``Policy`` over servers that follow ``model``.

    ``new_policy_version`` only says that the weights have moved; they are pushed before the next token is sampled, so
    that a push that fails comes when the step is written down. A push gives the servers the weights under a name that
    no other run has, and proves that they arrived (``WeightSync``). A server that was restarted has lost the name: it
    gets the weights again before anything it samples is taken. ``make_sync`` is called when the servers have passed the
    handshake, ``on_close`` when the engine closes. ``is_ahead``: ``model`` may move while the servers sample, so a
    server that came back is given the weights of the last push without a comparison with ``model``.
    """

    def __init__(
        self,
        client: VllmEngine | SglangEngine,
        model: GptOss,
        *,
        make_sync: Callable[[], Awaitable[WeightSync]],
        max_context_tokens: int,
        is_ahead: bool = False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.client, self.model, self.make_sync, self.on_close = client, model, make_sync, on_close
        self.max_context_tokens, self.is_ahead = max_context_tokens, is_ahead
        self._run = secrets.token_hex(4)
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
            await self.update()
        return await self.client(token_ids, episode_id=episode_id, seed=seed, max_tokens=max_tokens)

    async def handshake(self) -> WeightSync:
        """Once: refuses servers that cannot be trained with. Raises RunError with the reason."""
        if self._sync is None:
            for server in self.client.servers.all:
                await self.client.servers.wait_until_healthy(server.url)
            await self.client.resume()  # an earlier run may have ended while they were paused
            await self.client.handshake(max_context_tokens=self.max_context_tokens)
            self._sync = await self.make_sync()
        return self._sync

    async def update(self) -> None:
        """Every server holds the weights as they are now. Tries again where one goes away meanwhile."""
        async with self._one_at_a_time():
            if self._pushed == self._wanted:  # another request has done it
                return
            sync, servers, version = await self.handshake(), self.client.servers, self._wanted
            for attempt in range(servers.retries + 1):
                try:
                    await self._push(sync, version)
                    return
                except (RunError, Outage) as error:
                    if not is_outage(error) and not await self._is_forgotten():
                        raise
                    if attempt == servers.retries:
                        raise EngineError(f"the weights of step {version} did not arrive: {error}") from error
                    servers.tell(f"the weights of step {version} did not arrive everywhere ({error}); trying again")
                    for server in servers.all:
                        await servers.wait_until_healthy(server.url)

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
        self._pushed = version

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
        """For one server that came back."""
        async with self._one_at_a_time():
            mark = self._newest
            if self._sync is None or await self.client.read_mark(url) == mark:
                return  # an update has reached it meanwhile
            if self.is_ahead:
                await self._sync.route.give(url)
                await self.client.write_mark(url, mark)
            else:
                await self._sync.give(self.model, url, mark=mark)


def is_outage(error: BaseException | None) -> bool:
    """Whether a server that did not answer is at the bottom of it, and has not been waited for: try again then."""
    while error is not None and not isinstance(error, ServerGone):
        if isinstance(error, Outage):
            return True
        error = error.__cause__
    return False
