"""The commands: each takes the words after its name. torch is imported late: not for --help and for refused keys."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from poise.cli.keys import KEYS_HELP, for_task_of, parse, take_option
from poise.config import Config, ConfigError, EngineConfig, ParallelConfig
from poise.console import Console
from poise.recipes import RECIPES
from poise.recipes.shrink import shrunk
from poise.runfolder import read_config

USAGE = """\
poise: agentic reinforcement learning for GPT-OSS

  poise train RECIPE [--key value ...]        warm start, then reinforcement learning
       [--shrink]                             the same recipe with a tiny policy, to see that it runs
  poise train --resume RUN [--key value ...]  go on from a run folder's latest checkpoint
  poise sft RECIPE [--key value ...]          the supervised warm start alone
  poise eval CHECKPOINT [--key value ...]     held-out reward of a checkpoint folder, or of a run's latest checkpoint
       [--trajectories FILE.jsonl]            and its episodes
  poise mismatch CHECKPOINT --engine embedded|URL [--key value ...]    trainer beside engine: how far apart, and why
       [--episodes N | --tokens FILE.jsonl] [--engine-checkpoint DIR] [--previous DIR] [--json FILE]
  poise serve CHECKPOINT [--key value ...]    its policy behind vLLM's token endpoints
       [--host 127.0.0.1] [--port 8000]
  poise export CHECKPOINT FOLDER              a checkpoint of any mesh as a Hugging Face folder
       [--format bf16|fp32|mxfp4]
  poise plan RECIPE [--key value ...]         its memory, by kind and phase: does it fit, and what would
       [--gpus N] [--gpu-memory 80GB] [--context TOKENS] [--released 20b|120b]
  poise upcycle SOURCE OUT                    a Llama-type checkpoint (Hugging Face folder or .gguf) as a GPT-OSS one
       [--experts E] [--active A] [--noise SHARE] [--specials add|reserved] [--format fp32|bf16|mxfp4] [--seed N]
  poise recipes                               the recipes, a line each
  poise doctor                                versions, devices, attention kernels, sandbox, extras of this machine
"""


def train(args: list[str]) -> None:
    resume, args = take_option(args, "--resume")
    shrinks, args = "--shrink" in args, [arg for arg in args if arg != "--shrink"]
    if resume is None:
        recipe = _recipe(args)
        config = parse(shrunk(recipe) if shrinks else recipe, args[1:], prog=f"poise train {args[0]}")
    else:
        if shrinks:
            raise ConfigError("--shrink does nothing with --resume: the run's config.json says how large it is")
        if args and not args[0].startswith("-"):
            args = args[1:]  # the recipe of a resumed run is what its config.json says
        before = read_config(Path(resume) / "config.json")
        config = parse(before, args, prog="poise train --resume RUN")
        _require_resumable(before, config)
    from poise.jobs import train_job  # torch is not imported for --help and for refused keys

    train_job(config, Console(), resume=None if resume is None else Path(resume))


def _require_resumable(before: Config, config: Config) -> None:
    """Refuses changes that would silently do nothing, or would make the rest of the run another run."""
    free = {"run.steps", "run.save_every", "run.eval_every", "run.eval_problems", "run.log_trajectories_every"}
    free |= {"run.trackers", "optimizer.learning_rate", "optimizer.max_grad_norm", "algorithm.clip_low"}
    free |= {f"parallel.{field.name}" for field in dataclasses.fields(ParallelConfig)}
    free |= {"algorithm.clip_high", "algorithm.entropy_weight", "critic.learning_rate", "model.device", "run.recompute"}
    free |= {f"engine.{field.name}" for field in dataclasses.fields(Config().engine)}
    for section in dataclasses.fields(Config):
        old, new = getattr(before, section.name), getattr(config, section.name)
        for field in dataclasses.fields(old):
            key = f"{section.name}.{field.name}"
            if getattr(old, field.name) != getattr(new, field.name) and key not in free:
                raise ConfigError(f"--resume cannot change {key}; it can change {', '.join(sorted(free))}")


def eval_(args: list[str]) -> None:
    given, args = take_option(args, "--trajectories")
    path = None if given is None else Path(given)
    if path is not None and path.exists():
        raise ConfigError(f"--trajectories {path} exists: nothing is overwritten")
    config = _checkpoint_config(args, "eval")
    from poise.jobs import eval_job

    eval_job(config, Console(), trajectories=path)


def mismatch(args: list[str]) -> None:
    given: dict[str, str | None] = {}
    for option in ("--engine", "--episodes", "--tokens", "--engine-checkpoint", "--previous", "--json"):
        given[option], args = take_option(args, option)
    config = _checkpoint_config(args, "mismatch")
    if config.engine != EngineConfig():
        raise ConfigError("--engine.* does nothing in poise mismatch: --engine URL names the server")
    if given["--engine"] is None:
        raise ConfigError("poise mismatch needs --engine embedded or --engine URL")
    if given["--episodes"] is not None and given["--tokens"] is not None:
        raise ConfigError("--episodes and --tokens exclude each other: streams are sampled or read")
    paths = {
        option: None if (value := given[option]) is None else Path(value)
        for option in ("--tokens", "--engine-checkpoint", "--previous", "--json")
    }
    from poise.mismatch.job import Options, mismatch_job

    options = Options(
        engine=given["--engine"],
        engine_checkpoint=paths["--engine-checkpoint"],
        episodes=_whole_number("--episodes", given["--episodes"] or "16"),
        tokens=paths["--tokens"],
        previous=paths["--previous"],
        json=paths["--json"],
    )
    mismatch_job(config, Console(), options)


def serve(args: list[str]) -> None:
    host, args = take_option(args, "--host")
    port, args = take_option(args, "--port")
    if port is not None and not (port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"--port must be a whole number from 0 to 65535, got {port!r}")
    reads = ("model.device", "model.dtype", "rollout.num_slots", "rollout.max_context_tokens")
    config = _checkpoint_config(args, "serve", reads=(*reads, "rollout.max_prefill_tokens"))
    from poise.serving import serve_job

    serve_job(config, Console(), host=host or "127.0.0.1", port=int(port or 8000))


def _checkpoint_folder(text: str, command: str) -> Path:
    """The folder itself, or the latest checkpoint of a run's folder."""
    from poise.train.checkpoint import latest_checkpoint

    folder = Path(text)
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: poise {command} needs a checkpoint folder or a run folder")
    checkpoint = latest_checkpoint(folder) or folder
    if checkpoint == folder and (folder / "checkpoints").is_dir():
        raise ConfigError(f"{folder} is a run folder that holds no checkpoint yet")
    return checkpoint


def _checkpoint_config(args: list[str], command: str, *, reads: Sequence[str] | None = None) -> Config:
    """What a command that does not train reads of a checkpoint: its run's configuration, and the command line's.

    ``reads``: the keys that the command takes; None: all but the sections of training.
    """
    if args and args[0] in ("-h", "--help"):
        parse(Config(), ["--help"], prog=f"poise {command} CHECKPOINT")
    if not args or args[0].startswith("-"):
        raise ConfigError(f"poise {command} needs a checkpoint folder or a run folder first")
    folder, checkpoint = Path(args[0]), _checkpoint_folder(args[0], command)
    # A checkpoint of a run goes with that run's task unless the command line says otherwise.
    run_config = checkpoint.parent.parent / "config.json"
    default = read_config(run_config) if checkpoint.parent.name == "checkpoints" and run_config.exists() else Config()
    # All held-out problems; and nothing is packed, so no length is too long for a micro-batch.
    settings = replace(default.run, eval_problems=0, tokens_per_microbatch=10**9)
    model = replace(default.model, path=str(checkpoint))
    # The servers that a run has sampled from may be gone.
    default = for_task_of(replace(default, run=settings, model=model, engine=EngineConfig()), args[1:])
    config = parse(default, args[1:], prog=f"poise {command} {folder}")
    for section in ("algorithm", "critic", "optimizer", "warm_start"):
        if getattr(config, section) != getattr(default, section):
            raise ConfigError(f"--{section.replace('_', '-')}.* does nothing in poise {command}, which does not train")
    for section_ in dataclasses.fields(Config):
        old, new = getattr(default, section_.name), getattr(config, section_.name)
        for field in dataclasses.fields(old):
            key = f"{section_.name}.{field.name}"
            if reads is not None and key not in reads and getattr(old, field.name) != getattr(new, field.name):
                raise ConfigError(f"--{key} does nothing in poise {command}; it reads {', '.join(reads)}")
    return config


def export(args: list[str]) -> None:
    format_, args = take_option(args, "--format")
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise ConfigError("poise export needs a checkpoint or run folder, then the new folder: CHECKPOINT FOLDER")
    from poise.exporting import export_job

    export_job(_checkpoint_folder(args[0], "export"), Path(args[1]), format_ or "bf16", Console())


PLAN_HELP = """\
Memory of the recipe's run by kind and phase, the largest context and micro-batch that fit, and what to change. Options:

  --gpus N              ranks, default what parallel.* multiplies to; what sequence and expert degree leave is data
  --gpu-memory 80GB     of each; default: what is free on this machine's device
  --context TOKENS      rollout.max_context_tokens; run.tokens_per_microbatch is raised to hold one episode
  --released 20b|120b   the shape of a released model instead of the recipe's or that of model.path

The exit code is 1 where the run does not fit.

"""


def plan(args: list[str]) -> int:
    """Exit code 1 where the run does not fit."""
    context, args = take_option(args, "--context")
    memory, args = take_option(args, "--gpu-memory")
    released, args = take_option(args, "--released")
    gpus, args = take_option(args, "--gpus")
    default = _recipe(args)
    if context is not None:
        tokens = _whole_number("--context", context)
        settings = replace(default.run, tokens_per_microbatch=max(tokens, default.run.tokens_per_microbatch))
        default = replace(default, rollout=replace(default.rollout, max_context_tokens=tokens), run=settings)
    config = parse(default, args[1:], prog=f"poise plan {args[0]}", about=PLAN_HELP)
    shape = {key for key, value in vars(config.model).items() if value != getattr(default.model, key)}
    if released is not None and (idle := sorted(shape - {"path", "dtype", "device"})):
        raise ConfigError(f"--model.{idle[0]} does nothing beside --released {released}, which has a shape of its own")
    from poise.planning import Machine, parse_bytes, plan_lines, planned_model

    parallel = config.parallel
    shared = parallel.sequence_degree * parallel.expert_degree
    machine = Machine(
        gpus=max(1, parallel.data_degree) * shared if gpus is None else _whole_number("--gpus", gpus),
        memory=None if memory is None else parse_bytes(memory),
        sequence=parallel.sequence_degree,
        expert=parallel.expert_degree,
    )
    if parallel.data_degree and machine.gpus != parallel.data_degree * shared:
        raise ConfigError(
            f"--gpus ({machine.gpus}) must be parallel.data_degree ({parallel.data_degree}) x {shared}, or leave it out"
        )
    fits, lines = plan_lines(planned_model(config, released), config, machine)
    for line in lines:
        print(line)
    return 0 if fits else 1


def _whole_number(option: str, text: str, *, at_least: int = 1) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{option} must be a whole number of at least {at_least}, got {text!r}")
    return int(text)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} must be a number, got {text!r}") from None


def _recipe(args: Sequence[str]) -> Config:
    if not args:
        raise ConfigError(f"name a recipe: {', '.join(RECIPES)}")
    if args[0] in ("-h", "--help"):
        print(f"{USAGE}\n{KEYS_HELP}")
        sys.exit(0)
    if args[0] not in RECIPES:
        raise ConfigError(f"unknown recipe {args[0]}; known are {', '.join(RECIPES)}")
    return RECIPES[args[0]]()


def recipes(args: list[str]) -> None:
    for name, recipe in RECIPES.items():
        print(f"{name:18} {(recipe.__doc__ or '').splitlines()[0]}")


def doctor(args: list[str]) -> None:
    from poise.doctor import diagnose

    for title, rows in diagnose():
        print(f"\n{title}")
        for name, text in rows:
            print(f"  {name:14} {text}", flush=True)


def sft(args: list[str]) -> None:
    config = parse(_recipe(args), args[1:], prog=f"poise sft {args[0]}")
    from poise.jobs import sft_job

    Console().line(f"checkpoint: {sft_job(config, Console())}")


def upcycle(args: list[str]) -> None:
    options = {
        "--experts": "1",
        "--active": "1",
        "--noise": "0",
        "--specials": "add",
        "--format": "fp32",
        "--seed": "0",
    }
    for option, default in options.items():
        value, args = take_option(args, option)
        options[option] = default if value is None else value
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise ConfigError(
            f"poise upcycle takes SOURCE, OUT and {', '.join(options)}; got {' '.join(args) or 'nothing'}"
        )
    source, out = map(Path, args)
    from poise.upcycle import Upcycling
    from poise.upcycle import upcycle as upcycled

    how = Upcycling(
        num_experts=_whole_number("--experts", options["--experts"]),
        experts_per_token=_whole_number("--active", options["--active"]),
        noise=_number("--noise", options["--noise"]),
        specials=options["--specials"],  # type: ignore[arg-type]  # refused there
        seed=_whole_number("--seed", options["--seed"], at_least=0),
    )
    if options["--format"] not in ("fp32", "bf16", "mxfp4"):
        raise ConfigError(f"--format must be fp32, bf16 or mxfp4, got {options['--format']}")
    model = upcycled(source, out, how, format=options["--format"])  # type: ignore[arg-type]
    Console().line(f"checkpoint: {out}, {sum(p.numel() for p in model.parameters()):,} parameters")


# What a command returns is the exit code; None is 0.
COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train,
    "sft": sft,
    "eval": eval_,
    "mismatch": mismatch,
    "serve": serve,
    "export": export,
    "plan": plan,
    "upcycle": upcycle,
    "recipes": recipes,
    "doctor": doctor,
}
