"""Inside the walls: an interpreter that runs cells as a notebook does.

Whatever the code does to this module, it does to its own process alone. What comes out of here is believed by nobody:
the server takes two bytes per cell, and anything else ends the interpreter.
"""

import ast
import builtins
import contextlib
import gc
import io
import linecache
import os
import random
import signal
import sys
import tempfile
import textwrap
import traceback
import types
from typing import Any, NoReturn

CONTROL = 3  # descriptor: cells come in, "r" (ready) and "d" + status (done) go out
ONCE_NAME = "<python>"

_write, _read, _exit = os.write, os.read, os._exit  # the cells may replace those of the module


class _State:
    is_running = False
    is_interrupted = False


class _Output(io.TextIOWrapper):
    """Standard output that knows whether its line is complete."""

    is_line_open = False

    def write(self, text: str) -> int:
        count = super().write(text)
        self.is_line_open = not text.endswith("\n") if text else self.is_line_open
        return count


def forget_server() -> None:
    """Leaves nothing of the server in the interpreter. Before the fork: every page touched after it is copied."""
    signal.signal(signal.SIGINT, _interrupt)
    os.environ.clear()
    os.environ.update(HOME="/", TMPDIR="/", PATH="/usr/bin:/bin", LANG="C.UTF-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "poise"]:
        del sys.modules[name]
    sys.argv = [""]
    sys.orig_argv = [""]
    tempfile.tempdir = None
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


def warm_up() -> None:
    """Runs cells, so that what running them changes in the interpreter is changed before the fork."""
    shown, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    for _ in range(10):
        for cell in ("x = 1", "x + y", "def f(x):\n    return x\nprint(f(2), file=sys.stderr)\n'a' 1"):
            execute(cell, {"sys": sys}, ONCE_NAME)
    os.dup2(shown, 2)
    os.close(shown)
    os.close(silent)


def start(work_dir: str, seed: int) -> None:
    """Signals, files, random state and an empty ``__main__`` of this interpreter."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ["HOME"] = os.environ["TMPDIR"] = work_dir
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "sympy" in sys.modules:
        sys.modules["sympy.core.random"].seed(seed)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _Output(io.FileIO(1, "w", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.modules["__main__"] = types.ModuleType("__main__")
    gc.enable()


def run_cells() -> NoReturn:
    """Runs one cell after another until nobody sends any more."""
    namespace = vars(sys.modules["__main__"])
    number = 0
    while True:
        is_once, code = _next_cell()
        number += 1
        status = execute(code, namespace, ONCE_NAME if is_once else f"<cell {number}>")
        if is_once:
            sys.modules["threading"]._shutdown()  # waits for the threads, as an interpreter's exit does
        _flush()
        _write(CONTROL, b"d" + bytes([status]))


def _next_cell() -> tuple[bool, str]:
    header = _receive(5)
    return bool(header[4]), _receive(int.from_bytes(header[:4], "big")).decode(errors="replace")


def _receive(length: int) -> bytes:
    received = b""
    while len(received) < length:
        chunk = _read(CONTROL, length - len(received))
        if not chunk:
            _exit(0)
        received += chunk
    return received


def execute(code: str, namespace: dict[str, Any], name: str) -> int:
    """Runs ``code``, common indentation removed, and shows the value of a last expression; the exit status."""
    code = textwrap.dedent(code)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    _State.is_interrupted = False
    if isinstance(sys.stdout, _Output):
        sys.stdout.is_line_open = False
    status = 0
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, name, "exec")
        ending = compile(ast.Expression(last.value), name, "eval") if isinstance(last, ast.Expr) else None
        signal.signal(signal.SIGINT, _interrupt)
        _State.is_running = True
        exec(body, namespace)
        if ending is not None:
            value = eval(ending, namespace)
            if value is not None:
                _show(repr(value))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _complain(error.code)
    except BaseException as error:
        status = 1
        _State.is_running = False
        if not (_State.is_interrupted and isinstance(error, KeyboardInterrupt)):  # the caller is told anyway
            _print_traceback(error, name)
    finally:
        _State.is_running = False
    return status & 0xFF


def _interrupt(*_: object) -> None:
    if _State.is_running:
        _State.is_interrupted = True
        raise KeyboardInterrupt


def _show(text: str) -> None:
    start = "\n" if getattr(sys.stdout, "is_line_open", False) else ""
    print(start + text)


def _print_traceback(error: BaseException, name: str) -> None:
    """The traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    if isinstance(error, SyntaxError) and frames is None:
        _complain("".join(traceback.format_exception_only(error)))
    else:
        _complain("".join(traceback.format_exception(type(error), error, frames)))


def _complain(text: str) -> None:
    """Writes to standard error, whatever the code did to ``sys.stderr``."""
    _flush()
    with contextlib.suppress(OSError):  # closed by the code
        _write(2, text.rstrip().encode(errors="replace") + b"\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the code may have closed it, or put anything in its place
            stream.flush()
