"""Puts the parts of a command together: policy, tokenizer, engine, task."""

import json
import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from poise.config import Config, ConfigError, ModelConfig
from poise.console import Console
from poise.engine import EmbeddedEngine, GatheredEngine
from poise.envs import make_task, takes_sandbox
from poise.envs.env import Task
from poise.harmony import HarmonyTokenizer, Renderer, byte_tokenizer
from poise.model import GptOss, GptOssConfig, RopeConfig, load_model
from poise.parallel import ALONE, Mesh, empty_model, full_tensors, held_part, init_parts, peak_host_bytes
from poise.plan import GIB, require_memory
from poise.plan import Mesh as plan_mesh
from poise.rollout import Limits
from poise.sandbox import Sandbox, SandboxError, describe
from poise.seeding import derive_seed
from poise.servers import connect
from poise.train.checkpoint import load_weights
from poise.train.remote import RemoteEngine
from poise.train.sharded import is_sharded

WEIGHTS_STREAM = 2  # part of a seed: keeps the weights' numbers apart from sampling's


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What every command is made of. On a mesh each rank has an engine; an embedded one holds a whole copy of the
    policy's weights."""

    model: GptOss
    tokenizer: HarmonyTokenizer
    renderer: Renderer
    engine: EmbeddedEngine | RemoteEngine
    task: Task
    limits: Limits
    walls: dict[str, Any]
    """What keeps model-written code in."""
    mesh: Mesh = ALONE


def assemble(config: Config, console: Console, *, trains: bool = True, mesh: Mesh = ALONE) -> Parts:
    """Loads or makes the policy, checks that the run can fit, and says what protects the machine from the policy."""
    task = make_task(config.task, config.sandbox)
    walls = sandbox_walls(config)
    if mesh.num_ranks > 1 and config.rollout.max_staleness > 0:
        if config.engine.kind == "embedded":
            raise ConfigError(
                "rollout.max_staleness on several ranks needs servers (engine.kind); the embedded engine samples ahead "
                f"of one process only, not of {mesh.num_ranks}"
            )
        if config.algorithm.max_resamples > 0:
            raise ConfigError(
                f"algorithm.max_resamples with rollout.max_staleness needs a trainer of one process, not "
                f"{mesh.num_ranks}: groups of several ranks are compared when a step is trained"
            )
    model, tokenizer = load_policy(config, console, trains=trains, mesh=mesh)
    renderer = Renderer(tokenizer)
    engine: EmbeddedEngine | RemoteEngine
    if config.engine.kind == "embedded":
        engine = embedded_engine(model, tokenizer, config, mesh)
    else:
        engine = connect(model, tokenizer, config, console, mesh)
        console.line(f"engine: {config.engine.kind} at {', '.join(config.engine.urls)}")
    console.line(f"sandbox: {walls['protection']}")
    return Parts(
        model=model,
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engine,
        task=task,
        limits=Limits.from_config(config.rollout),
        mesh=mesh,
        walls=walls,
    )


def sandbox_walls(config: Config) -> dict[str, Any]:
    """What keeps the policy's code from the rest of the machine, with one line for people under "protection".

    Raises ConfigError where the task runs code and nothing does.
    """
    if not takes_sandbox(config.task):
        if config.task.name == "custom":
            return {"protection": "as task.factory decides"}
        return {"protection": f"not used: task {config.task.name} runs no code"}
    try:
        walls = Sandbox.from_config(config.sandbox).walls()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    return {"protection": describe(walls), **walls}


def load_policy(
    config: Config, console: Console, *, trains: bool, mesh: Mesh = ALONE
) -> tuple[GptOss, HarmonyTokenizer]:
    """The checkpoint at ``model.path``, or a new model with a byte tokenizer; ConfigError for what cannot fit."""
    device, dtype = mesh.device or device_of(config.model.device), compute_type(config.model)
    degrees = plan_mesh(data=mesh.data, sequence=mesh.sequence, expert=mesh.expert)
    if config.model.path is None:
        tokenizer = byte_tokenizer()
        model_config = new_model_config(config.model, tokenizer)
        plan = require_memory(model_config, config, device, trains=trains, mesh=degrees)
        model = new_policy(model_config, derive_seed(config.run.seed, WEIGHTS_STREAM), device, dtype, mesh)
    else:
        folder = Path(config.model.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {folder} has no config.json: not a checkpoint folder")
        try:
            model_config = GptOssConfig.from_hf_dict(json.loads((folder / "config.json").read_text()))
            plan = require_memory(model_config, config, device, trains=trains, mesh=degrees)
            tokenizer = HarmonyTokenizer.load(folder)
            model = stored_policy(folder, model_config, device, dtype, mesh)
        except ValueError as error:  # no JSON, an unknown field, a missing tensor: the message says which
            raise ConfigError(f"model.path {folder}: {error}") from error
    if config.rollout.max_context_tokens > model_config.max_context:
        raise ConfigError(
            f"rollout.max_context_tokens ({config.rollout.max_context_tokens}) exceeds the {model_config.max_context} "
            f"positions of the model"
        )
    num_parameters = sum(math.prod(held_part(name, p, mesh).shape) for name, p in model.named_parameters())
    console.line(f"policy: {num_parameters:,} parameters, {dtype} on {device}")
    if mesh.shards is not None:
        console.line(
            f"mesh: data {mesh.data} x sequence {mesh.sequence} x expert {mesh.expert}; host memory of rank 0 after "
            f"loading: {peak_host_bytes() / GIB:.2f} GiB at the peak"
        )
    console.line(f"memory: up to {plan.peak / GIB:.2f} GiB, in {plan.peak_phase}; poise plan shows of what")
    return model, tokenizer


def new_policy(config: GptOssConfig, seed: int, device: torch.device, dtype: torch.dtype, mesh: Mesh) -> GptOss:
    """Random weights: the same numbers on every mesh."""
    if mesh.shards is None:
        return GptOss(config).init_weights(seed).to(device=device, dtype=dtype)
    model = empty_model(config, mesh)
    init_parts(model, seed, mesh)
    return model


def stored_policy(folder: Path, config: GptOssConfig, device: torch.device, dtype: torch.dtype, mesh: Mesh) -> GptOss:
    """The policy in a Hugging Face folder, or in a checkpoint of a mesh."""
    if mesh.shards is None and not is_sharded(folder):
        return load_model(folder, dtype=dtype, device=device)
    if mesh.shards is None:
        with torch.device("meta"):
            model = GptOss(config).to(dtype)
        model = model.to_empty(device=device)
    else:
        model = empty_model(config, mesh)
    load_weights(folder, model=model, mesh=mesh)
    return model


def embedded_engine(model: GptOss, tokenizer: HarmonyTokenizer, config: Config, mesh: Mesh = ALONE) -> EmbeddedEngine:
    """On the model's own parameters, or on a mesh on a whole copy, which ``new_policy_version`` fills."""
    options: dict[str, Any] = {
        "stop_ids": tokenizer.stop_ids,
        "return_id": tokenizer.return_,
        "num_slots": config.rollout.num_slots,
        "max_context_tokens": config.rollout.max_context_tokens,
        "max_prefill_tokens": config.rollout.max_prefill_tokens,
        "temperature": config.rollout.temperature,
    }
    dtype = compute_type(config.model)
    if mesh.shards is None and config.rollout.max_staleness > 0:
        # Sampling goes on while the trainer moves its own weights.
        copy = deepcopy(model).requires_grad_(False)
        return GatheredEngine(copy, model.named_parameters, **options)
    if mesh.shards is None:
        return EmbeddedEngine(model, **options)
    with torch.device("meta"):
        copy = GptOss(model.config).to(dtype)
    copy = copy.to_empty(device=mesh.device).requires_grad_(False)
    return GatheredEngine(copy, lambda: full_tensors(model, mesh, dtype), **options)


def compute_type(config: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


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
