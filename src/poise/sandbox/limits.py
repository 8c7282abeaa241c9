"""What a caller gives and gets: the limits of a cell, its result, and the sandbox's own failure."""

import math
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


class SandboxError(RuntimeError):
    """The sandbox itself does not work: nothing protects here, it cannot be started, or it stopped answering."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one interpreter. ``wall_s`` and ``cpu_s`` (all threads together) count for each cell anew; time in
    which the machine does not let the sandbox run is not counted.

    ``memory_mib``: address space beyond what the warm interpreter maps. ``file_mib``: of one file and, but for mode
    "landlock", of the whole working directory. ``num_threads``: at once, the main one included. Output of a cell
    beyond ``num_output_bytes`` is cut in its middle.
    """

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mib: int = 512
    file_mib: int = 16
    num_threads: int = 16
    num_output_bytes: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Limits.{name} must be a positive number, got {value}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a cell did.

    ``output``: standard output and standard error in the order written, cut in the middle where too long
    (``num_cut_bytes``). ``exit_status``: 0, or as a script's; -N when signal N ended the interpreter. ``timed_out``: at
    the wall-clock or the CPU limit. ``notice``: what the sandbox has to say, "" where there is nothing. ``wall_s``:
    seconds it ran. ``is_lost``: the interpreter is gone and its variables with it; a session starts a fresh one for
    its next cell.
    """

    output: str
    exit_status: int
    timed_out: bool = False
    num_cut_bytes: int = 0
    notice: str = ""
    wall_s: float = 0.0
    is_lost: bool = False

    @property
    def is_error(self) -> bool:
        return self.exit_status != 0

    @property
    def text(self) -> str:
        """What the policy sees: output and notice, never empty."""
        parts = [part for part in (self.output.rstrip("\n"), self.notice) if part]
        return "\n".join(parts) or "[no output]"


class Session(Protocol):
    """An interpreter that remembers, as a notebook's: ``async with sandbox.session() as session``.

    Variables persist over cells, the value of a last expression is shown, an exception leaves the session alive.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def open(self) -> None:
        """Starts the interpreter, if it has not been. Raises ``SandboxError`` where that cannot be done."""

    async def run(self, code: str) -> Result:
        """Runs a cell. Time-outs, crashes, floods and syntax errors come back as text, never as exceptions."""
        ...

    async def run_once(self, code: str) -> Result:
        """Runs ``code`` as a whole script, in an interpreter that is made when its turn comes and ends with it."""
        ...

    async def close(self) -> None:
        """Ends the interpreter. May be called twice, or without ``open``."""
