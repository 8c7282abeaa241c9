"""How ranks stay together around what only one of them does, or what may fail on one of them alone."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from poise.config import RunError
from poise.parallel.mesh import Mesh

T = TypeVar("T")


async def led(mesh: Mesh, work: Callable[[], Awaitable[T]], *, carries: tuple[type[Exception], ...] = (RunError,)) -> T:
    """``work()`` on the first rank, its result on every rank; all of them must call it.

    Where it raises one of ``carries``, every rank raises it: the first the exception itself, the others one of the same
    class and message. Any other exception ends the first rank, and with it all.
    """
    if mesh.shards is None:
        return await work()
    result: T | None = None
    raised: Exception | None = None
    if mesh.is_first:
        try:
            result = await work()
        except carries as error:
            raised = error
    result, failure = mesh.gather_from_all((result, None if raised is None else (type(raised), str(raised))))[0]
    if raised is not None:
        raise raised
    if failure is not None:
        kind, message = failure
        raise kind(message)
    return result  # type: ignore[return-value]


async def settled(mesh: Mesh, work: Awaitable[T]) -> T | RunError:
    """The result of what this rank does for itself; on several ranks a RunError is a result too, for ``together``.

    A rank that raised alone would go on to save while the others still wait for what it should have sampled.
    """
    if mesh.shards is None:
        return await work
    try:
        return await work
    except RunError as error:
        return error


def together(mesh: Mesh, outcome: T | RunError) -> list[T]:
    """``settled`` outcomes of all ranks, in their order. Where one is an error, every rank raises it.

    The message names the rank; which rank's error is raised does not depend on who was first.
    """
    if mesh.shards is None:
        assert not isinstance(outcome, RunError)
        return [outcome]
    failure = (type(outcome), f"rank {mesh.rank}: {outcome}") if isinstance(outcome, RunError) else None
    outcomes = mesh.gather_from_all((outcome if failure is None else None, failure))
    for _, failed in outcomes:
        if failed is not None:
            kind, message = failed
            raise kind(message)
    return [result for result, _ in outcomes]  # type: ignore[misc]
