"""Ctrl-C (and SIGTERM) stop a run where nothing is half done."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Somebody asked to stop, and it was done at a safe place. The message says what was kept."""


class Interrupt:
    """As a context manager it takes over SIGINT and SIGTERM: the first asks to stop, a second SIGINT stops at once.

    A rollout is cancelled at once, since sampling changes nothing; an optimizer step is finished first.

    ``agree``: of processes that must stop at the same place, whether any was asked to; it is called at each such place.
    ``grace_s``: so long after SIGTERM the process ends by force, where it hangs in wait for one that is gone.
    """

    def __init__(self, *, agree: Callable[[bool], bool] = bool, grace_s: float | None = None) -> None:
        self.is_requested = False
        self._agree, self._grace_s = agree, grace_s
        self._cancel: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self._grace_s is not None and not self.is_requested:
            timer = threading.Timer(self._grace_s, _end_by_force)
            timer.daemon = True
            timer.start()
        self.is_requested = True
        if self._cancel is not None:
            self._cancel()

    def check(self) -> None:
        """Raises Interrupted if a stop was asked for: call it where the run may end."""
        self.is_requested = self._agree(self.is_requested)
        if self.is_requested:
            raise Interrupted("interrupted")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """``asyncio.run`` that a stop request cancels; raises Interrupted then."""

        async def main() -> T:
            task = asyncio.ensure_future(coroutine)
            loop = asyncio.get_running_loop()

            def cancel() -> None:
                loop.call_soon_threadsafe(task.cancel)

            self._cancel = cancel
            if self.is_requested:
                task.cancel()
            return await task

        try:
            result = asyncio.run(main())
        except asyncio.CancelledError:
            if not self.is_requested:
                raise
        finally:
            self._cancel = None
        self.check()
        return result


def _end_by_force() -> None:
    print("poise: asked to end, but still waiting for another process: ended by force", file=sys.stderr, flush=True)
    os._exit(1)
