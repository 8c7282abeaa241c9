"""The order of the house: who may import whom, and how long a file or a function may grow."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "poise"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# A module imports only from its own folder or from a lower floor.
FLOORS = {
    "types": 0, "config": 0, "files": 0, "console": 0, "interrupt": 0, "seeding": 0, "ahead": 0,
    "ops": 1, "algo": 1, "harmony": 1, "sandbox": 1, "runfolder": 1, "metrics": 1,
    "model": 2, "envs": 2,
    "parallel": 3, "engine": 3, "rollout": 3,
    "plan": 4, "train": 4,
    "loop": 5, "evaluate": 5, "warmstart": 5, "report": 5, "integrations": 5, "doctor": 5, "upcycle": 5,
    "servers": 5, "session": 5,
    "recipes": 6, "assembly": 6, "sampling": 6, "jobs": 7, "exporting": 7, "planning": 7, "mismatch": 7, "serving": 7,
    "cli": 8, "__main__": 9,
}  # fmt: skip
# These rooms also keep away from libraries that they must not need.
FORBIDDEN = {"harmony": {"torch", "transformers"}, "sandbox": {"torch", "transformers"}, "envs": {"torch"}}
# Rooms that may be imported from one room only.
ONLY_IN = {"tyro": {"cli"}}

FILES = sorted(SRC.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[0]


def imported_modules(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, []


def floor_violations(path: Path, source: str) -> list[str]:
    here = room(path)
    found = []
    for line, level, module, names in imported_modules(ast.parse(source)):
        where = f"{path.name}:{line}"
        if level:
            found.append(f"{where} relative import")
            continue
        top, *rest = module.split(".")
        if top in FORBIDDEN.get(here, set()):
            found.append(f"{where} {here} must not import {top}")
        if top in ONLY_IN and here not in ONLY_IN[top]:
            found.append(f"{where} only {ONLY_IN[top]} may import {top}")
        if top != "poise":
            continue
        for target in [rest[0]] if rest else names:
            if target == here or target == "__version__":
                continue
            if target not in FLOORS:
                found.append(f"{where} imports unknown room {target}")
            elif FLOORS[target] >= FLOORS[here]:
                found.append(f"{where} floor {FLOORS[here]} ({here}) imports floor {FLOORS[target]} ({target})")
    return found


def length_violations(path: Path, source: str) -> list[str]:
    lines = source.count("\n") + 1
    found = [f"{path.name}: {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path.name}:{node.lineno} {node.name}: {length} lines")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_file_keeps_the_floors_and_the_limits(path):
    source = path.read_text()
    if path.name != "__init__.py" or path.parent != SRC:
        assert room(path) in FLOORS, f"{path} belongs to no floor"
        assert not floor_violations(path, source)
    assert not length_violations(path, source)


def test_the_check_sees_violations():
    # The check itself must be able to fail: an upward import, a relative one, a forbidden one, a long function.
    path = SRC / "harmony" / "x.py"
    assert floor_violations(path, "from poise.model import load_model")
    assert floor_violations(path, "from . import y")
    assert floor_violations(path, "import torch.nn")
    assert floor_violations(path, "from poise import loop")
    assert not floor_violations(path, "from poise.types import Turn\nfrom poise.harmony.tokens import y")
    assert length_violations(path, "def f():\n" + "    x = 1\n" * 80)
    assert length_violations(path, "\n" * 400)
