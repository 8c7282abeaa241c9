"""The policy that is trained is the policy that acted: three steps of the loop on what the embedded engine sampled."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from wide import make_wide_model, play

from poise.config import AlgorithmConfig, Config, OptimizerConfig, RolloutConfig, RunConfig
from poise.engine import EmbeddedEngine
from poise.loop import Rollout, train
from poise.train.packing import pack
from poise.train.trainer import Trainer


def make_model(dtype):
    return make_wide_model().to(dtype)


def steps(model, *, packed=True, num_steps=3, **algorithm):
    """Of the whole loop, at learning rate 0, on fresh rollouts each; the bounds of the ratio are tight."""
    config = Config(
        rollout=RolloutConfig(max_context_tokens=64, max_action_tokens=12, num_slots=4),
        algorithm=AlgorithmConfig(clip_low=1e-4, clip_high=1e-4, max_mismatch=1.0, **algorithm),
        optimizer=OptimizerConfig(learning_rate=0.0),
        run=RunConfig(tokens_per_microbatch=500 if packed else 64),
    )
    trainer = Trainer(deepcopy(model), config)
    engine = EmbeddedEngine(trainer.model, stop_ids={1}, return_id=1, num_slots=4, max_context_tokens=64)
    seen = []

    def rollouts():
        for _ in range(num_steps):
            streams = [
                replace(t, group_id=number // 4, reward=float(number % 3))
                for number, t in enumerate(play(trainer.model))
            ]
            groups = [[[stream] for stream in streams[i : i + 4]] for i in range(0, 12, 4)]
            yield Rollout(groups=groups, seconds=1.0)

    train(
        trainer,
        None,
        engine,
        rollouts(),
        config,
        first_step=1,
        on_step=lambda step, metrics, rollout: seen.append(metrics),
    )
    return seen


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_at_learning_rate_0_the_ratio_is_exactly_1(dtype, packed):
    for metrics in steps(make_model(dtype), packed=packed):
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        assert metrics["clip_fraction"] == 0.0
        assert metrics["approx_kl"] == 0.0
        assert metrics["mismatch_k3"] < (1e-11 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
def test_a_separate_pass_shows_what_goes_wrong_without_this(dtype, other):
    for metrics in steps(make_model(dtype), recompute_old_log_probs=other):
        assert metrics["ratio_min"] < 0.999
        assert metrics["ratio_max"] > 1.001
        assert metrics["clip_fraction"] > 0.05
        assert metrics["approx_kl"] > 1e-7


def test_noise_in_the_forward_cannot_break_the_ratio_of_one_update():
    """Dropout, and a router that rolls dice: whatever the forward was, it is the one that is differentiated."""
    model = make_model(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, args, out: torch.nn.functional.dropout(out, 0.2, training=True)
        )
        layer.mlp.router.register_forward_hook(
            lambda module, args, out: out + torch.randn(out.shape, generator=generator)
        )
    trajectories = play(make_model(torch.float32))
    batches = pack(trajectories, torch.linspace(-1, 1, len(trajectories)), tokens_per_microbatch=150)
    trainer = Trainer(model, Config(algorithm=AlgorithmConfig()))
    for mode in (model.train, model.eval):
        mode()
        metrics = trainer.step(batches)
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        assert metrics["approx_kl"] == metrics["clip_fraction"] == 0.0
    # The noise is there: a second pass is another policy.
    assert trainer.step(trainer.with_old_log_probs(batches))["approx_kl"] > 1e-3
