"""Whether a run fits, how far it could be stretched, and what to change when it does not."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from poise.config import Config, ConfigError
from poise.model import GptOssConfig
from poise.plan.sizes import make_plan
from poise.plan.tables import GIB, Mesh, Plan


def require_memory(
    model_config: GptOssConfig, config: Config, device: torch.device, *, trains: bool, mesh: Mesh | None = None
) -> Plan:
    """The plan; raises ConfigError, with the largest items and what helps, where the device has less than its peak."""
    plan = make_plan(model_config, config, mesh=mesh, trains=trains)
    free = free_bytes(device)
    if plan.peak > free:
        items = sorted(plan.phases[plan.peak_phase].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in items[:5])
        fitting = [name for name, _ in advice(model_config, config, free, mesh=mesh, trains=trains)]
        help_ = f"what fits: {', or '.join(fitting)}" if fitting else "take a smaller model or a shorter context"
        raise ConfigError(
            f"the run needs {plan.peak / GIB:.1f} GiB in {plan.peak_phase} ({listed}), but {device} has "
            f"{free / GIB:.1f} GiB free; {help_}"
        )
    return plan


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


Change = tuple[str, dict[str, dict[str, object]]]
"""A change of the configuration as it is typed, and as sections of fields."""


def advice(
    model_config: GptOssConfig, config: Config, limit: int, *, mesh: Mesh | None = None, trains: bool = True
) -> list[tuple[str, Plan]]:
    """Single changes of the configuration under which the peak stays within ``limit`` bytes, the gentlest first.

    Where none is enough: all that is needed of them together, as one.
    """
    changes = _changes(config, trains=trains, is_alone=mesh is None or mesh.num_ranks == 1)
    fitting: list[tuple[str, Plan]] = []
    for name, sections in changes:
        key = name.rsplit(" ", 1)[0]
        if key != "run.recompute" and any(other.startswith(key) for other, _ in fitting):
            continue  # a gentler change of the same key is enough
        plan = make_plan(model_config, changed_config(config, sections), mesh=mesh, trains=trains)
        if plan.peak <= limit:
            fitting.append((name, plan))
    if fitting:
        return fitting
    together: dict[str, str] = {}
    for name, sections in changes:
        config = changed_config(config, sections)
        together[name.rsplit(" ", 1)[0]] = name
        plan = make_plan(model_config, config, mesh=mesh, trains=trains)
        if plan.peak <= limit:
            return [(", ".join(together.values()), plan)]
    return []


def _changes(config: Config, *, trains: bool, is_alone: bool) -> list[Change]:
    """The gentlest first; a later change of a key goes further."""
    rollout, run = config.rollout, config.run
    changes: list[Change] = []
    if trains:
        for divisor in (2, 4, 8):
            if (tokens := run.tokens_per_microbatch // divisor) >= rollout.max_context_tokens:
                changes.append((f"run.tokens_per_microbatch {tokens}", {"run": {"tokens_per_microbatch": tokens}}))
        strength = ("none", "experts", "around_attention", "block")
        for how in strength[strength.index(run.recompute) + 1 :]:
            changes.append((f"run.recompute {how}", {"run": {"recompute": how}}))
        if is_alone and config.algorithm.kl_weight > 0 and config.algorithm.reference_experts == "plain":
            changes.append(("algorithm.reference_experts mxfp4", {"algorithm": {"reference_experts": "mxfp4"}}))
    for divisor in (2, 4, 8):
        if slots := rollout.num_slots // divisor:
            changes.append((f"rollout.num_slots {slots}", {"rollout": {"num_slots": slots}}))
    if config.model.dtype == "float32":
        changes.append(("model.dtype bfloat16", {"model": {"dtype": "bfloat16"}}))
    for divisor in (2, 4, 8):
        context = rollout.max_context_tokens // divisor
        if context >= _shortest_context(config):
            changes.append((f"rollout.max_context_tokens {context}", {"rollout": {"max_context_tokens": context}}))
    return changes


def advice_with_gpus(
    model_config: GptOssConfig, config: Config, limit: int, *, mesh: Mesh | None = None
) -> tuple[str, Mesh, Plan] | None:
    """The fewest changes, gentlest first, with which more ranks are enough: as they are typed, the ranks, the plan.

    Ranks are added to the data degree, which doubles; None where 1024 are not enough either.
    """
    typed: dict[str, str] = {}
    for name, sections in [("", {}), *_changes(config, trains=True, is_alone=False)]:
        config = changed_config(config, sections)
        if name:
            typed[name.rsplit(" ", 1)[0]] = name
        ranks = mesh or Mesh()
        while 2 * ranks.num_ranks <= 1024:
            ranks = replace(ranks, data=2 * ranks.data)
            plan = make_plan(model_config, config, mesh=ranks)
            if plan.peak <= limit:
                return ", ".join(typed.values()), ranks, plan
    return None


def changed_config(config: Config, sections: Mapping[str, Mapping[str, object]]) -> Config:
    """``config`` with some fields of some sections replaced."""
    changes: dict[str, Any] = {name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return replace(config, **changes)


def largest_context(model_config: GptOssConfig, config: Config, limit: int, *, mesh: Mesh | None = None) -> int | None:
    """The longest context whose run fits, with micro-batches of one episode; None where none does."""

    def fits(context: int) -> bool:
        sections = {"rollout": {"max_context_tokens": context}, "run": {"tokens_per_microbatch": context}}
        return make_plan(model_config, changed_config(config, sections), mesh=mesh).peak <= limit

    return _largest(fits, _shortest_context(config), model_config.max_context)


def _shortest_context(config: Config) -> int:
    """That the configuration accepts."""
    return max(config.rollout.max_action_tokens + 1, config.model.sliding_window)


def largest_microbatch(
    model_config: GptOssConfig, config: Config, limit: int, *, mesh: Mesh | None = None
) -> int | None:
    """The most tokens per micro-batch that fit at the context of ``config``; None where one episode does not."""

    def fits(tokens: int) -> bool:
        changed = changed_config(config, {"run": {"tokens_per_microbatch": tokens}})
        return make_plan(model_config, changed, mesh=mesh).peak <= limit

    episodes = max(
        config.rollout.groups_per_step * config.rollout.group_size, config.warm_start.demonstrations_per_step
    )
    context = config.rollout.max_context_tokens
    return _largest(fits, context, episodes * context)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest whole number of low..high that fits, where everything below one that fits does too."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
