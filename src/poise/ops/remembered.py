"""Results of kernels that are kept where everything around them is computed again.

Activation checkpointing forgets a block and runs it a second time in the backward pass. A kernel that calls
``remembered`` runs once all the same: the second time it is handed what it returned the first time.
"""

import threading
from collections.abc import Callable, Iterator

from torch import Tensor

Results = tuple[Tensor, ...]


class Memory:
    """What the ``remembered`` calls of one thread returned within ``recording``, in their order.

    Both are context managers and may be entered again: ``replaying`` starts at the first call each time.
    """

    def __init__(self) -> None:
        self.results: list[Results] = []
        # They know the list and not the memory: a circle would keep it until the garbage collector comes by.
        self.recording, self.replaying = _Recording(self.results), _Replaying(self.results)


class _Recording:
    def __init__(self, results: list[Results]) -> None:
        self._results = results
        self._before: list[_Recorder] = []

    def __enter__(self) -> None:
        self._before.append(_innermost())
        _active.recorder = self._recorder()

    def __exit__(self, *error: object) -> None:
        _active.recorder = self._before.pop()

    def _recorder(self) -> "_Recorder":
        kept = self._results

        def record(run: Callable[[], Results]) -> Results:
            results = run()
            # Aliases: autograd would hang its graph, and with it the graph's memory, on the tensors themselves.
            kept.append(tuple(x.detach() for x in results))
            return results

        return record


class _Replaying(_Recording):
    def _recorder(self) -> "_Recorder":
        results: Iterator[Results] = iter(self._results)
        return lambda run: tuple(x.detach() for x in next(results))


_Recorder = Callable[[Callable[[], Results]], Results] | None
_active = threading.local()


def _innermost() -> _Recorder:
    return getattr(_active, "recorder", None)


def remembered(run: Callable[[], Results]) -> Results:
    """``run()``, or what it returned the first time where its surroundings are computed again."""
    recorder = _innermost()
    return run() if recorder is None else recorder(run)


def is_remembering() -> bool:
    """Whether ``remembered`` calls are recorded or replayed here."""
    return _innermost() is not None
