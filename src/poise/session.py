"""What surrounds a job: how it is interrupted, what is said then, and the servers that it is connected to."""

from collections.abc import Iterator
from contextlib import contextmanager

from poise.engine import EmbeddedEngine
from poise.interrupt import Interrupt, Interrupted
from poise.parallel import Mesh
from poise.train.remote import RemoteEngine


def interrupt_of(mesh: Mesh, *, in_background: bool = False) -> Interrupt:
    """All ranks stop at the same place; torchrun kills what is left 30 s after its SIGTERM."""
    if mesh.shards is None:
        return Interrupt(in_background=in_background)
    return Interrupt(
        agree=lambda is_requested: any(mesh.gather_from_all(is_requested)), grace_s=20.0, in_background=in_background
    )


@contextmanager
def connected(engine: EmbeddedEngine | RemoteEngine, interrupt: Interrupt) -> Iterator[None]:
    """Refuses servers that cannot be trained with before anything is done, and lets go of them at the end."""
    if isinstance(engine, EmbeddedEngine):
        yield
        return
    try:
        if engine.mesh.shards is None:
            interrupt.run(engine.handshake())
        else:
            interrupt.finish(engine.handshake())
            interrupt.check()
        yield
    finally:
        interrupt.finish(engine.close())


def push_weights(engine: RemoteEngine, interrupt: Interrupt) -> None:
    """Servers get the weights as they are now; on a mesh from all ranks together.

    There a stop request waits: cancelled on one rank alone, a push would leave the others gathering.
    """
    if engine.mesh.shards is None:
        interrupt.run(engine.update())
    else:
        interrupt.finish(engine.update())
        interrupt.check()


def push_before_sampling(engine: EmbeddedEngine | RemoteEngine, interrupt: Interrupt) -> None:
    """On a mesh, where ranks that sample are on their own; elsewhere the first request for a token does it."""
    if isinstance(engine, RemoteEngine) and engine.mesh.shards is not None:
        push_weights(engine, interrupt)


@contextmanager
def kept_by(sentence: str) -> Iterator[None]:
    """Says in an Interrupted what was kept."""
    try:
        yield
    except Interrupted:
        raise Interrupted(f"interrupted; {sentence}") from None
