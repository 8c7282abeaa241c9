"""The trainer's side: sandboxes, sessions, and the connection of an event loop to a fork server."""

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import threading
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from poise.config import SandboxConfig
from poise.sandbox.limits import Limits, Result, SandboxError, Session
from poise.sandbox.remote import RemoteSession, check_remote
from poise.sandbox.start import MODES, Server, start_server
from poise.sandbox.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Where model-written Python runs. Equal sandboxes share one fork server in a process, started on first use.

    ``mode``: "auto" takes the strongest protection that works here; "bubblewrap", "namespaces" or "landlock" that one
    or none. ``url``: of a SandboxFusion server, used instead. ``allow_unsandboxed``: go on where nothing protects.
    ``packages``: what cells can import beside the standard library, loaded beforehand where installed, with what they
    require.
    """

    mode: str = "auto"
    url: str | None = None
    allow_unsandboxed: bool = False
    packages: tuple[str, ...] = ("numpy", "sympy")

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise ValueError(f"Sandbox.mode must be one of auto, {', '.join(MODES)}, got {self.mode!r}")

    @classmethod
    def from_config(cls, config: SandboxConfig) -> "Sandbox":
        return cls(
            mode=config.mode, url=config.url, allow_unsandboxed=config.allow_unsandboxed, packages=config.packages
        )

    def session(self, limits: Limits | None = None, *, seed: int | None = None) -> Session:
        """An interpreter that remembers. ``seed``: of ``random`` and numpy's global state; None draws one."""
        if self.url is not None:
            return RemoteSession(self.url, limits or Limits(), seed)
        return LocalSession(self, limits or Limits(), seed)

    async def run(self, code: str, *, limits: Limits | None = None, seed: int | None = None) -> Result:
        """Runs ``code`` in a fresh interpreter, gone afterwards."""
        session = self.session(limits, seed=seed)
        try:
            return await session.run_once(code)
        finally:
            await session.close()

    def walls(self) -> dict[str, Any]:
        """What is in force. Starts the fork server, or asks the remote one; raises ``SandboxError`` if that fails."""
        if self.url is not None:
            check_remote(self.url)
            return {"mode": "http", "url": self.url}
        server = _one_server(self).get()
        return {"mode": server.mode, **server.walls}

    def protection(self) -> str:
        """One line: what keeps cells in here. Starts the fork server; raises ``SandboxError`` if it can't."""
        return describe(self.walls())


class LocalSession:
    """A stateful interpreter, as a notebook's: ``async with sandbox.session() as session: await session.run(code)``.

    Variables persist over cells, the value of a last expression is shown, an exception leaves the session alive. A cell
    at its time limit is interrupted; one that goes on is killed, variables are lost, and the next cell gets a fresh
    interpreter: ``Result.notice`` says which. Lives in one event loop and runs one cell at a time.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, seed: int | None) -> None:
        self.sandbox, self.limits, self.seed = sandbox, limits, seed
        self._connection: _Connection | None = None
        self._number = 0
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "LocalSession":
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Starts the interpreter, if it has not been. Raises ``SandboxError`` where that cannot be done."""
        async with self._lock:
            await self._open()

    async def run(self, code: str) -> Result:
        """Runs a cell. Time-outs, crashes, floods and syntax errors come back as text, never as exceptions."""
        if "\0" in code:
            return _null_bytes()
        async with self._lock:
            await self._open()
            return await self._run(code, is_once=False)

    async def run_once(self, code: str) -> Result:
        """Runs ``code`` as a whole script, in an interpreter that is made when its turn comes and ends with it."""
        if "\0" in code:
            return _null_bytes()
        async with self._lock:
            await self._open(is_lazy=True)
            result = await self._run(code, is_once=True)
            if self._connection is not None and self._connection.is_lost:  # the fork server was killed: once more
                await self._open(is_lazy=True)
                result = await self._run(code, is_once=True)
            return result

    async def close(self) -> None:
        """Ends the interpreter. May be called twice, or without ``open``."""
        self._close()

    async def _open(self, *, is_lazy: bool = False) -> None:
        if self._connection is not None and not self._connection.is_lost:
            return
        connection = self._connection = await _connection(self.sandbox)
        self._number = next(_NUMBERS)
        message = {
            "op": "open", "session": self._number, "limits": vars(self.limits), "seed": self.seed, "is_lazy": is_lazy
        }  # fmt: skip
        if is_lazy:
            connection.send(message)
            return
        answer = await self._ask(message, "opened")
        if answer is None:
            raise SandboxError("the fork server was killed")

    async def _run(self, code: str, *, is_once: bool) -> Result:
        answer = await self._ask({"op": "run", "session": self._number, "code": code, "is_once": is_once}, "done")
        if answer is None:
            return Result(output="", exit_status=-signal.SIGKILL, notice="[the interpreter was killed]", is_lost=True)
        return _result(answer, self.limits, is_once=is_once)

    async def _ask(self, message: dict[str, Any], op: str) -> dict[str, Any] | None:
        """None: the fork server was lost. Raises ``SandboxError`` where it could not make an interpreter."""
        assert self._connection is not None
        try:
            answer = await self._connection.ask(message, op)
        except BaseException:
            self._close()  # cancelled: whatever runs there must end
            raise
        if answer is not None and answer["error"] is not None:
            self._close()
            raise SandboxError(f"the sandbox could not start an interpreter: {answer['error']}")
        return answer

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.send({"op": "close", "session": self._number})
            self._connection = None


def _null_bytes() -> Result:
    return Result(output="SyntaxError: source code cannot contain null bytes", exit_status=1)


def _result(answer: dict[str, Any], limits: Limits, *, is_once: bool) -> Result:
    status, stopped = answer["exit_status"], answer["stopped"]
    said = {
        "time": f"timed out after {limits.wall_s:g} s",
        "cpu": f"timed out after {limits.cpu_s:g} s of CPU time",
        "flood": "stopped: too much output",
        "files": f"stopped: too many files, too deep, or more than {limits.file_mib} MiB of them",
    }.get(stopped, "")
    if not said and status < 0:
        said = f"killed by {signal.Signals(-status).name}"
    elif not said and answer["is_lost"] and not is_once:
        said = f"the interpreter ended with exit status {status}"
    elif not said and status > 0 and not answer["output"]:
        said = f"exit status {status}"
    if not is_once and answer["is_lost"]:
        said += "; the interpreter was restarted, all variables are lost"
    elif not is_once and stopped:
        said += "; interrupted, variables are kept"
    return Result(
        output=answer["output"],
        exit_status=status or int(bool(stopped)),
        timed_out=stopped in ("time", "cpu"),
        num_cut_bytes=answer["num_cut_bytes"],
        notice=f"[{said}]" if said else "",
        wall_s=answer["wall_s"],
        is_lost=answer["is_lost"] and not is_once,
    )


_NUMBERS = itertools.count(1)


class _Connection:
    """Of one event loop to one fork server. Keeps no reference to the loop, which may end unannounced."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_lost = False
        self.wire = Wire(server.connect())
        self._waiting: dict[int, tuple[str, asyncio.Future[dict[str, Any] | None]]] = {}
        loop = asyncio.get_running_loop()
        loop.add_reader(self.wire.fileno(), self._on_readable)
        weakref.finalize(loop, self.wire.close)

    async def ask(self, message: dict[str, Any], op: str) -> dict[str, Any] | None:
        """The answer ``op`` to ``message``, or the one that says what went wrong. None: the server is gone."""
        if self.is_lost:
            return None
        future: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting[message["session"]] = (op, future)
        try:
            self.send(message)
            return await future
        finally:
            self._waiting.pop(message["session"], None)

    def send(self, message: dict[str, Any]) -> None:
        if self.is_lost:
            return
        try:
            self.wire.send(message)
            if self.wire.unsent:
                asyncio.get_running_loop().add_writer(self.wire.fileno(), self._on_writable)
        except (OSError, RuntimeError):  # the server, or the event loop, is gone
            self._lose()

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):  # noticed by the reader
            self.wire.flush()
        if not self.wire.unsent:
            asyncio.get_running_loop().remove_writer(self.wire.fileno())

    def _on_readable(self) -> None:
        answers = self.wire.receive()
        if answers is None:
            self._lose()
            return
        for answer in answers:
            op, future = self._waiting.get(answer["session"], ("", None))
            if future is not None and not future.done() and answer["op"] in (op, "failed"):
                future.set_result(answer)

    def _lose(self) -> None:
        self.is_lost = True
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            asyncio.get_running_loop().remove_reader(self.wire.fileno())
            asyncio.get_running_loop().remove_writer(self.wire.fileno())
        self.wire.close()
        for _, future in self._waiting.values():
            if not future.done():
                future.set_result(None)


class _OneServer:
    """The fork server of this process for one sandbox, started on first use and again after it was lost."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._server: Server | None = None
        self._lock = threading.Lock()

    @property
    def current(self) -> Server | None:
        server = self._server
        return server if server is not None and server.owner == os.getpid() else None

    def get(self) -> Server:
        """Starts it if necessary. Blocks for some 0.7 s then."""
        with self._lock:
            if self.current is None:
                sandbox = self._sandbox
                self._server = start_server(
                    sandbox.mode,
                    allow_unsandboxed=sandbox.allow_unsandboxed,
                    packages=sandbox.packages,
                )
                atexit.register(self._server.close)
            assert self._server is not None
            return self._server

    def discard(self, server: Server) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
                atexit.unregister(server.close)
                server.close()


_SERVERS: dict[Sandbox, _OneServer] = {}
_Connections = dict[Sandbox, _Connection]
_CONNECTIONS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections]" = weakref.WeakKeyDictionary()


def _one_server(sandbox: Sandbox) -> _OneServer:
    return _SERVERS.setdefault(sandbox, _OneServer(sandbox))


async def _connection(sandbox: Sandbox) -> _Connection:
    """Of the running event loop. A server that was lost is replaced."""
    loop = asyncio.get_running_loop()
    if loop not in _CONNECTIONS:
        _forget_closed_loops()
    connections = _CONNECTIONS.setdefault(loop, {})
    known = connections.get(sandbox)
    if known is not None and not known.is_lost and known.server.owner == os.getpid():
        return known
    one = _one_server(sandbox)
    if known is not None:
        await asyncio.to_thread(one.discard, known.server)
    for _ in range(2):
        running = one.current
        server = running if running is not None else await asyncio.to_thread(one.get)
        fresh = connections.get(sandbox)  # made by another task in the meantime
        if fresh is not None and fresh is not known:
            return fresh
        try:
            connections[sandbox] = _Connection(server)
            return connections[sandbox]
        except OSError:  # killed since it was last used
            await asyncio.to_thread(one.discard, server)
    raise SandboxError("the fork server ends as soon as it was started")


def _forget_closed_loops() -> None:
    """Ends the sessions of event loops that ended without closing them."""
    for loop, connections in list(_CONNECTIONS.items()):
        if loop.is_closed():
            for connection in connections.values():
                connection.wire.close()
            del _CONNECTIONS[loop]


def describe(walls: dict[str, Any]) -> str:
    """``Sandbox.walls`` as one line."""
    mode = walls["mode"]
    if mode == "http":
        return f"SandboxFusion at {walls['url']}: what protects that machine is its own matter"
    if mode == "none":
        return "NONE: model-written code can do whatever you can (sandbox.allow_unsandboxed)"
    own = ["a user of its own"] if walls["switches_user"] else []
    threads = "" if walls["allows_threads"] else ", no threads"
    landlock = f", Landlock {walls['landlock']}" if walls["landlock"] else ""
    if mode == "landlock":
        inside = ["no file but the libraries and a working directory"]
    else:
        inside = ["a private read-only root", "a process space", "an empty directory in memory", "no network"]
    return f"{mode}{landlock}, seccomp{threads}: each interpreter has {', '.join([*own, *inside])}"


def protection() -> str:
    """``Sandbox().protection()``."""
    return Sandbox().protection()
