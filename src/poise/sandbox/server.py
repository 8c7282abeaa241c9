"""The fork server's entry: puts up the walls that all interpreters share, forks the zygote, becomes the supervisor."""

import contextlib
import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from poise.sandbox import filters, jail, workdirs
from poise.sandbox.interpreters import Forks, Interpreter
from poise.sandbox.supervisor import Supervisor
from poise.sandbox.wire import LENGTH
from poise.sandbox.zygote import MAX_MESSAGE, Walls, run_zygote

PROBE_LIMITS = {"memory_mib": 64, "file_mib": 1, "num_threads": 4, "num_output_bytes": 1024}


def serve(control_fd: int, settings: dict[str, Any]) -> None:
    """Answers until the trainer's side closes. The first message says how the start went.

    ``settings``: ``mode``, ``readable``, ``listable``, ``path`` (as in ``Walls``), ``hidden`` (folders below readable
    ones, of which only what is readable itself is shown) and ``preload`` (packages).
    """
    control = socket.socket(fileno=control_fd)
    base = None
    try:
        _check_walls(settings["mode"])
        if settings["mode"] == "namespaces":
            jail.enter_namespaces(settings["readable"], settings["hidden"])
        walls = Walls(
            mode=settings["mode"],
            readable=settings["readable"],
            listable=settings["listable"],
            path=settings["path"],
            landlock=filters.landlock_version() if sys.platform == "linux" else 0,
        )
        if not walls.is_jailed:
            base = tempfile.mkdtemp(prefix="poise-sandbox-")
        _allow_many_files()
        forks = Forks(_start_zygote(control, walls, settings["preload"]), walls, base)
        _probe(forks)
        report = {
            "landlock": walls.landlock,
            "switches_user": forks.switches_user,
            "allows_threads": forks.allows_threads,
            "is_root": os.geteuid() == 0,
            "base": base,
        }
    except Exception as error:  # reported to the trainer's process, which raises it
        report = {"base": base, "error": f"{type(error).__name__}: {error}"}
    payload = json.dumps({"error": None, **report}).encode()
    control.sendall(LENGTH.pack(len(payload)) + payload)
    if "error" not in report:
        Supervisor(control, forks).run()
    if base is not None:
        workdirs.remove_all(base)


def _check_walls(mode: str) -> None:
    """Raises ``OSError`` where ``mode`` would lack a wall."""
    if mode == "none":
        return
    if sys.platform != "linux":
        raise OSError(f"it needs Linux, and this is {sys.platform}")
    if not filters.has_seccomp():
        raise OSError("the kernel has no seccomp filters, or this is neither x86_64 nor aarch64")
    if mode == "landlock" and not filters.landlock_version():
        raise OSError("the kernel has no Landlock")


def _allow_many_files() -> None:
    """Two descriptors for each live interpreter: as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _start_zygote(control: socket.socket, walls: Walls, preload: Sequence[str]) -> socket.socket:
    """Raises ``OSError`` where it does not start."""
    kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
    commands, theirs = socket.socketpair(socket.AF_UNIX, kind)
    if os.fork() == 0:
        control.close()
        commands.close()
        if sys.platform == "linux":
            jail.die_with_parent()
        run_zygote(theirs, walls, preload=preload)
    theirs.close()
    answer = json.loads(commands.recv(MAX_MESSAGE))
    if answer["error"] is not None:
        raise OSError(answer["error"])
    return commands


def _probe(forks: Forks) -> None:
    """Starts one interpreter behind all walls. Raises ``OSError`` where one of them does not stand."""
    interpreter: Interpreter = forks.make(PROBE_LIMITS, 0)
    interpreter.control.socket.setblocking(True)
    said = interpreter.control.socket.recv(4096)
    forks.end(interpreter)
    forks.wait_for_ends()
    if said != b"r":
        raise OSError(said[1:].decode(errors="replace") or "an interpreter ended at its start")
