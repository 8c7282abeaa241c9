"""A run's folder: ``config.json``, ``metrics.jsonl``, ``trajectories/``, ``checkpoints/``. Never overwritten."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from poise.config import Config, ConfigError
from poise.files import write_whole
from poise.types import Trajectory

CONFIG_FILE = "config.json"
SANDBOX_FILE = "sandbox.jsonl"

T = TypeVar("T")


def create_run_folder(config: Config) -> Path:
    """Makes ``run.folder/run.name-NNN`` with the next free number."""
    parent = Path(config.run.folder)
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / f"{config.run.name}-{number:03d}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            number += 1
    return folder


def write_config(path: Path, config: Config) -> None:
    write_whole(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def record_sandbox(folder: Path, walls: Mapping[str, Any]) -> None:
    """Adds a line to ``sandbox.jsonl``: what kept model-written code in since this start of the run."""
    with (folder / SANDBOX_FILE).open("a") as file:
        file.write(json.dumps(walls) + "\n")


def read_config(path: Path) -> Config:
    """Raises ConfigError where the file is missing, is no JSON, or holds a key that ``Config`` does not know."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: not a run folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    return _from_dict(Config, values, where=str(path))


def _from_dict(cls: Callable[..., T], values: Mapping[str, Any], *, where: str) -> T:
    hints = get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key}; known are {', '.join(sorted(hints))}")
        if dataclasses.is_dataclass(hints[key]):
            value = _from_dict(hints[key], value, where=f"{where}: {key}")
        elif isinstance(value, list):
            value = tuple(value)  # JSON has no tuples
        arguments[key] = value
    return cls(**arguments)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory], decode: Callable[[list[int]], str]) -> None:
    """Writes the JSON lines ``path``: ids, text, mask, log-probs, versions, reward, stop; a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for trajectory in trajectories:
            line = {
                "group_id": trajectory.group_id,
                "episode_id": trajectory.episode_id,
                "reward": trajectory.reward,
                "stop": trajectory.stop.value,
                "metrics": dict(trajectory.metrics),
                "token_ids": trajectory.token_ids,
                "response_mask": trajectory.response_mask,
                "rollout_log_probs": trajectory.rollout_log_probs,
                "policy_versions": trajectory.policy_versions,
                "text": decode(trajectory.token_ids),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
