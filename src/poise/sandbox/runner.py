"""The trainer's side of the sandbox: starts the fork server, sends it snippets, reads the answers without blocking."""

import array
import asyncio
import atexit
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!I")
# Calls under way at once in an event loop: enough to keep the server busy while the loop does other work, few enough
# for the kernel's limit on descriptors in flight.
_MAX_PENDING = 32
_START_S = 30.0
# Stands in for the packages' own __init__ files, whose imports would be copied into every forked child.
_START = """
import sys, types
for name, path in (("poise", sys.argv[1]), ("poise.sandbox", sys.argv[2])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from poise.sandbox.zygote import serve
serve(int(sys.argv[3]), sys.argv[4], prelude=sys.argv[5], paths=sys.argv[6:])
"""


class SandboxError(RuntimeError):
    """The sandbox itself does not work: it cannot be started, or stopped answering."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one snippet. ``num_processes`` counts threads too; output beyond ``num_output_bytes`` is cut in its middle."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mib: int = 512
    file_mib: int = 16
    num_processes: int = 16
    num_output_bytes: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Limits.{name} must be a positive number, got {value}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a snippet did.

    ``output``: standard output and standard error in the order written, cut in the middle where too long
    (``num_cut_bytes``). ``exit_status``: as a script's; -N when signal N ended it. ``timed_out``: at the wall-clock or
    the CPU limit. ``notice``: what the sandbox has to say, "" where there is nothing. ``wall_s``: seconds it ran.
    """

    output: str
    exit_status: int
    timed_out: bool = False
    num_cut_bytes: int = 0
    notice: str = ""
    wall_s: float = 0.0

    @property
    def is_error(self) -> bool:
        return self.exit_status != 0

    @property
    def text(self) -> str:
        """What the policy sees: output and notice, never empty."""
        parts = [part for part in (self.output.rstrip("\n"), self.notice) if part]
        return "\n".join(parts) or "[no output]"


async def run_python(code: str, *, limits: Limits | None = None, prelude: str = "") -> Result:
    """Runs ``code`` in the sandbox, as a notebook does: the value of a last expression is shown if nothing was printed.

    At most as many snippets as cores run at once, the others wait; waiting does not count as time. Only the standard
    library can be imported, unless there is a ``prelude``: trusted code that a fork server of its own runs once, with
    the installed packages in reach; its imports are there for every snippet. ``random`` starts from the same seed in
    every snippet. Time-outs, crashes, floods and syntax errors come back as text; ``SandboxError`` means that the
    sandbox itself is broken.
    """
    limits = limits or Limits()
    if "\0" in code:
        return Result(output="SyntaxError: source code cannot contain null bytes", exit_status=1)
    request = json.dumps({"code": code, **vars(limits)}).encode()
    servers = _SERVERS.setdefault(prelude, _OneServer(prelude))
    async with _places():
        for _ in range(2):  # a server that was killed from outside is replaced once
            running = servers.current
            server = running if running is not None else await asyncio.to_thread(servers.get)
            answer = await _ask(server, request)
            if answer is not None:
                return _result(answer, limits)
            servers.discard(server)
    return Result(output="", exit_status=-signal.SIGKILL, notice="[the interpreter was killed]")


def protection() -> str:
    """One line: what keeps snippets in on this machine. Starts the sandbox; raises ``SandboxError`` if it can't."""
    return _describe(_SERVERS[""].get().walls)


def _result(answer: dict[str, Any], limits: Limits) -> Result:
    if answer["error"] is not None:
        raise SandboxError(f"the sandbox could not set up a snippet: {answer['error']}")
    status, stopped = answer["exit_status"], answer["stopped"]
    if stopped == "time":
        notice = f"[timed out after {min(limits.wall_s, limits.cpu_s):g} s]"
    elif stopped == "flood":
        notice = "[stopped: too much output]"
    elif status < 0:
        notice = f"[killed by {signal.Signals(-status).name}]"
    elif status > 0 and not answer["output"]:
        notice = f"[exit status {status}]"
    else:
        notice = ""
    return Result(
        output=answer["output"],
        exit_status=status,
        timed_out=stopped == "time",
        num_cut_bytes=answer["num_cut_bytes"],
        notice=notice,
        wall_s=answer["wall_s"],
    )


async def _ask(server: "_Server", request: bytes) -> dict[str, Any] | None:
    """One call over its own socket. None: the server is gone."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    try:
        ours.setblocking(False)
        try:
            with theirs:
                server.hand_over(theirs)
            await loop.sock_sendall(ours, _LENGTH.pack(len(request)) + request)
            reply = b""
            while len(reply) < _LENGTH.size or len(reply) < _LENGTH.size + _LENGTH.unpack_from(reply)[0]:
                chunk = await loop.sock_recv(ours, 1 << 16)
                if not chunk:
                    return None
                reply += chunk
        except OSError:
            return None
        answer: dict[str, Any] = json.loads(reply[_LENGTH.size :])
        return answer
    finally:
        ours.close()  # tells a warden that is still at work to kill its snippet


_PLACES: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


def _places() -> asyncio.Semaphore:
    """Of the running event loop."""
    return _PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_PENDING))


class _Server:
    """A running fork server: its process, the socket it takes calls from, and what protects its snippets.

    ``mode``: as in ``zygote.serve``; ``wrapper``: a command that the server is started with. Raises ``SandboxError``
    where it does not start.
    """

    def __init__(self, mode: str, prelude: str, wrapper: Sequence[str] = ()) -> None:
        package = os.path.dirname(__file__)
        python = [os.path.realpath(sys.executable), "-S", "-s", "-c", _START, os.path.dirname(package), package]
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*wrapper, *python, str(theirs.fileno()), mode, prelude, *(_package_paths() if prelude else [])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    "PYTHONHASHSEED": "0",
                    "LANG": "C.UTF-8",
                    "TMPDIR": tempfile.gettempdir(),
                },  # sets keep their order
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        self.walls: dict[str, Any] = {}
        try:
            self.control.settimeout(_START_S)
            (length,) = _LENGTH.unpack(self.control.recv(_LENGTH.size, socket.MSG_WAITALL))
            self.walls = json.loads(self.control.recv(length, socket.MSG_WAITALL))
            self.control.setblocking(False)
        except (OSError, struct.error, ValueError) as error:
            self.walls = {"error": f"no answer from the fork server: {error}"}
        if self.walls["error"] is not None:
            self.close()
            raise SandboxError(self.walls["error"])

    def hand_over(self, connection: socket.socket) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))
        self.control.sendmsg([b"c"], [rights])

    def close(self) -> None:
        """Ends the server and every snippet. In a forked copy of the trainer: only lets go of it."""
        self.control.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.walls.get("base"):
            shutil.rmtree(self.walls["base"], ignore_errors=True)


class _OneServer:
    """The fork server of this process, started on first use and again after it was lost."""

    def __init__(self, prelude: str) -> None:
        self._prelude = prelude
        self._server: _Server | None = None
        self._lock = threading.Lock()

    @property
    def current(self) -> _Server | None:
        server = self._server
        return server if server is not None and server.owner == os.getpid() else None

    def get(self) -> _Server:
        """Starts it if necessary. Blocks for some 50 ms then."""
        with self._lock:
            if self.current is None:
                self._server = _start(self._prelude)
                atexit.register(self._server.close)
            assert self._server is not None
            return self._server

    def discard(self, server: _Server) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
                atexit.unregister(server.close)
                server.close()


_SERVERS = {"": _OneServer("")}  # by prelude


def _start(prelude: str) -> _Server:
    """The strongest protection that works here: namespaces of our own, then bubblewrap's, then none."""
    if sys.platform != "linux":
        return _Server("plain", prelude)
    try:
        return _Server("namespaces", prelude)
    except SandboxError as error:
        reason = str(error)
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is not None:
        with contextlib.suppress(SandboxError):  # installed, but refused by the kernel as well
            server = _Server("plain", prelude, [bubblewrap, *_bubblewrap_arguments()])
            server.walls |= {"base": None, "bubblewrap": True}
            return server
    server = _Server("plain", prelude)
    server.walls["reason"] = reason
    return server


def _bubblewrap_arguments() -> list[str]:
    arguments = [
        "--unshare-all",
        "--die-with-parent",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        tempfile.gettempdir(),
    ]
    paths = {os.path.dirname(__file__), os.path.realpath(sys.executable), *_package_paths()}
    for path in sorted(
        paths
        | {
            os.path.dirname(os.path.dirname(os.__file__)),
            "/lib",
            "/lib64",
            "/usr/lib",
            "/usr/lib64",
            "/etc/ld.so.cache",
        }
    ):
        arguments += ["--ro-bind-try", path, path]
    return arguments


def _package_paths() -> list[str]:
    return [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]


def _describe(walls: dict[str, Any]) -> str:
    if walls["base"] is None and not walls.get("bubblewrap"):
        filtered = ", filtered system calls" if walls["has_seccomp"] else ""
        return f"namespaces: no network, private read-only files, own user and processes{filtered}"
    if walls.get("bubblewrap"):
        return "bubblewrap: no network, private read-only files; snippets share one user and one process space"
    files = "Landlock hides your files" if walls["has_landlock"] else "snippets CAN READ YOUR FILES"
    calls = "seccomp: no network, no processes" if walls["has_seccomp"] else "snippets CAN USE THE NETWORK"
    return f"no namespaces ({walls.get('reason', sys.platform)}): {files}; {calls}; resource limits"
