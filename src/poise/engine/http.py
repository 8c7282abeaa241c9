"""Servers that sample for us: sticky episodes, retries after transport errors, outages, and who has which weights."""

import asyncio
import itertools
import logging
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import httpx2 as httpx

from poise.config import ConfigError, RunError

log = logging.getLogger(__name__)

MAX_REMEMBERED_EPISODES = 100_000
# Idle connections are closed before the servers' own 5 s are over: one that closes while it is reused looks like an
# outage.
KEEP_ALIVE_S = 3.0
CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 10.0
FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
BUSY_OR_BROKEN = {408, 425, 429, *range(500, 600)}  # a proxy, an overload or a dying server, not our request


class EngineError(RunError):
    """What a server answered cannot be trained on, or no server answers any more."""


class ServerGone(EngineError):
    """A server was waited for as long as ``engine.max_wait_s`` allows."""


class Outage(Exception):
    """A server did not answer, or no longer has the weights that it was given. Another try may succeed."""


# What may come of asking a server.
FAILURES = (RunError, Outage)


@dataclass(eq=False)
class Server:
    """``is_ready``: it answered when it was last asked, and with the weights it should have."""

    url: str
    is_ready: bool = True
    trusted: "WeakSet[Any]" = field(default_factory=WeakSet)  # connections over which the current mark was seen


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How a server is told which weights it holds, and asked. A process that was restarted has forgotten it.

    ``read(url)`` raises Outage where the server does not answer. ``restore(url)`` gives the current weights and the
    mark to a server that came back without them.
    """

    read: Callable[[str], Awaitable[str]]
    restore: Callable[[str], Awaitable[None]]


class _Loop:
    """What belongs to one event loop: connections, and the tasks that wait for servers to come back."""

    def __init__(self, timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=max(32, num_files - 256), max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S
            ),
            trust_env=False,  # the servers are the user's own machines: no proxy of the environment
        )
        self.changed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()


class Servers:
    """Equal servers behind ``urls``, each addressed directly and not through a balancer, since each gets the weights.

    An episode stays with one server, whose prefix cache holds its tokens, until that server goes away. ``retries``: how
    often one request is sent again after a transport error or an answer 5xx; everything else that is no success raises
    EngineError at once. ``max_wait_s``: how long a request waits while no server is ready. ``restart(url,
    is_first)`` is called whenever a server refuses connections: it starts it the first time of an outage, and later
    raises where that has failed. ``tell`` hears of outages and returns. ``first``: of servers with equally few episodes
    the one with this number (modulo theirs) is taken first, so that several clients do not all begin with the same.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 600.0,
        retries: int = 5,
        max_wait_s: float = 900.0,
        restart: Callable[[str, bool], None] | None = None,
        tell: Callable[[str], None] = log.warning,
        first: int = 0,
    ) -> None:
        if not urls:
            raise ConfigError("engine.urls is empty: name at least one server, as http://HOST:PORT")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"engine.urls must begin with http:// or https://, got {url!r}")
        if len(set(urls)) < len(urls):
            raise ConfigError(f"engine.urls names a server twice: {', '.join(urls)}")
        self.all = [Server(url.rstrip("/")) for url in urls]
        self.timeout_s, self.retries, self.max_wait_s = timeout_s, retries, max_wait_s
        self.restart, self.tell = restart, tell
        self._order = [*self.all[first % len(urls) :], *self.all[: first % len(urls)]]
        self.marks: Marks | None = None
        self.valid_marks: frozenset[str] = frozenset()  # while weights are pushed, those of before and after
        self._server_of: OrderedDict[str, Server] = OrderedDict()
        self._num_episodes: Counter[Server] = Counter()
        self._error: EngineError | None = None
        self._state: _Loop | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], *, episode_id: str, headers: Mapping[str, str] | None = None
    ) -> tuple[Server, Any]:
        """(who answered, its JSON) of the server that has this episode; waits, retries and moves on as said above."""
        for attempt in itertools.count(1):
            server = await self._ready_server(episode_id)
            try:
                response = await self._send(server.url, "POST", path, json=body, headers=headers)
                await self._require_current_weights(server, response)
                return server, _json(response)
            except Outage as error:
                await self._suspect(server, error)
                if attempt > self.retries:
                    raise EngineError(
                        f"{server.url}{path} failed {attempt} times, the last time with: {error} (engine.retries "
                        f"{self.retries})"
                    ) from error
                await asyncio.sleep(_delay(attempt))
        raise AssertionError

    async def ask(self, url: str, method: str, path: str, **arguments: Any) -> Any:
        """JSON of one server, in a single try; None for an empty body. Raises Outage or EngineError."""
        return _json(await self._send(url, method, path, **arguments))

    async def ask_all(self, method: str, path: str, **arguments: Any) -> list[Any]:
        """JSON of every server, in the order of the urls. Raises Outage or EngineError of the first that fails."""
        return list(await asyncio.gather(*(self.ask(server.url, method, path, **arguments) for server in self.all)))

    async def wait_until_healthy(self, url: str) -> None:
        """Raises EngineError where ``/health`` does not answer within ``max_wait_s``."""
        deadline, is_started = time.monotonic() + self.max_wait_s, False
        for attempt in itertools.count(1):
            try:
                await self._send(url, "GET", "/health", timeout=HEALTH_TIMEOUT_S)
                return
            except Outage as error:
                if self.restart is not None and isinstance(error.__cause__, httpx.ConnectError):
                    if not is_started:
                        self.tell(f"{url} is not there: engine.command starts it")
                    self.restart(url, not is_started)
                    is_started = True
                if time.monotonic() > deadline:
                    raise ServerGone(
                        f"{url} has not answered for {self.max_wait_s:g} s (engine.max_wait_s): {error}"
                    ) from error
            await asyncio.sleep(_delay(attempt))

    async def wait_until_all_healthy(self) -> None:
        """One after the other. Raises as ``wait_until_healthy``."""
        for server in self.all:
            await self.wait_until_healthy(server.url)

    async def welcome_all(self) -> None:
        """All of them hold the weights they should: also those that were given up get requests again."""
        state = self._loop_state()
        for server in self.all:
            server.is_ready = True
        async with state.changed:
            state.changed.notify_all()

    async def close(self) -> None:
        """Closes the connections of the running loop; a later call opens new ones."""
        state = self._state
        if state is not None and state.loop is asyncio.get_running_loop():
            for task in state.tasks:
                task.cancel()
            await asyncio.gather(*state.tasks, return_exceptions=True)
            await state.client.aclose()
            self._state = None

    def _loop_state(self) -> _Loop:
        if self._state is None or self._state.loop is not asyncio.get_running_loop():
            self._state = _Loop(self.timeout_s)  # connections do not outlive their loop
        return self._state

    async def _send(self, url: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = await self._loop_state().client.request(method, url + path, **arguments)
        except httpx.TransportError as error:
            raise Outage(f"{url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code in BUSY_OR_BROKEN:
            raise Outage(f"{url}{path} answered {response.status_code}: {response.text[:300]}")
        if not response.is_success:
            raise EngineError(f"{url}{path} refused: {response.status_code}: {response.text[:500]}")
        return response

    async def _require_current_weights(self, server: Server, response: httpx.Response) -> None:
        """Raises Outage where the process that answered does not hold the weights it should.

        A connection ends with the process behind it. So the mark is asked for once a connection, *after* an answer came
        over it: whoever answers then answered before, or has been restarted since and lost the mark.
        """
        connection = response.extensions.get("network_stream")
        if self.marks is None or not self.valid_marks or connection in server.trusted:
            return
        mark = await self.marks.read(server.url)
        if mark not in self.valid_marks:
            raise Outage(f"{server.url} holds other weights ({mark!r}) than it was given: it was restarted")
        if connection is not None:
            server.trusted.add(connection)

    async def _ready_server(self, episode_id: str) -> Server:
        server = self._server_of.get(episode_id)
        if server is not None and server.is_ready:
            return server
        state = self._loop_state()
        if not any(server.is_ready for server in self.all):
            for down in self.all:  # a new loop has lost the tasks of the old one
                self._start_reviving(down)
            async with state.changed:
                try:
                    await asyncio.wait_for(state.changed.wait_for(self._can_go_on), self.max_wait_s)
                except TimeoutError:
                    raise ServerGone(
                        f"no engine server was ready for {self.max_wait_s:g} s (engine.max_wait_s): "
                        f"{', '.join(server.url for server in self.all)}"
                    ) from None
        if self._error is not None:
            raise self._error
        if server is not None:
            self._num_episodes[server] -= 1
        server = min((s for s in self._order if s.is_ready), key=lambda s: self._num_episodes[s])
        self._server_of[episode_id] = server
        self._num_episodes[server] += 1
        if len(self._server_of) > MAX_REMEMBERED_EPISODES:
            self._num_episodes[self._server_of.popitem(last=False)[1]] -= 1
        return server

    def _can_go_on(self) -> bool:
        return self._error is not None or any(server.is_ready for server in self.all)

    async def _suspect(self, server: Server, error: Outage) -> None:
        if server.is_ready:
            self.tell(f"{error}; trying again")
        server.is_ready = False
        self._start_reviving(server)

    def _start_reviving(self, server: Server) -> None:
        state = self._loop_state()
        if not any(task.get_name() == server.url and not task.done() for task in state.tasks):
            task = asyncio.create_task(self._revive(server, state), name=server.url)
            state.tasks.add(task)
            task.add_done_callback(state.tasks.discard)

    async def _revive(self, server: Server, state: _Loop) -> None:
        """Until the server is healthy and holds the weights it should; an error that stays ends every wait."""
        problem: RunError | None = None
        try:
            while not await self._is_restored(server):
                await asyncio.sleep(FIRST_DELAY_S)
        except RunError as error:
            problem = error
        async with state.changed:
            # From here to its end this task waits for nothing: whoever finds the server lost again starts another.
            if problem is None:
                server.is_ready = True
                self.tell(f"{server.url} answers again")
            else:
                if not any(other.is_ready for other in self.all):
                    self._error = problem if isinstance(problem, EngineError) else EngineError(str(problem))
                self.tell(f"{server.url} is given up: {problem}")
            state.changed.notify_all()

    async def _is_restored(self, server: Server) -> bool:
        """Waits until it is healthy; False where it then went away while its weights were looked at."""
        await self.wait_until_healthy(server.url)
        try:
            await self._restore_weights(server)
        except Outage as error:
            self.tell(f"{error}; trying again")
            return False
        return True

    async def _restore_weights(self, server: Server) -> None:
        if self.marks is None or not self.valid_marks or await self.marks.read(server.url) in self.valid_marks:
            return
        server.trusted.clear()
        self.tell(f"{server.url} came back without the current weights: it gets them before it samples")
        await self.marks.restore(server.url)
        mark = await self.marks.read(server.url)
        if mark not in self.valid_marks:
            raise EngineError(f"{server.url} was given the current weights and says {mark!r}: another run uses it too")


def _delay(attempt: int) -> float:
    return min(FIRST_DELAY_S * 2 ** (attempt - 1), LAST_DELAY_S)


def _json(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError as error:
        raise EngineError(f"{response.url} answered no JSON: {response.text[:200]!r}") from error
