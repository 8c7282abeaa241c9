"""The process behind ``GraderPool``: imports a function once and calls it in a forked child, line by line.

``python -m poise.envs.grader_server MODULE:NAME CPU_S MEMORY_MIB WARM_UP`` reads lists of arguments and writes
``{"result": ...}``, ``{"error": sentence}`` where the function raised, or ``{"stopped": sentence}`` where the child
used up its CPU time or memory, or ended otherwise.
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO


def main() -> None:
    name, cpu_s, memory_mib, warm_up = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    failure, function = "", None
    try:
        module, _, attribute = name.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        if warm_up:
            function(*json.loads(warm_up))
    except Exception as error:  # told to whoever asks
        failure, function = f"{name} cannot be loaded: {type(error).__name__}: {error}", None
    child: _Child | None = None
    for request in sys.stdin.buffer:
        if function is None:
            _write(answers, {"error": failure})
            continue
        if child is None or child.is_gone():
            child = _Child(function, cpu_s, memory_mib)
        answer = child.ask(request)
        if answer is None:
            status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            is_time = status == -signal.SIGPROF
            reason = f"{cpu_s:g} s of CPU time used up" if is_time else f"the grader ended with status {status}"
            answer = {"stopped": reason}
            child.close()
            child = None
        _write(answers, answer)


class _Child:
    """A fork of this process that answers until it dies."""

    def __init__(self, function: Callable[..., Any], cpu_s: float, memory_mib: int) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            try:
                _limit_memory(memory_mib)
                _answer_all(function, cpu_s, os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        self._reader = os.fdopen(self._answers, "rb")

    def is_gone(self) -> bool:
        """Whether it ended on its own since the last answer, as by the kernel's choice when memory ran out."""
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def ask(self, request: bytes) -> dict[str, Any] | None:
        try:
            while request:
                request = request[os.write(self._requests, request) :]
        except BrokenPipeError:
            return None
        line = self._reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        os.close(self._requests)
        self._reader.close()


def _answer_all(function: Callable[..., Any], cpu_s: float, requests: BinaryIO, answers: BinaryIO) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in requests:
        # The kernel ends this process then, whatever code it is in; a parent that is gone is not needed for it.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer: dict[str, Any] = {"result": function(*json.loads(line))}
        except (MemoryError, RecursionError) as error:
            answer = {"stopped": type(error).__name__}
        except Exception as error:  # the border to the grader's code: the trainer's side raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)


def _write(file: BinaryIO, answer: dict[str, Any]) -> None:
    file.write(json.dumps(answer).encode() + b"\n")
    file.flush()


def _limit_memory(memory_mib: int) -> None:
    """Address space beyond what the imports took; only where the kernel says how much that is."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
