"""Servers that poise starts itself, with the command that the user gave."""

import shlex
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

    def start(self, url: str, is_first: bool) -> None:
        """Starts a server unless it runs already; later calls of the same outage only look after it.

        Raises ConfigError for a command that cannot be started, and EngineError for one that has failed.
        """
        process = self._running.get(url)
        if process is not None and process.poll() is None:
            return
        if not is_first and process is not None:
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

    def stop(self) -> None:
        """Ends them: asked first, killed after 10 s."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
