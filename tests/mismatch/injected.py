"""A tiny policy in which everything matters, and engines that sample from a damaged copy of it."""

import asyncio
import copy
from dataclasses import replace

import numpy as np
import torch

from poise.engine import EmbeddedEngine
from poise.harmony import byte_tokenizer
from poise.mismatch.ablations import ablations
from poise.mismatch.diagnosis import Diagnosis, diagnose
from poise.mismatch.forward import Forward, batches_of, log_probs
from poise.mismatch.rounding import jittered
from poise.model import GptOss, GptOssConfig, RopeConfig
from poise.types import Stop, Trajectory, Turn

TOKENIZER = byte_tokenizer()


def make_model(seed: int = 0) -> GptOss:
    """Sinks about as large as the scores, router biases, expert rows beyond the clamp, YaRN within a short context."""
    config = GptOssConfig(
        vocab_size=TOKENIZER.vocab_size, hidden_size=64, intermediate_size=32, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, num_experts=6, experts_per_token=2, sliding_window=8,
        rope=RopeConfig(theta=1000.0, original_context=64, factor=8.0),
    )  # fmt: skip
    model = GptOss(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(1 + noise)
            elif name.endswith("router.bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * noise)
            elif name.endswith("router.weight"):
                parameter.copy_(0.1 * noise)
            elif name.endswith("lm_head.weight"):
                parameter.copy_(0.3 * noise)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(2)
            elif name.endswith("gate_up_proj"):
                parameter.mul_(3)
    return model


def moved(model: GptOss, share: float, seed: int) -> GptOss:
    """The weights some updates earlier."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + share * torch.randn(parameter.shape, generator=generator))
    return other


def damaged(model: GptOss, damage, **config) -> GptOss:
    """A copy with other fields in its config, and ``damage(layer, block)`` done to each block."""
    other = GptOss(replace(model.config, **config))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer, block in enumerate(other.model.layers):
            damage(layer, block)
    return other


def sample(
    model: GptOss, *, temperature: float = 1.0, num: int = 4, length: int = 48, prepare=lambda model: None
) -> list[Trajectory]:
    """Streams that an engine on ``model`` samples, each from a prompt of ten bytes.

    ``prepare`` changes the model behind the finished engine's back.
    """
    engine = EmbeddedEngine(
        model, stop_ids=(), return_id=-1, num_slots=num, max_context_tokens=10 + length, temperature=temperature
    )
    prepare(model)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 250, size=10).tolist() for _ in range(num)]

    async def one(index: int) -> Trajectory:
        action = await engine(prompts[index], episode_id=str(index), seed=index, max_tokens=length)
        routes = np.concatenate([np.full_like(action.routes[:1], -1), action.routes])
        turn = Turn(
            observation_ids=tuple(prompts[index]),
            action_ids=action.token_ids,
            rollout_log_probs=action.log_probs,
            routes=routes,
        )
        return Trajectory(group_id=0, episode_id=str(index), turns=(turn,), reward=0.0, stop=Stop.DONE)

    async def together() -> list[Trajectory]:
        return list(await asyncio.gather(*(one(index) for index in range(num))))

    return asyncio.run(together())


def diagnosed(
    trainer: GptOss,
    engine: GptOss,
    *,
    previous: GptOss | None = None,
    temperature: float = 1.0,
    engine_temperature: float | None = None,
    prepare=lambda model: None,
) -> Diagnosis:
    streams = sample(
        engine, temperature=temperature if engine_temperature is None else engine_temperature, prepare=prepare
    )
    batches = batches_of(streams)
    said = np.array([value for stream in streams for turn in stream.turns for value in turn.rollout_log_probs])
    forward = Forward(model=trainer, temperature=temperature)
    base = log_probs(forward, batches)
    rounding = max(
        float(np.sqrt(np.square(log_probs(jittered(forward, seed=s), batches) - base).mean())) for s in (0, 1)
    )
    return diagnose(
        forward, ablations(forward, previous), said, lambda changed: log_probs(changed, batches), rounding=rounding
    )
