"""Whether a run can fit, before it starts: a lower bound on its memory."""

import os
from pathlib import Path

import torch

from poise.config import Config, ConfigError
from poise.model import GptOss, GptOssConfig

GIB = 2**30


def estimate_bytes(model_config: GptOssConfig, config: Config, *, trains: bool) -> dict[str, int]:
    """Bytes of what is certain: parameters and the engine's cache; to train, gradients, AdamW's moments, the reference.

    Activations come on top, so a run that is refused here cannot fit, while one that is not refused still may fail.
    """
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in GptOss(model_config).parameters())
    width = 2 if config.model.dtype == "bfloat16" else 4
    context = config.rollout.max_context_tokens
    rows = sum(context if window is None else min(window, context) for window in model_config.windows)
    channels = 2 * model_config.num_kv_heads * model_config.head_dim
    items = {
        "parameters": num_parameters * width,
        "engine cache": config.rollout.num_slots * rows * channels * width,
    }
    if trains:
        items |= {"gradients": num_parameters * width, "optimizer": 2 * num_parameters * width}
        if config.algorithm.kl_weight > 0:
            items["reference"] = num_parameters * width
    return items


def require_memory(model_config: GptOssConfig, config: Config, device: torch.device, *, trains: bool) -> None:
    """Raises ConfigError, with the largest items, where the estimate exceeds what the device has free."""
    items = estimate_bytes(model_config, config, trains=trains)
    free = free_bytes(device)
    if sum(items.values()) > free:
        listed = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in sorted(items.items(), key=lambda i: -i[1]) if size
        )
        raise ConfigError(
            f"the run needs at least {sum(items.values()) / GIB:.1f} GiB ({listed}), but {device} has "
            f"{free / GIB:.1f} GiB free: lower rollout.num_slots or rollout.max_context_tokens, or take a smaller model"
        )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
