"""Puts the parts of a command together: policy, tokenizer, engine, task."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from poise.config import Config, ConfigError, ModelConfig
from poise.console import Console
from poise.engine import EmbeddedEngine
from poise.envs import make_task
from poise.envs.env import Task
from poise.harmony import HarmonyTokenizer, Renderer, byte_tokenizer
from poise.model import GptOss, GptOssConfig, RopeConfig, load_model
from poise.plan import GIB, require_memory
from poise.rollout import Limits
from poise.sandbox import protection
from poise.seeding import derive_seed

WEIGHTS_STREAM = 2  # part of a seed: keeps the weights' numbers apart from sampling's


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every command is made of."""

    model: GptOss
    tokenizer: HarmonyTokenizer
    renderer: Renderer
    engine: EmbeddedEngine
    task: Task
    limits: Limits


def assemble(config: Config, console: Console, *, trains: bool = True) -> Parts:
    """Loads or makes the policy, checks that the run can fit, and says what protects the machine from the policy."""
    device = device_of(config.model.device)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    task = make_task(config.task)
    if config.model.path is None:
        tokenizer = byte_tokenizer()
        model_config = new_model_config(config.model, tokenizer)
        plan = require_memory(model_config, config, device, trains=trains)
        model = GptOss(model_config)
        model.init_weights(derive_seed(config.run.seed, WEIGHTS_STREAM))
        model = model.to(device=device, dtype=dtype)
    else:
        folder = Path(config.model.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {folder} has no config.json: not a checkpoint folder")
        try:
            model_config = GptOssConfig.from_hf_dict(json.loads((folder / "config.json").read_text()))
            plan = require_memory(model_config, config, device, trains=trains)
            tokenizer = HarmonyTokenizer.load(folder)
            model = load_model(folder, dtype=dtype, device=device)
        except ValueError as error:  # no JSON, an unknown field, a missing tensor: the message says which
            raise ConfigError(f"model.path {folder}: {error}") from error
    if config.rollout.max_context_tokens > model_config.max_context:
        raise ConfigError(
            f"rollout.max_context_tokens ({config.rollout.max_context_tokens}) exceeds the {model_config.max_context} "
            f"positions of the model"
        )
    renderer = Renderer(tokenizer)
    engine = EmbeddedEngine(
        model,
        stop_ids=renderer.stop_ids,
        return_id=tokenizer.return_,
        num_slots=config.rollout.num_slots,
        max_context_tokens=config.rollout.max_context_tokens,
        max_prefill_tokens=config.rollout.max_prefill_tokens,
        temperature=config.rollout.temperature,
    )
    console.line(f"policy: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype} on {device}")
    console.line(f"memory: up to {plan.peak / GIB:.2f} GiB, in {plan.peak_phase}; poise plan shows of what")
    console.line(f"sandbox: {protection()}")
    return Parts(
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        task=task,
        limits=Limits.from_config(config.rollout),
    )


def device_of(name: str) -> torch.device:
    """Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f'model.device must be "auto", "cpu", "cuda" or "cuda:N", got {name!r}')
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def new_model_config(config: ModelConfig, tokenizer: HarmonyTokenizer) -> GptOssConfig:
    """A small GPT-OSS: what ``ModelConfig`` does not say is as in the released models."""
    return GptOssConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        sliding_window=config.sliding_window,
        rope=RopeConfig(kind=config.rope, theta=config.rope_theta),
        eos_token_ids=tuple(sorted(tokenizer.stop_ids)),
        pad_token_id=tokenizer.pad,
    )
