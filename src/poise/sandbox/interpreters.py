"""Interpreters as the supervisor sees them: forked by the zygote, signalled and ended by it."""

import array
import contextlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

from poise.sandbox import jail, workdirs
from poise.sandbox.kept import Kept
from poise.sandbox.wire import Wire
from poise.sandbox.zygote import MAX_MESSAGE, Walls


class Interpreter:
    """One forked interpreter and the cell it runs."""

    def __init__(self, pid: int, control: Wire, output: int, limits: dict[str, Any], work_dir: str | None) -> None:
        self.pid, self.control, self.output = pid, control, output
        self.limits, self.work_dir = limits, work_dir
        self.kept = Kept(limits["num_output_bytes"])
        self.is_ready = self.is_idle = False
        self.on_end: Callable[[int], None] = lambda status: None  # called with the exit status
        self.problem = b""  # what went wrong before it was ready
        self.cell: dict[str, Any] | None = None
        self.stopped = ""  # why the cell was stopped
        self.started = self.deadline = self.cpu_at_start = self.cpu_seen = 0.0

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # the kernel's clock of a process
        except OSError:
            return self.cpu_seen


class Forks:
    """Makes and ends interpreters. ``commands``: the zygote's socket; ``base``: for working directories on disk."""

    def __init__(self, commands: socket.socket, walls: Walls, base: str | None) -> None:
        self.commands, self.walls, self.base = commands, walls, base
        self._ending: dict[int, Interpreter] = {}
        self.switches_user = walls.mode != "none" and os.geteuid() == 0
        self.allows_threads = True
        if walls.mode == "landlock" and os.geteuid() == 0:
            self.switches_user = jail.can_switch_user([*walls.readable, *walls.listable])
            self.allows_threads = self.switches_user  # the kernel does not limit the number of root's threads
        if base is not None and self.switches_user:
            os.chmod(base, 0o711)

    def make(self, limits: dict[str, Any], seed: int | None) -> Interpreter:
        """Raises ``OSError`` where the kernel refuses."""
        uid = jail.spare_uid() if self.switches_user else None
        work_dir = None
        if self.base is not None:
            work_dir = tempfile.mkdtemp(dir=self.base)
            if uid is not None:
                os.chown(work_dir, uid, uid)
        ours, theirs = socket.socketpair()
        output, output_end = os.pipe()
        request = {
            "work_dir": work_dir,
            "uid": uid,
            "seed": random.SystemRandom().getrandbits(63) if seed is None else seed,
            "memory_mib": limits["memory_mib"],
            "file_mib": limits["file_mib"],
            "num_tasks": self._task_limit(limits["num_threads"], uid),
            "allows_threads": self.allows_threads,
        }
        self._send(request, theirs.fileno(), output_end)
        while "forked" not in (answer := json.loads(self.commands.recv(MAX_MESSAGE))):
            self._on_end(answer)
        theirs.close()
        os.close(output_end)
        if answer["error"] is not None:
            ours.close()
            os.close(output)
            raise OSError(answer["error"])
        os.set_blocking(output, False)
        return Interpreter(answer["forked"], Wire(ours), output, limits, work_dir)

    def end(self, interpreter: Interpreter, on_end: Callable[[int], None] = lambda status: None) -> None:
        """Has it killed with all its threads. ``on_end`` gets the exit status when it is gone.

        That takes the kernel up to 50 ms, most of it waiting, with which nobody is held up.
        """
        interpreter.on_end = on_end
        self._ending[interpreter.pid] = interpreter
        self._send({"end": interpreter.pid})

    def receive_ends(self) -> None:
        """Takes what the zygote has said by now about interpreters that ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._on_end(json.loads(self.commands.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)))

    def wait_for_ends(self) -> None:
        """Returns when all that should end are gone."""
        while self._ending:
            self._on_end(json.loads(self.commands.recv(MAX_MESSAGE)))

    def _send(self, message: dict[str, Any], *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self.commands.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:  # the zygote may be waiting as well, to say what has ended
                self._on_end(json.loads(self.commands.recv(MAX_MESSAGE)))

    def _on_end(self, message: dict[str, Any]) -> None:
        interpreter = self._ending.pop(message["ended"])
        interpreter.on_end(message["status"])
        interpreter.control.close()
        os.close(interpreter.output)
        if interpreter.work_dir is not None:
            workdirs.remove(interpreter.work_dir)

    def _task_limit(self, num_threads: int, uid: int | None) -> int | None:
        if self.walls.mode == "none" or not self.allows_threads:
            return None
        if uid is not None or self.walls.is_jailed:
            return num_threads
        return workdirs.count_tasks(os.geteuid()) + num_threads  # all of this user's are counted together
