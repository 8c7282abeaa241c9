"""What is typed after a command: options of the command, and keys of the configuration."""

import dataclasses
import difflib
from collections.abc import Sequence

import tyro

from poise.config import Config, ConfigError, SandboxConfig, TaskConfig
from poise.config.task import READ_BY

KEYS_HELP = """\
A key is SECTION.NAME (--rollout.group-size). The section may be left out where the name is unique (--group-size), and
--task VALUE stands for --task.name VALUE, --engine VALUE for --engine.kind VALUE. `poise train RECIPE --help` explains
every key.
"""


def take_option(args: list[str], name: str) -> tuple[str | None, list[str]]:
    for i, arg in enumerate(args):
        if arg.startswith(f"{name}="):
            return arg.split("=", 1)[1], args[:i] + args[i + 1 :]
        if arg == name:
            if i + 1 == len(args):
                raise ConfigError(f"{name} needs {'a run folder' if name == '--resume' else 'a value'}")
            return args[i + 1], args[:i] + args[i + 2 :]
    return None, args


def parse(default: Config, args: Sequence[str], *, prog: str, about: str = "") -> Config:
    """The configuration with the command line's values. One that does not parse ends in tyro's message, exit code 2.
    ``about``: what ``--help`` says before the keys.

    Raises ConfigError for a key that is unknown, ambiguous, or would do nothing.
    """
    args = _full_keys(args)
    config = tyro.cli(
        Config,
        default=default,
        args=args,
        prog=prog,
        description=about + KEYS_HELP,
        config=(tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed),
    )
    _refuse_idle_keys(config, [arg[2:].partition("=")[0] for arg in args if arg.startswith("--")])
    return config


def for_task_of(default: Config, args: Sequence[str]) -> Config:
    """``default`` without its task's rows, and the keys that are its own, where ``args`` name another task."""
    name, _ = take_option(_full_keys(args), "--task.name")
    if name in (None, default.task.name, "custom") or not any(name in readers for readers in READ_BY.values()):
        return default
    fields = {field.name: getattr(default.task, field.name) for field in dataclasses.fields(default.task)}
    kept = {key: value for key, value in fields.items() if name in READ_BY.get(key, (name,))}
    kept |= {"data": None, "test_data": None}
    task = dataclasses.replace(TaskConfig(), **(kept | {"name": name}))
    return dataclasses.replace(default, task=task, sandbox=default.sandbox if task.runs_code else SandboxConfig())


_BOUNDS_OF_RATIOS = ("algorithm.clip-low", "algorithm.clip-high", "algorithm.dual-clip")


def _refuse_idle_keys(config: Config, given: Sequence[str]) -> None:
    """A key that was typed and that nothing will read is a misunderstanding."""
    for key in given:
        section, _, name = key.partition(".")
        if section == "model" and config.model.path is not None and name not in ("path", "device", "dtype"):
            raise ConfigError(f"--{key} does nothing beside model.path: the checkpoint has a shape of its own")
        algorithm = config.algorithm
        has_other_ratios = algorithm.updates_per_batch > 1 or algorithm.recompute_old_log_probs != "none"
        if key in _BOUNDS_OF_RATIOS and not has_other_ratios:
            raise ConfigError(f"--{key} does nothing with algorithm.updates_per_batch 1: every ratio is exactly 1")
        readers = READ_BY.get(name.replace("-", "_"), ()) if section == "task" else ()
        if readers and config.task.name not in readers:
            raise ConfigError(
                f"--{key} does nothing for task {config.task.name}; it belongs to task {' and '.join(readers)}"
            )


def _full_keys(args: Sequence[str]) -> list[str]:
    return [full_key(arg) if arg.startswith("--") and arg != "--help" else arg for arg in args]


def full_key(arg: str) -> str:
    """``--group-size`` or ``--group-size=8`` as ``--rollout.group-size...``.

    Raises ConfigError for an unknown or ambiguous key.
    """
    key, equals, value = arg[2:].partition("=")
    key = key.replace("_", "-")
    full = [
        f"{section.name}.{field.name}".replace("_", "-")
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
    ]
    matches = [name for name in full if key in (name, name.split(".")[1]) or name in (f"{key}.name", f"{key}.kind")]
    if len(matches) > 1:
        raise ConfigError(f"--{key} is ambiguous: --{', --'.join(matches)}")
    if not matches:
        close = difflib.get_close_matches(key, [*full, *(name.split(".")[1] for name in full)], n=3)
        hint = f"; did you mean --{', --'.join(close)}?" if close else "; --help lists the keys"
        raise ConfigError(f"unknown key --{key}{hint}")
    return f"--{matches[0]}{equals}{value}"
