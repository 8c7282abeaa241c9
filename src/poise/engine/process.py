"""Servers that poise starts itself, with the command that the user gave."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from poise.config import ConfigError
from poise.engine.http import EngineError


class ServerProcesses:
    """Starts ``command`` for a url that refuses connections, and ends what it started.

    ``{url}``, ``{host}``, ``{port}`` and ``{checkpoint}`` (of the folder that ``checkpoint()`` names) are filled in.
    Output goes to ``log_folder/engine_PORT.log``. A process that still runs is not started a second time.
    """

    def __init__(self, command: str, *, checkpoint: Callable[[], Path], log_folder: Path) -> None:
        self.command, self.checkpoint, self.log_folder = command, checkpoint, log_folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._is_new: dict[str, bool] = {}  # whether it was started in the outage that is under way

    def start(self, url: str, is_first: bool) -> None:
        """Starts a server unless it runs already; later calls of the same outage only look after it.

        One that is still there when an outage begins may be about to end: it refuses connections before it is gone.
        Then another is started in its place. Raises ConfigError for a command that cannot be started, and EngineError
        for one that has failed.
        """
        process = self._running.get(url)
        if is_first:
            self._is_new[url] = False
        if process is not None and process.poll() is None:
            return
        if process is not None and self._is_new[url]:
            if process.returncode:  # 0 is a command that has started the server somewhere else
                raise EngineError(
                    f"engine.command ended with exit code {process.returncode} before {url} answered; "
                    f"{self.log_folder} has its output"
                )
            return
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        known = {"url": url, "host": parts.hostname or "", "port": str(port), "checkpoint": str(self.checkpoint())}
        words = []
        for word in shlex.split(self.command):
            for name, value in known.items():
                word = word.replace(f"{{{name}}}", value)
            words.append(word)
        with (self.log_folder / f"engine_{port}.log").open("ab") as log:
            try:
                # In a session of its own: Ctrl-C is for the run, which ends its servers when it has saved.
                self._running[url] = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"engine.command cannot be started: {error}") from error
        self._is_new[url] = True

    def stop(self) -> None:
        """Ends them: asked first, killed after 10 s with whatever they have started."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()
