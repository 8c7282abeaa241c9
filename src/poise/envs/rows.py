"""Rows of a task: .jsonl, .json and .parquet files, or a split of a Hugging Face data set."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from poise.config import ConfigError
from poise.envs.env import Row

_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+(/[\w.\-/]+)?")
_SUFFIXES = (".jsonl", ".json", ".parquet")

Check = Callable[[dict[str, Any], str], Row]
"""Brings a row as it was read into the task's form; raises ConfigError, naming the place it is told, for a bad one."""


class MadeRows(Sequence[Row]):
    """Rows made when they are asked for, each by its index alone. A subclass has a length and ``make``."""

    @abstractmethod
    def make(self, index: int) -> Row:
        """Row ``index`` of 0 .. len - 1."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.make(index % len(self))

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


def load_rows(source: str, *, split: str, check: Check) -> list[Row]:
    """Rows of a file, or of ``split`` of a data set "OWNER/NAME" or "OWNER/NAME/FOLDER".

    A .jsonl file holds an object a line, a .json file one list of objects. Raises ``ConfigError`` in one sentence.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _read(path, check)
    if path.suffix in _SUFFIXES or not _HUB_ID.fullmatch(source):
        raise ConfigError(
            f"task data {source!r} does not exist: give a {', '.join(_SUFFIXES)} path or a Hugging Face id OWNER/NAME"
        )
    return [row for file in _download(source, split) for row in _read(file, check)]


def _read(path: Path, check: Check) -> list[Row]:
    rows = []
    for where, row in _objects(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where} must be an object, got {json.dumps(row)[:40]}")
        rows.append(check(row, where))
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def _objects(path: Path) -> Iterable[tuple[str, Any]]:
    if path.suffix == ".parquet":
        return ((f"{path}:{number}", row) for number, row in enumerate(_parquet_rows(path), start=1))
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json":
        listed = _parse(text, str(path))
        if not isinstance(listed, list):
            raise ConfigError(f"{path} must hold a list of objects")
        return ((f"{path}, item {number}", row) for number, row in enumerate(listed, start=1))
    lines = enumerate(text.split("\n"), start=1)
    return ((f"{path}:{number}", _parse(line, f"{path}:{number}")) for number, line in lines if line.strip())


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error


def _parquet_rows(path: Path) -> Sequence[dict[str, Any]]:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{path.name} is a parquet file: pip install pyarrow, or give a .jsonl path") from error
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _download(source: str, split: str) -> list[Path]:
    """The files of one split, from the Hub or its local cache: .jsonl where the data set has it, else .parquet."""
    from huggingface_hub import snapshot_download

    owner, name, *folder = source.split("/", 2)
    repo, prefix = f"{owner}/{name}", f"{folder[0].rstrip('/')}/" if folder else ""
    try:
        patterns = [f"{prefix}*{split}*{suffix}" for suffix in (".jsonl", ".parquet")]
        root = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # the border to the network: each transport has errors of its own
        reason = (str(error) or type(error).__name__).strip().split("\n")[0]
        raise ConfigError(f"data set {repo} cannot be read from the Hugging Face Hub: {reason}") from error
    for suffix in (".jsonl", ".parquet"):
        chosen = sorted(file for file in (root / prefix).rglob(f"*{suffix}") if split in file.name)
        folders = sorted({str(file.parent.relative_to(root)) for file in chosen})
        if len(folders) > 1:
            choices = ", ".join(f"{repo}/{folder}" for folder in folders)
            raise ConfigError(f"data set {repo} has several {split} sets; choose one of {choices}")
        if chosen:
            return chosen
    raise ConfigError(f"data set {repo} has no .jsonl or .parquet file named after split {split!r}")


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """The text under ``key``; a number becomes text. Raises ConfigError where there is none."""
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(int(value)) if float(value).is_integer() else str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} needs a text {key!r}; it has {', '.join(row) or 'no keys'}")
    return value
