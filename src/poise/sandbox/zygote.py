"""The warm interpreter: has loaded what cells import most, never sees a cell, and forks a copy of itself on command.

The supervisor sends one message per command, and the descriptors of a new interpreter with it. Because this process
never holds a cell or its output, neither does the memory of any copy.
"""

import array
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from poise.sandbox import filters, interpreter, jail

# Loaded once, so that cells need not: what they import most.
STANDARD = """asyncio bisect cmath collections copy datetime decimal fractions functools heapq itertools json math
    operator random re statistics string threading typing"""
# What a package loads late, and nearly every cell that uses it needs.
LATE = {"numpy": ("numpy.random", "numpy.linalg", "numpy.fft", "numpy.polynomial")}
MAX_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Walls:
    """What stands around an interpreter.

    ``mode``: "bubblewrap", "namespaces", "landlock" or "none". ``readable``: what may be read; ``listable``:
    folders of which the names may be read; ``path``: those that packages are imported from. ``landlock``: version of
    the kernel's interface, 0 where it has none.
    """

    mode: str
    readable: Sequence[str]
    listable: Sequence[str]
    path: Sequence[str]
    landlock: int

    @property
    def is_jailed(self) -> bool:
        """A private root, and a process and mount namespace for each interpreter."""
        return self.mode in ("bubblewrap", "namespaces")


def run_zygote(commands: socket.socket, walls: Walls, *, preload: Sequence[str]) -> NoReturn:
    """Answers commands until the other side closes. The first message says how the start went."""
    try:
        sys.executable = os.path.realpath(sys.executable)
        sys.path += walls.path
        for name in [*STANDARD.split(), *preload, *(late for package in preload for late in LATE.get(package, ()))]:
            __import__(name)
        base_mib = jail.mapped_mib() if sys.platform == "linux" else 0
        own_namespace = os.pidfd_open(os.getpid()) if walls.is_jailed else -1
    except Exception as error:  # reported to the trainer's process, which raises it
        commands.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    interpreter.forget_server()
    interpreter.warm_up()
    gc.collect()
    gc.disable()  # a collection would copy pages that all interpreters share
    gc.freeze()
    commands.send(json.dumps({"error": None}).encode())
    wake, wake_end = os.pipe()  # readable when a child ends
    os.set_blocking(wake_end, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    doomed: set[int] = set()
    while True:
        if wake in select.select([commands.fileno(), wake], [], [])[0]:
            os.read(wake, 4096)
        else:
            request, fds = _receive(commands)
            if "end" in request:
                os.kill(request["end"], signal.SIGKILL)
                doomed.add(request["end"])
            else:
                commands.send(json.dumps(_fork(request, fds, walls, base_mib, own_namespace)).encode())
        for pid, status in _ended(doomed):
            doomed.discard(pid)
            commands.send(json.dumps({"ended": pid, "status": status}).encode())


def _receive(commands: socket.socket) -> tuple[dict[str, Any], Sequence[int]]:
    fds = array.array("i")
    text, ancillary, _, _ = commands.recvmsg(MAX_MESSAGE, socket.CMSG_LEN(2 * fds.itemsize))
    if not text:
        os._exit(0)
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return json.loads(text), fds


def _ended(doomed: Iterable[int]) -> list[tuple[int, int]]:
    """Those that are gone, with their exit status. Only what the supervisor has given up is waited for: until then
    nobody else can get the number of the process, so that no signal reaches another."""
    ended = [os.waitpid(pid, os.WNOHANG) for pid in doomed]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in ended if pid]


def _fork(
    request: dict[str, Any], fds: Sequence[int], walls: Walls, base_mib: int, own_namespace: int
) -> dict[str, Any]:
    try:
        if walls.is_jailed:
            jail.next_child_in_new_namespace()
        try:
            pid = os.fork()
            if pid == 0:
                _become_interpreter(request, fds, walls, base_mib)
        finally:
            if walls.is_jailed:
                jail.next_child_in(own_namespace)
            for fd in fds:
                os.close(fd)
    except OSError as error:
        return {"forked": None, "error": f"{type(error).__name__}: {error}"}
    return {"forked": pid, "error": None}


def _become_interpreter(request: dict[str, Any], fds: Sequence[int], walls: Walls, base_mib: int) -> NoReturn:
    """The forked child: puts up the walls, says that it is ready, and runs cells."""
    try:
        work_dir = request["work_dir"] or jail.WORK
        _arrange_descriptors(*fds)
        os.setsid()
        if walls.is_jailed:
            jail.mount_work_dir(request["file_mib"])
        os.chdir(work_dir)
        if walls.mode != "none":
            jail.drop_rights(request["uid"], is_jailed=walls.is_jailed)
        jail.limit_resources(
            memory_mib=base_mib + request["memory_mib"], file_mib=request["file_mib"], num_tasks=request["num_tasks"]
        )
        if walls.mode != "none":
            if walls.landlock:
                filters.hide_files(readable=walls.readable, listable=walls.listable, writable=[work_dir])
            filters.filter_system_calls(is_jailed=walls.is_jailed, allows_threads=request["allows_threads"])
        interpreter.start(work_dir, request["seed"])
        os.write(interpreter.CONTROL, b"r")
    except BaseException as error:
        os.write(interpreter.CONTROL, f"e{type(error).__name__}: {error}".encode())
        os._exit(70)
    try:
        interpreter.run_cells()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _arrange_descriptors(control: int, output: int) -> None:
    """0: nothing to read; 1 and 2: the output; 3: cells. Closes everything else."""
    null = os.open("/dev/null", os.O_RDONLY)
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (null, output, output, control)]
    for target, source in enumerate(sources):
        os.dup2(source, target, inheritable=False)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
