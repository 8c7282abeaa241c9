"""Ctrl-C (and SIGTERM) stop a run where nothing is half done."""

import asyncio
import concurrent.futures
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
    ``in_background``: coroutines run in a thread of their own, several at a time from several threads.
    ``grace_s``: so long after SIGTERM the process ends by force, where it hangs in wait for one that is gone.
    """

    def __init__(
        self, *, agree: Callable[[bool], bool] = bool, grace_s: float | None = None, in_background: bool = False
    ) -> None:
        self.is_requested = False
        self._is_cancelled = False
        self._agree, self._grace_s = agree, grace_s
        self._cancels: list[Callable[[], None]] = []
        self._in_background = in_background
        self._runner: asyncio.Runner | _LoopThread | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        self._runner = _LoopThread() if self._in_background else asyncio.Runner()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and self._grace_s is not None and not self.is_requested:
            timer = threading.Timer(self._grace_s, _end_by_force)
            timer.daemon = True
            timer.start()
        self.is_requested = True
        self.cancel()

    def cancel(self) -> None:
        """Cancels whatever ``run`` is running, and at once what it is given later: a thread may be about to begin."""
        self._is_cancelled = True
        for cancel in list(self._cancels):
            cancel()

    def check(self) -> None:
        """Raises Interrupted if a stop was asked for: call it where the run may end."""
        self.is_requested = self._agree(self.is_requested)
        if self.is_requested:
            raise Interrupted("interrupted")

    def finish(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs to its end, a stop request or not: for what cleans up."""
        return asyncio.run(coroutine) if self._runner is None else self._runner.run(coroutine)

    def run(self, coroutine: Coroutine[Any, Any, T], *, agrees: bool = True) -> T:
        """``asyncio.run`` that a stop request cancels; raises Interrupted then.

        Within the context manager all runs share one event loop, so connections outlive a rollout. ``agrees`` False:
        other processes are not asked, so that each may run what the others do not.
        """

        async def main() -> T:
            task = asyncio.ensure_future(coroutine)
            loop = asyncio.get_running_loop()

            def cancel() -> None:
                loop.call_soon_threadsafe(task.cancel)

            self._cancels.append(cancel)
            try:
                if self.is_requested or self._is_cancelled:
                    task.cancel()
                return await task
            finally:
                self._cancels.remove(cancel)

        try:
            result = self.finish(main())
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            if not self.is_requested:
                raise
            if not agrees:
                raise Interrupted("interrupted") from None
        if agrees:
            self.check()
        return result


class _LoopThread:
    """An event loop that goes on while the threads that use it do something else."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_by_force() -> None:
    print("poise: asked to end, but still waiting for another process: ended by force", file=sys.stderr, flush=True)
    os._exit(1)
