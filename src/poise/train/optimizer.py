"""AdamW and its learning rates: what the policy and a critic are updated with alike."""

import math
from collections.abc import Callable

import torch
from torch import nn

from poise.config import OptimizerConfig, RunError, WarmStartConfig
from poise.parallel import ALONE, Mesh, clip_gradient

Schedule = Callable[[int], float]
"""Steps done -> learning rate of the next step."""


class GradientError(RunError):
    """The gradient is not finite: a step along it would destroy the weights."""


def warmup_schedule(config: OptimizerConfig, *, learning_rate: float | None = None) -> Schedule:
    """Linear over ``warmup_steps`` steps, the first at 1 / warmup_steps of the peak; constant from then on.

    ``learning_rate``: another peak than that of ``config``.
    """
    peak = config.learning_rate if learning_rate is None else learning_rate
    return lambda step: peak * min(1.0, (step + 1) / max(1, config.warmup_steps))


def warm_start_schedule(config: WarmStartConfig) -> Schedule:
    """Linear over ``warmup_steps``, then along a cosine to a tenth of the peak, which the last step reaches."""

    def learning_rate(step: int) -> float:
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        # The step that ends the warm-up already ran at the peak; without one, step 0 does.
        peak = max(0, config.warmup_steps - 1)
        progress = min(1.0, (step - peak) / max(1, config.steps - 1 - peak))
        return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))

    return learning_rate


def adamw(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), fused where torch has it.

    Norms, biases and sinks do not decay. The number of steps done rides in the groups, so that it is saved and restored
    with the moments it belongs to; ``update`` counts it and sets the learning rate.
    """
    decays: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_exempt = "norm" in name or name.endswith(("bias", "sinks"))
        (exempt if is_exempt else decays).append(parameter)
    groups = [
        {"params": decays, "weight_decay": config.weight_decay, "steps_done": 0},
        {"params": exempt, "weight_decay": 0.0, "steps_done": 0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def steps_done(optimizer: torch.optim.Optimizer) -> int:
    """Of an optimizer made by ``adamw``."""
    return int(optimizer.param_groups[0]["steps_done"])


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    *,
    max_grad_norm: float,
    owner: str = "step",
    mesh: Mesh = ALONE,
) -> tuple[float, float]:
    """Clip, step, forget the gradient; returns (gradient norm before clipping, learning rate).

    Raises GradientError, leaving the weights alone, for a norm that is not finite; ``owner`` begins its sentence.
    ``mesh``: the ranks that ``model`` is split over, all of which must call this.
    """
    learning_rate = schedule(steps_done(optimizer))
    norm = clip_gradient(model, max_grad_norm, mesh)
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise GradientError(
            f"{owner} {steps_done(optimizer)}: the gradient norm is {norm}; the weights were left alone"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["steps_done"] += 1
    optimizer.step()
    optimizer.zero_grad()
    return norm, learning_rate
