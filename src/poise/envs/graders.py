"""Graders in processes of their own, which are killed where they take too long.

What a policy wrote can keep a grader busy for ever (``9^9^9^9``) or eat its memory, in C code that no signal handler
and no thread interrupts. ``GraderPool`` runs a trusted function in a few server processes; each forks the child that
does the work, so a child that had to be killed costs a fork and not the imports.
"""

import asyncio
import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

_MAX_WORKERS = 8
# Against a server that has stopped answering, far beyond any load of the machine: the child's own limit is CPU time.
_WALL_S = 600.0
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "NLTK_DATA")


class GraderError(RuntimeError):
    """The grader itself is broken: it raised, cannot be started or stopped answering. Not the policy's fault."""


class GraderTimeout(Exception):
    """The input made the grader exceed its CPU time or memory, or end its process: the policy's doing."""


class GraderPool:
    """``await pool(*arguments)`` is ``function(*arguments)``, computed elsewhere; arguments and result are JSON.

    ``function``: "MODULE:NAME", imported once a server, which also calls it once with the arguments ``warm_up`` (a JSON
    list) if given, so that what is loaded on first use is there. ``cpu_s``: CPU time of one call, several times what
    any honest answer takes on a busy machine. ``memory_mib``: address space beyond what the server has. At most
    ``num_workers`` calls run at once, the others wait; servers start when they are first needed and end with this
    process, however it ends. Raises ``GraderTimeout``, ``GraderError``.
    """

    def __init__(
        self,
        function: str,
        *,
        warm_up: str = "",
        cpu_s: float = 5.0,
        memory_mib: int = 2048,
        num_workers: int | None = None,
    ) -> None:
        self._command = [function, str(cpu_s), str(memory_mib), warm_up]
        num_workers = num_workers or max(1, min(_MAX_WORKERS, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._lock = threading.Lock()
        self._idle: list[_Server] = []

    async def __call__(self, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._threads.submit(self._ask, arguments))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _ask(self, arguments: Sequence[Any]) -> Any:
        request = json.dumps(arguments).encode() + b"\n"
        for _ in range(2):  # a server that was killed from outside while idle is replaced once
            with self._lock:
                server = self._idle.pop() if self._idle else None
            server = server or _Server(self._command)
            answer = server.ask(request)
            if answer is not None:
                with self._lock:
                    self._idle.append(server)
                return _result(answer)
            server.close()
        raise GraderError(f"the grader {self._command[0]} does not start, or stopped answering")


def _result(answer: dict[str, Any]) -> Any:
    if "stopped" in answer:
        raise GraderTimeout(answer["stopped"])
    if "error" in answer:
        raise GraderError(answer["error"])
    return answer["result"]


class _Server:
    """One server process (``poise.envs.grader_server``): a line in, a line out."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "poise.envs.grader_server", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the trainer
        )

    def ask(self, request: bytes) -> dict[str, Any] | None:
        """The answer, or None where the server is gone or silent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except OSError:
            return None
        answer, deadline = b"", time.monotonic() + _WALL_S
        descriptor = self._process.stdout.fileno()
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 1 << 16) if ready else b""
            if not chunk:
                return None
            answer += chunk
        read: dict[str, Any] = json.loads(answer)
        return read

    def close(self) -> None:
        self._process.kill()  # its child reads the end of its input, or reaches its CPU limit
        self._process.communicate()


@cache
def shared_pool(function: str, warm_up: str = "") -> GraderPool:
    """The pool of this process for ``function`` with ``warm_up``."""
    pool = GraderPool(function, warm_up=warm_up)
    atexit.register(pool.close)
    return pool
