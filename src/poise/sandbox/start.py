"""Starts a fork server from the trainer's process: what protects it, what it can read, what it loads."""

import array
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from poise.sandbox import workdirs
from poise.sandbox.limits import SandboxError
from poise.sandbox.wire import LENGTH

MODES = ("bubblewrap", "namespaces", "landlock")  # the strongest first
_START_S = 600.0  # against hanging alone: where it were over, "auto" would take a weaker protection
_END_S = 30.0  # to end all interpreters and to remove their folders, on a busy machine
# Stands in for the packages' own __init__ files, whose imports would be copied into every interpreter.
_START = """
import json, sys, types
for name, path in (("poise", sys.argv[1]), ("poise.sandbox", sys.argv[2])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from poise.sandbox.server import serve
serve(int(sys.argv[3]), json.loads(sys.argv[4]))
"""
# Makes the kernel end interpreters before the trainer when memory runs out.
_FIRST_TO_GO = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'
_SYSTEM_PATHS = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets keep their order
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot be forked safely
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MiB of the address space that is limited
}


class Server:
    """A running fork server: its process, the socket that takes connections, and what protects (``walls``).

    Raises ``SandboxError`` where it does not start.
    """

    def __init__(self, mode: str, *, packages: Sequence[str]) -> None:
        package = os.path.dirname(__file__)
        settings = _settings(mode, packages)
        python = [os.path.realpath(sys.executable), "-S", "-s", "-c", _START, os.path.dirname(package), package]
        wrapper = []
        if mode == "bubblewrap":
            wrapper = _bubblewrap([*settings["readable"], package], settings["hidden"])
        elif mode == "namespaces":
            settings["readable"] = [*settings["readable"], package]
        self.mode = mode
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            command = [*wrapper, *python, str(theirs.fileno()), json.dumps(settings)]
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", _FIRST_TO_GO, "sh", *command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT | {"TMPDIR": "/" if wrapper else tempfile.gettempdir()},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        self.walls: dict[str, Any] = {}
        try:
            self.control.settimeout(_START_S)
            (length,) = LENGTH.unpack(self.control.recv(LENGTH.size, socket.MSG_WAITALL))
            self.walls = json.loads(self.control.recv(length, socket.MSG_WAITALL))
            self.control.setblocking(False)
        except (OSError, ValueError, struct.error) as error:
            self.walls = {"error": f"no answer from the fork server: {error}"}
        if self.walls["error"] is not None:
            self.close()
            raise SandboxError(self.walls["error"])

    def connect(self) -> socket.socket:
        """A new connection. Raises ``OSError`` where the server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
            try:
                self.control.sendmsg([b"c"], [rights])
            except OSError:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Ends the server and every interpreter. In a forked copy of the trainer: only lets go of it."""
        self.control.close()
        if self.owner != os.getpid():
            return
        try:
            self.process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.walls.get("base"):
            workdirs.remove_all(self.walls["base"])


def start_server(mode: str, *, allow_unsandboxed: bool, packages: Sequence[str]) -> Server:
    """The strongest protection that works here, or the one named. Raises ``SandboxError`` with all reasons."""
    reasons = []
    for candidate in MODES if mode == "auto" else [mode]:
        try:
            return Server(candidate, packages=packages)
        except SandboxError as error:
            reasons.append(f"{candidate}: {error}")
    if allow_unsandboxed:
        return Server("none", packages=packages)
    raise SandboxError(
        f"nothing here keeps model-written code from the rest of the machine ({'; '.join(reasons)}). Install "
        "bubblewrap, or use sandbox.url, or set sandbox.allow_unsandboxed=True if this machine holds nothing of value"
    )


def _settings(mode: str, packages: Sequence[str]) -> dict[str, Any]:
    """What ``server.serve`` needs to know."""
    roots, folders = package_roots(tuple(packages))
    standard = os.path.realpath(os.path.dirname(os.__file__))
    readable = {os.path.dirname(standard), os.path.realpath(sys.executable), *_own_libraries(), *roots, *_SYSTEM_PATHS}
    # Beside the standard library lie packages that nobody has named.
    hidden = [path for name in ("site-packages", "dist-packages") if os.path.isdir(path := f"{standard}/{name}")]
    shown = _outermost((path for path in readable if os.path.exists(path)), hidden)
    listable = list(folders)
    if mode == "landlock":  # which can allow a folder with all that is inside, or leave it out
        real = _outermost(map(os.path.realpath, shown), hidden)
        shown = [part for path in real for part in _parts_without(hidden, path, listable)]
    return {
        "mode": mode,
        "readable": shown,
        "hidden": hidden,
        "listable": listable,
        "path": folders,
        "preload": [name for name in packages if _is_installed(name)],
    }


def _outermost(paths: Iterable[str], hidden: Sequence[str]) -> list[str]:
    """Without what lies in a folder that is itself among ``paths``, unless it lies in a hidden one in between."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        above = [folder for folder in kept if path.startswith(folder + "/")]
        if not above or (_is_below(hidden, path) and not _is_below(hidden, above[-1])):
            kept.append(path)
    return kept


def _is_below(folders: Sequence[str], path: str) -> bool:
    return any(path.startswith(folder + "/") for folder in folders)


def _parts_without(hidden: Sequence[str], path: str, listed: list[str]) -> list[str]:
    """``path``, or its parts where a hidden folder is below it, which then are ``listed``."""
    if path in hidden:
        return []
    if not any(_is_below([path], folder) for folder in hidden):
        return [path]
    listed.append(path)
    return [part for name in sorted(os.listdir(path)) for part in _parts_without(hidden, f"{path}/{name}", listed)]


@functools.cache
def package_roots(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What these distributions and those that they require are made of, where installed; and the folders it is in."""
    roots, folders, todo, seen = set(), [], list(names), set()
    while todo:
        name = re.split(r"[^\w.\-]", todo.pop(), maxsplit=1)[0].lower()
        if not name or name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            todo += [line for line in distribution.requires or [] if "extra ==" not in line]
            folder = os.path.realpath(str(distribution.locate_file("")))
            tops = {file.parts[0] for file in distribution.files or [] if file.parts} - {"..", "__pycache__"}
            if tops:
                roots |= {os.path.join(folder, top) for top in tops}
                folders += [folder] if folder not in folders else []
    return tuple(sorted(roots)), tuple(folders)


def _is_installed(name: str) -> bool:
    try:
        return metadata.distribution(name).files is not None
    except metadata.PackageNotFoundError:
        return False


def _own_libraries() -> list[str]:
    """Shared libraries of this interpreter that lie in unusual places, packages' apart."""
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split(None, 5)[5].strip() for line in maps if ".so" in line}
    except OSError:
        return []
    return sorted(path for path in mapped if "-packages/" not in path)


def _bubblewrap(readable: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """The command that makes the private root. The server inside keeps the rights to wall off each interpreter."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    arguments = [
        program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--as-pid-1", "--cap-drop", "ALL",
    ]  # fmt: skip
    # Not --die-with-parent: the parent is the thread that started it. The server ends when the trainer's socket closes.
    if os.geteuid() != 0:
        arguments.append("--unshare-user")
    for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
        arguments += ["--cap-add", capability]
    folders = {str(parent) for path in [*readable, "/snippet/"] for parent in Path(path).parents} - {"/"}
    for folder in sorted(folders):
        arguments += ["--perms", "0755", "--dir", folder]  # else root's alone
    inside = [path for path in readable if _is_below(hidden, path)]
    for path in [path for path in readable if path not in inside]:
        if path.startswith("/dev/"):
            arguments += ["--dev-bind", path, path]
        elif os.path.islink(path) and path.startswith("/lib"):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", os.path.realpath(path), path]
    for folder in hidden:
        arguments += ["--perms", "0755", "--tmpfs", folder]
    for folder in sorted(folder for folder in folders if _is_below(hidden, folder)):
        arguments += ["--perms", "0755", "--dir", folder]
    for path in inside:
        arguments += ["--ro-bind", os.path.realpath(path), path]
    arguments += ["--dir", "/snippet"]
    for folder in ("/", *hidden):
        arguments += ["--remount-ro", folder]
    return [*arguments, "--"]
