"""Interpreters elsewhere: SandboxFusion's ``POST /run_code`` (https://bytedance.github.io/SandboxFusion).

The server forgets everything after a call. A session sends its earlier cells along: they run again, silently, before
the new one. Cells that read the clock or draw numbers without a seed may then see others than the first time, and a
session of n cells costs O(n^2).
"""

import asyncio
import contextlib
import inspect
import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from poise.sandbox import interpreter
from poise.sandbox.kept import Kept
from poise.sandbox.limits import Limits, Result, SandboxError

_NUM_CONNECTIONS = 64
_MARGIN_S = 30.0  # beyond the cell's own time: the server's queue
_WAITS_S = (0.5, 1.0, 2.0)  # before each further try
_POOL = ThreadPoolExecutor(_NUM_CONNECTIONS, thread_name_prefix="sandbox-http")  # starts threads when used
# After the source of ``interpreter``: the same notebook, with earlier cells silenced.
_DRIVER = """
_earlier, _last, _name, _seed, _token = json.loads({arguments!r})
random.seed(_seed)
_shown, _silent = os.dup(1), os.open(os.devnull, os.O_WRONLY)
sys.stdout = _Output(io.FileIO(1, "w", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)
_module = sys.modules["__main__"] = types.ModuleType("__main__")
os.dup2(_silent, 1), os.dup2(_silent, 2)
for _number, _cell in enumerate(_earlier, start=1):
    execute(_cell, vars(_module), f"<cell {{_number}}>")
_flush()
sys.stdout.is_line_open = False
os.dup2(_shown, 1), os.dup2(_shown, 2)
_status = execute(_last, vars(_module), _name)
sys.modules["threading"]._shutdown() if "threading" in sys.modules else None
_flush()
os.write(1, _token.encode())
os._exit(_status)
"""


class RemoteSession:
    """A session on a SandboxFusion server; see ``Session`` for the methods.

    ``Limits.wall_s`` bounds a cell together with the repetition of those before it, ``memory_mib`` is passed on; the
    other limits are the server's own. Raises ``SandboxError`` where the server cannot be reached or reports one.
    """

    def __init__(self, url: str, limits: Limits, seed: int | None) -> None:
        self.url, self.limits = url, limits
        self.seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self._cells: list[str] = []
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "RemoteSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Nothing to do: the server makes an interpreter for each cell."""

    async def run(self, code: str) -> Result:
        async with self._lock:
            result = await self._send(code, f"<cell {len(self._cells) + 1}>", is_once=False)
            if not result.is_lost:
                self._cells.append(code)
            return result

    async def run_once(self, code: str) -> Result:
        async with self._lock:
            return await self._send(code, interpreter.ONCE_NAME, is_once=True)

    async def close(self) -> None:
        self._cells.clear()

    async def _send(self, code: str, name: str, *, is_once: bool) -> Result:
        if "\0" in code:
            return Result(output="SyntaxError: source code cannot contain null bytes", exit_status=1)
        token = f"\n<end {random.SystemRandom().getrandbits(64):x}>"  # missing where the code ended the interpreter
        arguments = json.dumps([self._cells, code, name, self.seed, token])
        program = inspect.getsource(interpreter) + "\nimport json\n" + _DRIVER.format(arguments=arguments)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(_POOL, run_code, self.url, program, self.limits)
        return _result(answer, self.limits, token, is_once=is_once)


def run_code(url: str, program: str, limits: Limits) -> dict[str, Any]:
    """``run_result`` of one call, tried again where the server is overloaded or fails. Blocks."""
    body = {
        "code": program,
        "language": "python",
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mib,
    }
    request = urllib.request.Request(
        url.rstrip("/") + "/run_code", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    problem = ""
    for wait_s in (*_WAITS_S, None):
        try:
            with urllib.request.urlopen(request, timeout=limits.wall_s + _MARGIN_S) as reply:
                answer = json.load(reply)
            if answer["status"] != "SandboxError":
                result: dict[str, Any] = answer["run_result"]
                return result
            problem = answer.get("message") or "it reports SandboxError"
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                problem = f"HTTP {error.code} {error.reason}"
            if error.code not in (429, 500, 502, 503, 504):
                break
        except (OSError, ValueError, KeyError) as error:  # unreachable, no JSON, other JSON
            problem = f"{type(error).__name__}: {error}"
        if wait_s is not None:
            time.sleep(wait_s)
    raise SandboxError(f"the sandbox at {url} does not run code: {problem[:500]}")


def check_remote(url: str) -> None:
    """Raises ``SandboxError`` where the server does not run code."""
    result = run_code(url, "print(6 * 7)", Limits())
    if (result.get("stdout") or "").strip() != "42":
        raise SandboxError(f"the sandbox at {url} does not run code: print(6 * 7) gave {result}")


def _result(answer: dict[str, Any], limits: Limits, token: str, *, is_once: bool) -> Result:
    kept = Kept(limits.num_output_bytes)
    output = answer.get("stdout") or ""
    is_whole = output.endswith(token)
    kept.add((output.removesuffix(token) + (answer.get("stderr") or "")).encode(errors="replace"))
    is_late = answer["status"] == "TimeLimitExceeded"
    status = -9 if answer.get("return_code") is None else int(answer["return_code"])
    said = ""
    if is_late:
        said = f"timed out after {limits.wall_s:g} s"
    elif status < 0:
        said = f"killed by signal {-status}"
    elif status > 0 and not kept.total:
        said = f"exit status {status}"
    is_lost = not is_once and not is_whole
    if is_lost:
        said = said or f"the interpreter ended with exit status {status}"
        said += "; what this cell did is lost, earlier variables are kept"
    return Result(
        output=kept.text(),
        exit_status=status,
        timed_out=is_late,
        num_cut_bytes=kept.num_cut,
        notice=f"[{said}]" if said else "",
        wall_s=float(answer.get("execution_time") or 0.0),
        is_lost=is_lost,
    )
