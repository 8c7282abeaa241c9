"""Asynchronous rollouts: another iterator, not another loop."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def ahead(roll_out: Callable[[int], T], steps: Sequence[int], *, lead: int, cancel: Callable[[], None]) -> Generator[T]:
    """``roll_out(step)`` for each of ``steps``, in their order; up to ``lead`` of them run while one is trained.

    The rollout of step n begins when that of step n - 1 - lead has been trained and its weights are out, which is when
    the next one is asked for: its oldest token is ``lead`` updates old. Each runs in a thread; ``cancel`` ends them
    where the iteration ends early.
    """
    pool = ThreadPoolExecutor(lead + 1, thread_name_prefix="rollout")
    remaining = iter(steps)
    running: deque[Future[T]] = deque(pool.submit(roll_out, step) for step in islice(remaining, lead + 1))
    try:
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(roll_out, step) for step in islice(remaining, 1))
    finally:
        if running:
            cancel()
        pool.shutdown(cancel_futures=True)
