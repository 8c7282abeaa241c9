"""What a run reports, step by step: ``metrics.jsonl`` always, TensorBoard when asked. Write-only."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from poise.files import write_whole

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends one JSON line per step to ``folder/metrics.jsonl``, flushed at once.

    ``trackers``: of "tensorboard" (writes to ``folder/tensorboard``). ``first_step``: the first step this process will
    write; lines at or after it, left by the process that a resumed run continues, are dropped first, as is a last line
    that was cut short. JSON knows no NaN or infinity: such a number is written as null. Raises ValueError for an
    unknown tracker and ModuleNotFoundError, with what to install, for one whose package is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], trackers: Sequence[str] = (), *, first_step: int = 0) -> None:
        for tracker in trackers:
            if tracker != "tensorboard":
                raise ValueError(f'trackers: unknown tracker {tracker!r}; "tensorboard" is known')
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _open_tensorboard(folder, first_step) if "tensorboard" in trackers else None
        path = folder / FILE_NAME
        if path.exists():
            _drop_from(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step; numbers only."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_from(path: Path, first_step: int) -> None:
    """Keep the lines before ``first_step``."""
    kept = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError as error:
            # A killed process may leave half a line, but only at the very end.
            if number == len(lines) and not line.endswith("\n"):
                continue
            raise ValueError(f"{path}, line {number} is no JSON") from error
        if step < first_step:
            kept.append(line if line.endswith("\n") else line + "\n")
    write_whole(path, "".join(kept))


def _open_tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'trackers: "tensorboard" needs the package tensorboard: pip install "poise[tracking]"'
        ) from error
    return SummaryWriter(folder / "tensorboard", purge_step=first_step)
