"""The fork server: a small Python process that forks one child for each snippet.

The trainer's process sends one end of a socket per call. For each the server forks a *warden* (trusted), which reads
the request, forks the *snippet* behind the walls of ``jail``, reads its output, kills it at its limits and answers.
Forking from a small warm process costs about a millisecond, starting an interpreter ten times that.
"""

import array
import ast
import builtins
import contextlib
import gc
import io
import json
import linecache
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import textwrap
import time
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from poise.sandbox import filters, jail

# Loaded once, so that snippets need not: what they import most.
PRELOADED = """bisect cmath collections copy datetime decimal fractions functools heapq itertools json math
    operator random re statistics string threading typing"""
FILE_NAME = "<python>"
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FLOOD_BYTES = 1 << 20  # output beyond this stops the snippet
_LENGTH = struct.Struct("!I")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


@dataclass(frozen=True)
class Walls:
    """What this server puts around snippets. ``base``: where working directories are made, None inside namespaces."""

    base: str | None
    readable: list[str]
    has_seccomp: bool
    has_landlock: bool


def serve(control_fd: int, mode: str, *, prelude: str, paths: list[str]) -> None:
    """Answers until the other side closes. The first message says how the start went.

    ``mode``: "namespaces" or "plain". ``prelude``: trusted code run once, with ``paths`` on ``sys.path``.
    """
    control = socket.socket(fileno=control_fd)
    sys.executable = os.path.realpath(sys.executable)
    base = None
    try:
        readable = jail.readable_paths(paths)
        if mode == "namespaces":
            jail.enter_namespaces(readable)
        else:
            base = tempfile.mkdtemp(prefix="poise-sandbox-")
        sys.path += paths
        for name in PRELOADED.split():
            __import__(name)
        exec(prelude, {})
    except Exception as error:  # reported to the trainer's process, which raises it
        send(control, {"error": f"{type(error).__name__}: {error}"})
        return
    is_linux = sys.platform == "linux"
    walls = Walls(
        base=base,
        readable=readable,
        has_seccomp=is_linux and filters.has_seccomp(),
        has_landlock=is_linux and base is not None and filters.landlock_version() > 0,
    )
    if walls.has_seccomp and base is None:
        filters.filter_program(in_namespace=True, pid=0)  # made once, found in the cache by every snippet
    wake = _wake_on_child_exit()
    gc.collect()
    gc.freeze()
    send(control, {"error": None, **vars(walls)})
    wardens: set[int] = set()
    is_open = True
    while is_open or wardens:
        has_room = is_open and len(wardens) < NUM_CORES
        inputs: list[Any] = [wake, control] if has_room else [wake]
        readable_now, _, _ = select.select(inputs, [], [])
        if wake in readable_now:
            os.read(wake, 512)
            wardens -= _ended_children()
        if control in readable_now:
            fd = _receive_fd(control)
            is_open = fd is not None
            if fd is not None:
                wardens.add(_fork_warden(fd, control, walls))
                os.close(fd)
    if base is not None:
        shutil.rmtree(base, ignore_errors=True)


def _fork_warden(fd: int, control: socket.socket, walls: Walls) -> int:
    pid = os.fork()
    if pid == 0:
        control.close()
        try:
            with contextlib.suppress(ConnectionError):  # the caller went away
                _warden(socket.socket(fileno=fd), walls)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def _ended_children() -> set[int]:
    """Wardens that ended, and orphans that came to this process because it is the first of its namespace."""
    ended = set()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def _receive_fd(control: socket.socket) -> int | None:
    fds = array.array("i")
    _, ancillary, _, _ = control.recvmsg(1, socket.CMSG_LEN(fds.itemsize))
    for _, _, payload in ancillary:
        fds.frombytes(payload[: fds.itemsize])
    return fds[0] if fds else None


def _warden(connection: socket.socket, walls: Walls) -> None:
    """One call: request in, snippet run and watched, answer out."""
    request = _receive(connection)
    wake = _wake_on_child_exit()
    if walls.base is None:
        jail.isolate_call()
        work_dir = jail.WORK
    else:
        work_dir = tempfile.mkdtemp(dir=walls.base)
    output, output_end = os.pipe()
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _snippet(request, work_dir, walls, output_end, ready_end)
    os.close(output_end)
    os.close(ready_end)
    try:
        problem = os.read(ready, 4096)  # ends when the snippet is about to start, so the clock starts here
        answer = _watch(pid, output, wake, connection, request) if not problem else {"error": problem.decode()}
    finally:
        if walls.base is not None:  # inside a namespace the kernel ended everything with the snippet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(work_dir, ignore_errors=True)
    send(connection, answer)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    request: dict[str, Any] = json.loads(_receive_exactly(connection, length))
    return request


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    payload = b""
    while len(payload) < length:
        chunk = connection.recv(length - len(payload))
        if not chunk:
            raise ConnectionError("the caller went away")
        payload += chunk
    return payload


def _wake_on_child_exit() -> int:
    """A descriptor that becomes readable when a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def _watch(pid: int, output: int, wake: int, connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Reads the output until the snippet ends or reaches a limit, then kills it. Answers ``Result``'s fields."""
    start = time.monotonic()
    deadline = start + request["wall_s"]
    poller = select.poll()
    poller.register(output, select.POLLIN)
    poller.register(wake, select.POLLIN)
    poller.register(connection, 0)  # reports only that the caller hung up
    kept = _Kept(request["num_output_bytes"])
    status: int | None = None
    stopped = ""
    os.set_blocking(output, False)
    while status is None and not stopped:
        remaining = deadline - time.monotonic()
        events = dict(poller.poll(max(0.0, remaining) * 1000))
        if output in events and not kept.read_from(output):
            poller.unregister(output)
        if wake in events:
            os.read(wake, 64)
            status, cpu_s = _wait(pid, os.WNOHANG)
            if status == -signal.SIGKILL and cpu_s > 0.9 * request["cpu_s"]:  # the kernel's two clocks differ a little
                stopped = "time"  # by the kernel, at the CPU limit
        if connection.fileno() in events:
            stopped = "abandoned"
        elif kept.total > FLOOD_BYTES:
            stopped = "flood"
        elif not events and remaining <= 0:
            stopped = "time"
    wall_s = time.monotonic() - start
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status, _ = _wait(pid, 0)
    while kept.total <= FLOOD_BYTES and kept.read_from(output) and kept.more:
        pass
    return {
        "error": None,
        "output": kept.text(),
        "num_cut_bytes": kept.num_cut,
        "exit_status": status,
        "stopped": stopped,
        "wall_s": wall_s,
    }


def _wait(pid: int, options: int) -> tuple[int | None, float]:
    """Exit status (None: still running) and CPU seconds."""
    done, status, usage = os.wait4(pid, options)
    return (os.waitstatus_to_exitcode(status) if done else None), usage.ru_utime + usage.ru_stime


class _Kept:
    """The first and the last half of a stream of at most ``capacity`` bytes, and how much fell between."""

    def __init__(self, capacity: int) -> None:
        self.half = capacity // 2
        self.head, self.tail, self.total, self.more = bytearray(), bytearray(), 0, True

    def read_from(self, fd: int) -> bool:
        """Takes what is there; False at the end of the stream. ``more``: there was something to take."""
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            self.more = False
            return True
        self.total += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        del self.tail[: -self.half]
        return bool(chunk)

    @property
    def num_cut(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        if not self.num_cut:
            return (self.head + self.tail).decode(errors="replace")
        head, tail = self.head.decode(errors="replace"), self.tail.decode(errors="replace")
        return f"{head}\n[... {self.num_cut} bytes cut ...]\n{tail}"


def _snippet(request: dict[str, Any], work_dir: str, walls: Walls, output: int, ready: int) -> NoReturn:
    """The forked child: puts up the walls, then runs the code as ``__main__``. Never returns."""
    status, report = 70, ready
    try:
        os.setsid()
        if walls.base is None:
            uid = jail.snippet_uid()
            jail.mount_work_dir(request["file_mib"], uid)
        os.chdir(work_dir)
        null = os.open("/dev/null", os.O_RDONLY)
        for target, source in ((0, null), (1, output), (2, output), (3, ready)):
            os.dup2(source, target, inheritable=target < 3)
        report = 3
        os.closerange(4, 256)
        if walls.base is None:
            jail.drop_rights(uid)
        elif sys.platform == "linux":
            jail.forbid_new_rights()
            jail.die_with_parent()
        limits = {name: request[name] for name in ("cpu_s", "memory_mib", "file_mib", "num_processes")}
        jail.limit_resources(**limits)
        if walls.has_landlock:
            filters.hide_files(readable=walls.readable, writable=[work_dir])
        if walls.has_seccomp:
            filters.filter_system_calls(in_namespace=walls.base is None)
        _clean_interpreter(work_dir)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(status)
    os.close(3)
    try:
        status = _execute(request["code"])
    finally:
        os._exit(status)


def _clean_interpreter(work_dir: str) -> None:
    """Leaves nothing of the server in the interpreter: signals, environment, modules, open files."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(HOME=work_dir, TMPDIR=work_dir, PATH="/usr/bin:/bin", LANG="C.UTF-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "poise"]:
        del sys.modules[name]
    sys.argv = [""]
    tempfile.tempdir = None
    random.seed(0)  # the same snippet prints the same numbers, so that a run can be repeated
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


class _Output(io.TextIOWrapper):
    """Standard output that knows whether anything was printed."""

    is_used = False

    def write(self, text: str) -> int:
        self.is_used = self.is_used or bool(text)
        return super().write(text)


def _execute(code: str) -> int:
    """Runs ``code`` as a notebook cell, common indentation removed; the exit status it would have as a script."""
    code = textwrap.dedent(code)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = stdout = _Output(
        io.FileIO(1, "w", closefd=False), encoding="utf-8", errors="replace", line_buffering=True
    )
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    status = 0
    try:
        tree = ast.parse(code, FILE_NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE_NAME, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), module.__dict__)
            if value is not None and not stdout.is_used:
                print(repr(value), file=stdout)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _complain(error.code)
    except BaseException as error:
        status = 1
        _print_traceback(error)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # waits for the snippet's threads, as an interpreter's exit does
    _flush()
    return status & 0xFF


def _print_traceback(error: BaseException) -> None:
    """The traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE_NAME:
        frames = frames.tb_next
    if isinstance(error, SyntaxError) and frames is None:
        _complain("".join(traceback.format_exception_only(error)))
    else:
        _complain("".join(traceback.format_exception(type(error), error, frames)))


def _complain(text: str) -> None:
    """Writes to standard error, whatever the snippet did to ``sys.stderr``."""
    _flush()
    with contextlib.suppress(OSError):  # closed by the snippet
        os.write(2, text.rstrip().encode(errors="replace") + b"\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the snippet may have closed it, or put anything in its place
            stream.flush()
