"""Files that are whole at any time."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole at any time, as it was or as it shall be: a run may be killed meanwhile."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
