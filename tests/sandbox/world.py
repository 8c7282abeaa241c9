"""Targets for attacks, a trainer of some user in some mode, and eyes that see what happened to the targets."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
# Each of pytest's workers has a user of its own: the kernel counts a user's tasks, whoever starts them.
USER = 1234 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
MODES = ("bubblewrap", "namespaces", "landlock")
_VICTIM = """
import ctypes, os, signal, sys
os.setpgid(0, 0)
text = ctypes.create_string_buffer(os.environ["POISE_TEST_SECRET"].encode())
print(os.getpid(), ctypes.addressof(text), flush=True)
signal.pause()
"""
_TRAINER = """
import asyncio, json, sys, time
from poise.sandbox import Limits, Sandbox, SandboxError

async def attacked(sandbox, request):
    results = []
    async with sandbox.session(Limits(**request["limits"]), seed=1) as session:
        for cell in request["cells"]:
            if isinstance(cell, str):
                results.append(vars(await session.run(cell)) | {"at": time.monotonic()})
            else:
                await asyncio.sleep(cell)
    return results

async def neighbour(session, attack):
    waits, is_right = [0.0], True
    while not attack.done():
        start = time.monotonic()
        is_right = is_right and (await session.run("x += 1\\nx - 1")).output == "41\\n"
        await session.run("x -= 1")
        waits.append(time.monotonic() - start)
        await asyncio.sleep(0.005)
    return is_right, max(waits)

async def main():
    sandbox = Sandbox(mode=sys.argv[1])
    print(json.dumps(sandbox.walls()), flush=True)
    # Whatever the machine does meanwhile, its cells end by themselves.
    async with sandbox.session(Limits(wall_s=600, cpu_s=600)) as beside:
        await beside.run("x = 41")
        while line := await asyncio.to_thread(sys.stdin.readline):
            attack = asyncio.create_task(attacked(sandbox, json.loads(line)))
            is_right, longest_s = await neighbour(beside, attack)
            print(json.dumps({"results": await attack, "is_right": is_right, "longest_s": longest_s}), flush=True)

try:
    asyncio.run(main())
except SandboxError as error:
    print(json.dumps({"error": str(error)}), flush=True)
"""


def python_of(user: int) -> list[str]:
    """A command that runs Python as ``user``. Skips where there is none."""
    if user == os.geteuid() and user != 0:
        return [sys.executable]
    # The system's Python where there is one: that of the tests may lie in root's home, closed to everybody else.
    for python in ("/usr/bin/python3", sys.executable):
        command = [python] if user == 0 else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", python]
        check = "import sys, poise.sandbox; sys.exit(sys.version_info < (3, 11))"
        with contextlib.suppress(OSError):
            if not subprocess.run(
                [*command, "-c", check], capture_output=True, env={"PYTHONPATH": str(SRC)}
            ).returncode:
                return command
    pytest.skip(f"no Python 3.11 with poise that user {user} can start")


class World:
    """Files, listeners and a process that belong to ``user``, in a folder open to all."""

    SECRET = "the-password"

    def __init__(self, user: int) -> None:
        self.user, self.python = user, python_of(user)
        self.folder = Path(tempfile.mkdtemp(prefix="poise-world-"))
        self.folder.chmod(0o777)
        self.modules = self.folder / "modules" / "poise"
        for room in ("sandbox", "config"):
            shutil.copytree(SRC / "poise" / room, self.modules / room, ignore=shutil.ignore_patterns("__py*"))
        (self.modules / "__init__.py").touch()
        self.targets = self.folder / "targets"
        self.targets.mkdir()
        self.env = {
            "PATH": os.environ["PATH"], "POISE_TEST_SECRET": self.SECRET, "TMPDIR": str(self.folder),
            "PYTHONPATH": str(self.modules.parent), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8",
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.selector = selectors.DefaultSelector()
        self.listeners = [
            socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        ]  # fmt: skip
        name = f"poise-{os.getpid()}-{self.folder.name}"
        addresses = [None, ("127.0.0.1", 0), str(self.folder / "socket"), "\0" + name, "\0" + name + ".datagram"]
        for listener, address in zip(self.listeners, addresses, strict=True):
            if address is not None:
                listener.bind(address)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
            self.selector.register(listener, selectors.EVENT_READ)
        (self.folder / "socket").chmod(0o777)
        self.places = {
            "secret": self.targets / "secret", "victim": self.targets / "victim", "folder": self.targets,
            "module": self.modules / "sandbox" / "kept.py", "path": self.folder / "socket", "name": name,
            "tcp": self.listeners[0].getsockname()[1], "udp": self.listeners[1].getsockname()[1],
            "roots": "/etc/shadow", "daemon": f"d{os.getpid()}",
        }  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """All targets as new."""
        shutil.rmtree(self.targets)
        self.targets.mkdir()
        for name in ("secret", "victim", self.SECRET):
            (self.targets / name).write_text(self.SECRET)
        for path in [self.targets, *self.targets.iterdir(), *self.folder.rglob("modules/**/*")]:
            if os.geteuid() == 0:
                os.chown(path, self.user, self.user)
        if self.process is None or self.process.poll() is not None or self._nice() != 0 or self._max_files() == "9":
            self._stop()
            command = [*self.python, "-c", _VICTIM]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.env, text=True)
            assert self.process.stdout is not None
            pid, address = self.process.stdout.readline().split()
            self.places |= {"pid": pid, "address": address}
        self.was_reached()
        self.victim_before, self.process_before = self.victim_state(), self.victim_process_state()

    def _stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def code(self, attack) -> str:
        code = attack.code
        for name, value in self.places.items():
            code = code.replace(f"@{name}@", str(value))
        return code.replace("REACHED", "REA' 'CHED")  # a traceback that quotes the line does not say the word

    def victim_state(self):
        """Names, contents, modes, times and attributes of the targets, and the module's text."""
        state = {}
        for path in sorted(self.targets.iterdir()):
            entry = path.stat()
            text = path.read_text() if path.is_file() else None
            state[path.name] = (
                text,
                entry.st_mode,
                entry.st_mtime_ns,
                entry.st_nlink - path.is_dir(),
                os.listxattr(path),
            )
        return state, self.places["module"].read_text()

    def was_reached(self) -> bool:
        """Whether anybody connected or sent; forgets it."""
        reached = False
        while events := self.selector.select(0.05 if not reached else 0):
            for key, _ in events:
                reached = True
                if key.fileobj.type == socket.SOCK_STREAM:
                    key.fileobj.accept()[0].close()
                else:
                    key.fileobj.recv(99)
        return reached

    def victim_process_state(self):
        assert self.process is not None
        time.sleep(0.02)
        return (self.process.poll(), self._nice(), self._max_files())

    def _nice(self):
        with contextlib.suppress(OSError):
            return os.getpriority(os.PRIO_PROCESS, int(self.places["pid"]))

    def _max_files(self):
        with contextlib.suppress(OSError):
            limits = Path(f"/proc/{self.places['pid']}/limits").read_text()
            return next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]

    def has_process_named(self, name: str) -> bool:
        """Whether there is one; ends it."""
        found = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (entry / "comm").read_text().strip() == name:
                        found = True
                        os.kill(int(entry.name), signal.SIGKILL)
        return found

    def run_without_sandbox(self, code: str) -> str:
        command = [*self.python, "-c", code]
        folder = tempfile.mkdtemp(dir=self.folder)
        os.chmod(folder, 0o777)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=self.env, cwd=folder,
            errors="replace",
        )  # fmt: skip
        return done.stdout

    def close(self) -> None:
        self._stop()
        for listener in self.listeners:
            listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Trainer:
    """A process of ``world.user`` that runs cells in the sandbox, with a neighbour beside them."""

    def __init__(self, world: World, mode: str) -> None:
        self.world = world
        self.process = subprocess.Popen(
            [*world.python, "-c", _TRAINER, mode],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=world.env,
        )  # fmt: skip
        self.walls = self._answer()
        if self.walls.get("error"):
            self.close()
            pytest.skip(f"mode {mode} is impossible here: {self.walls['error']}")

    def run(self, *cells, **limits):
        """The results of the cells of a session (a number: seconds to wait), once the neighbour was found unharmed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"cells": cells, "limits": limits}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        assert answer["is_right"], "the neighbour's variables changed, or its cell failed"
        return answer["results"]

    def _answer(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer's process is gone"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=300)
