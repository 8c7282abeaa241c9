"""The command line: ``poise train``, ``sft``, ``eval``, ``plan``, ``recipes``, ``doctor``."""

import dataclasses
import difflib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from poise.config import Config, ConfigError, RunError
from poise.console import Console
from poise.interrupt import Interrupted
from poise.recipes import RECIPES
from poise.runfolder import read_config

USAGE = """\
poise: agentic reinforcement learning for GPT-OSS

  poise train RECIPE [--key value ...]        warm start, then reinforcement learning
  poise train --resume RUN [--key value ...]  go on from a run folder's latest checkpoint
  poise sft RECIPE [--key value ...]          the supervised warm start alone
  poise eval CHECKPOINT [--key value ...]     held-out reward of a checkpoint folder, or of a run's latest checkpoint
  poise plan RECIPE [--key value ...]         its memory, by kind and phase: does it fit, and what would
       [--gpus N] [--gpu-memory 80GB] [--context TOKENS] [--sequence-degree N] [--expert-degree N] [--released 20b|120b]
  poise recipes                               the recipes, a line each
  poise doctor                                versions, devices, attention kernels, sandbox, extras of this machine

A key is SECTION.NAME (--rollout.group-size). The section may be left out where the name is unique (--group-size), and
--task VALUE stands for --task.name VALUE. `poise train RECIPE --help` explains every key.
"""

Job = Callable[[Config, Path | None, Console], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed while running, 2 refused before anything started, 130 interrupted and saved."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return _dispatch(list(argv))
    except (ConfigError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"poise: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"poise: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"poise: {error}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("poise: interrupted at once; the last saved checkpoint stands", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command == "recipes":
        _print_recipes()
    elif command == "doctor":
        _doctor()
    elif command == "train":
        _train(rest)
    elif command == "sft":
        config = _parse(_recipe(rest), rest[1:], prog=f"poise sft {rest[0]}")
        from poise.jobs import sft_job

        Console().line(f"checkpoint: {sft_job(config, Console())}")
    elif command == "eval":
        _eval(rest)
    elif command == "plan":
        return _plan(rest)
    else:
        raise ConfigError(f"unknown command {command}; known are train, sft, eval, plan, recipes, doctor")
    return 0


def _train(args: list[str]) -> None:
    resume, args = _take_option(args, "--resume")
    if resume is None:
        config = _parse(_recipe(args), args[1:], prog=f"poise train {args[0]}")
    else:
        if args and not args[0].startswith("-"):
            args = args[1:]  # the recipe of a resumed run is what its config.json says
        before = read_config(Path(resume) / "config.json")
        config = _parse(before, args, prog="poise train --resume RUN")
        _require_resumable(before, config)
    from poise.jobs import train_job  # torch is not imported for --help and for refused keys

    train_job(config, Console(), resume=None if resume is None else Path(resume))


def _require_resumable(before: Config, config: Config) -> None:
    """Refuses changes that would silently do nothing, or would make the rest of the run another run."""
    free = {"run.steps", "run.save_every", "run.eval_every", "run.eval_problems", "run.log_trajectories_every"}
    free |= {"run.trackers", "optimizer.learning_rate", "optimizer.max_grad_norm", "algorithm.clip_low"}
    free |= {"algorithm.clip_high", "algorithm.entropy_weight", "model.device", "run.recompute"}
    for section in dataclasses.fields(Config):
        old, new = getattr(before, section.name), getattr(config, section.name)
        for field in dataclasses.fields(old):
            key = f"{section.name}.{field.name}"
            if getattr(old, field.name) != getattr(new, field.name) and key not in free:
                raise ConfigError(f"--resume cannot change {key}; it can change {', '.join(sorted(free))}")


def _eval(args: list[str]) -> None:
    if args and args[0] in ("-h", "--help"):
        _parse(Config(), ["--help"], prog="poise eval CHECKPOINT")
    if not args or args[0].startswith("-"):
        raise ConfigError("poise eval needs a checkpoint folder or a run folder first")
    from poise.jobs import eval_job
    from poise.train.checkpoint import latest_checkpoint

    folder = Path(args[0])
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: poise eval needs a checkpoint folder or a run folder")
    checkpoint = latest_checkpoint(folder) or folder
    if checkpoint == folder and (folder / "checkpoints").is_dir():
        raise ConfigError(f"{folder} is a run folder that holds no checkpoint yet")
    # A checkpoint of a run is evaluated on that run's task unless the command line says otherwise.
    run_config = checkpoint.parent.parent / "config.json"
    default = read_config(run_config) if checkpoint.parent.name == "checkpoints" and run_config.exists() else Config()
    # All held-out problems; and nothing is packed, so no length is too long for a micro-batch.
    settings = replace(default.run, eval_problems=0, tokens_per_microbatch=10**9)
    default = replace(default, run=settings, model=replace(default.model, path=str(checkpoint)))
    config = _parse(default, args[1:], prog=f"poise eval {folder}")
    for section in ("algorithm", "optimizer", "warm_start"):
        if getattr(config, section) != getattr(default, section):
            raise ConfigError(f"--{section.replace('_', '-')}.* does nothing in poise eval, which does not train")
    eval_job(config, Console())


def _plan(args: list[str]) -> int:
    """Exit code 1 where the run does not fit."""
    context, args = _take_option(args, "--context")
    memory, args = _take_option(args, "--gpu-memory")
    released, args = _take_option(args, "--released")
    counts: dict[str, int] = {}
    for option in ("--gpus", "--sequence-degree", "--expert-degree"):
        value, args = _take_option(args, option)
        counts[option] = 1 if value is None else _whole_number(option, value)
    default = _recipe(args)
    if context is not None:
        tokens = _whole_number("--context", context)
        settings = replace(default.run, tokens_per_microbatch=max(tokens, default.run.tokens_per_microbatch))
        default = replace(default, rollout=replace(default.rollout, max_context_tokens=tokens), run=settings)
    config = _parse(default, args[1:], prog=f"poise plan {args[0]}")
    from poise.planning import Machine, parse_bytes, plan_lines, planned_model

    machine = Machine(
        gpus=counts["--gpus"],
        memory=None if memory is None else parse_bytes(memory),
        sequence=counts["--sequence-degree"],
        expert=counts["--expert-degree"],
    )
    fits, lines = plan_lines(planned_model(config, released), config, machine)
    for line in lines:
        print(line)
    return 0 if fits else 1


def _whole_number(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} must be a whole number of at least 1, got {text!r}")
    return int(text)


def _recipe(args: Sequence[str]) -> Config:
    if not args:
        raise ConfigError(f"name a recipe: {', '.join(RECIPES)}")
    if args[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    if args[0] not in RECIPES:
        raise ConfigError(f"unknown recipe {args[0]}; known are {', '.join(RECIPES)}")
    return RECIPES[args[0]]()


def _print_recipes() -> None:
    for name, recipe in RECIPES.items():
        print(f"{name:18} {(recipe.__doc__ or '').splitlines()[0]}")


def _doctor() -> None:
    from poise.doctor import diagnose

    for title, rows in diagnose():
        print(f"\n{title}")
        for name, text in rows:
            print(f"  {name:14} {text}", flush=True)


def _take_option(args: list[str], name: str) -> tuple[str | None, list[str]]:
    for i, arg in enumerate(args):
        if arg.startswith(f"{name}="):
            return arg.split("=", 1)[1], args[:i] + args[i + 1 :]
        if arg == name:
            if i + 1 == len(args):
                raise ConfigError(f"{name} needs {'a run folder' if name == '--resume' else 'a value'}")
            return args[i + 1], args[:i] + args[i + 2 :]
    return None, args


def _parse(default: Config, args: Sequence[str], *, prog: str) -> Config:
    """The configuration with the command line's values. One that does not parse ends in tyro's message, exit code 2.

    Raises ConfigError for a key that is unknown, ambiguous, or would do nothing.
    """
    args = [full_key(arg) if arg.startswith("--") and arg != "--help" else arg for arg in args]
    config = tyro.cli(
        Config,
        default=default,
        args=args,
        prog=prog,
        description=USAGE.rsplit("\n\n", 1)[1],
        config=(tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed),
    )
    _refuse_idle_keys(config, [arg[2:].partition("=")[0] for arg in args if arg.startswith("--")])
    return config


def _refuse_idle_keys(config: Config, given: Sequence[str]) -> None:
    """A key that was typed and that nothing will read is a misunderstanding."""
    for key in given:
        section, _, name = key.partition(".")
        if section == "model" and config.model.path is not None and name not in ("path", "device", "dtype"):
            raise ConfigError(f"--{key} does nothing beside model.path: the checkpoint has a shape of its own")
        if key == "task.dataset" and config.task.name != "reasoning_gym":
            raise ConfigError(f"--{key} does nothing for task {config.task.name}; it belongs to task reasoning_gym")
        if key in ("task.data", "task.test-data") and config.task.name != "gsm8k":
            raise ConfigError(f"--{key} does nothing for task {config.task.name}; it belongs to task gsm8k")


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
    matches = [name for name in full if key in (name, name.split(".")[1]) or f"{key}.name" == name]
    if len(matches) > 1:
        raise ConfigError(f"--{key} is ambiguous: --{', --'.join(matches)}")
    if not matches:
        close = difflib.get_close_matches(key, [*full, *(name.split(".")[1] for name in full)], n=3)
        hint = f"; did you mean --{', --'.join(close)}?" if close else "; --help lists the keys"
        raise ConfigError(f"unknown key --{key}{hint}")
    return f"--{matches[0]}{equals}{value}"
