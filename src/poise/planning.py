"""``poise plan``: the memory of a run on GPUs that need not be there, as a table, with what fits and what to change."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poise.assembly import device_of, new_model_config
from poise.config import Config, ConfigError
from poise.harmony import byte_tokenizer
from poise.model import GptOssConfig
from poise.plan import (
    GIB,
    Mesh,
    Plan,
    advice,
    advice_with_gpus,
    free_bytes,
    largest_context,
    largest_microbatch,
    make_plan,
)

# Shapes that need no checkpoint folder.
RELEASED = {"20b": GptOssConfig(), "120b": GptOssConfig(num_layers=36, num_experts=128)}
RELEASED_FOLDERS = {f"gpt-oss-{size}": size for size in RELEASED}
UNITS = {"GB": 10**9, "GiB": GIB, "MB": 10**6, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs that a run is planned for; ``memory`` in bytes each, None: what is free on this machine's device."""

    gpus: int = 1
    memory: int | None = None
    sequence: int = 1
    expert: int = 1

    @property
    def mesh(self) -> Mesh:
        """Raises ConfigError where the degrees do not multiply to the GPUs."""
        shared = self.sequence * self.expert
        if self.gpus < 1 or shared < 1 or self.gpus % shared:
            raise ConfigError(
                f"--gpus ({self.gpus}) must be a multiple of the sequence degree ({self.sequence}) times the expert "
                f"degree ({self.expert})"
            )
        return Mesh(data=self.gpus // shared, sequence=self.sequence, expert=self.expert)


def parse_bytes(text: str) -> int:
    """``80GB``, ``79.2GiB``, ``512MiB``. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", text)
    if match is None:
        raise ConfigError(f"--gpu-memory must be a number with {', '.join(UNITS)}, such as 80GB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def planned_model(config: Config, released: str | None) -> GptOssConfig:
    """The shape to plan for: a released model's, that of ``model.path``'s config.json, or the recipe's new model.

    Raises ConfigError for an unknown one, and where ``released`` stands beside a ``model.path`` that nobody would read.
    """
    if released is not None:
        if released not in RELEASED:
            raise ConfigError(f"--released must be {' or '.join(RELEASED)}, got {released}")
        if config.model.path is not None:
            raise ConfigError("--released does nothing beside model.path: the checkpoint has a shape of its own")
        return RELEASED[released]
    if config.model.path is None:
        return new_model_config(config.model, byte_tokenizer())
    path = Path(config.model.path) / "config.json"
    if not path.is_file() and Path(config.model.path).name in RELEASED_FOLDERS:
        return RELEASED[RELEASED_FOLDERS[Path(config.model.path).name]]  # a recipe's, planned before it is downloaded
    if not path.is_file():
        raise ConfigError(f"model.path {config.model.path} has no config.json: not a checkpoint folder")
    try:
        return GptOssConfig.from_hf_dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ConfigError(f"model.path {config.model.path}: {error}") from error


def plan_lines(model_config: GptOssConfig, config: Config, machine: Machine) -> tuple[bool, Iterator[str]]:
    """(whether the run fits, the lines to print)."""
    mesh = machine.mesh
    limit = free_bytes(device_of(config.model.device)) if machine.memory is None else machine.memory
    plan = make_plan(model_config, config, mesh=mesh)
    return plan.peak <= limit, _lines(model_config, config, mesh, plan, limit)


def _lines(model_config: GptOssConfig, config: Config, mesh: Mesh, plan: Plan, limit: int) -> Iterator[str]:
    yield (
        f"context {config.rollout.max_context_tokens}, micro-batches of {config.run.tokens_per_microbatch} tokens, "
        f"recompute {config.run.recompute}, {config.rollout.num_slots} engine slots, {config.model.dtype}"
    )
    yield f"GiB per rank, data {mesh.data} x sequence {mesh.sequence} x expert {mesh.expert}"
    if mesh.num_ranks > 1:
        yield "(several ranks: float32 shards, gathered block by block; computed from shapes, not measured)"
    yield ""
    yield from table(plan)
    yield ""
    verdict = "fits" if plan.peak <= limit else "DOES NOT FIT"
    yield f"{verdict}: {plan.peak / GIB:.2f} GiB at the peak, in {plan.peak_phase}, of {limit / GIB:.2f} GiB"
    context = largest_context(model_config, config, limit, mesh=mesh)
    tokens = largest_microbatch(model_config, config, limit, mesh=mesh)
    yield f"largest context, a micro-batch of one episode: {context or 'none fits'}"
    yield f"largest micro-batch at this context: {tokens or 'not even one episode fits'}"
    if plan.peak > limit:
        yield "what would fit, each line on its own:"
        changes = advice(model_config, config, limit, mesh=mesh)
        for name, changed in changes:
            yield f"  {changed.peak / GIB:8.2f} GiB  {name}"
        if (more := advice_with_gpus(model_config, config, limit, mesh=mesh)) is not None:
            names, ranks, changed = more
            yield f"  {changed.peak / GIB:8.2f} GiB  --gpus {ranks.num_ranks}{', ' if names else ''}{names}"
        elif not changes:
            yield "  nothing: take a smaller model"


def table(plan: Plan) -> Iterator[str]:
    """A row for each kind, a column for each phase, in GiB."""
    names = list(dict.fromkeys(name for items in plan.phases.values() for name in items))
    yield f"{'':24}" + "".join(f"{phase:>12}" for phase in plan.phases)
    for name in names:
        yield f"{name:24}" + "".join(f"{items.get(name, 0) / GIB:12.3f}" for items in plan.phases.values())
    yield f"{'peak':24}" + "".join(f"{sum(items.values()) / GIB:12.3f}" for items in plan.phases.values())
