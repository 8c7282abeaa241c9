"""The options of the objective inside the optimizer step: each against autograd or by hand, the same for every cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from poise.config import AlgorithmConfig, Config, OptimizerConfig, RolloutConfig
from poise.model import top_k_route
from poise.train.packing import pack
from poise.train.replay import replay_route
from poise.train.trainer import CorrectionError, Trainer
from poise.types import Stop, Trajectory, Turn

BUDGET = 4096
ADVANTAGES = torch.linspace(-2, 1.5, 8)


def config(**algorithm):
    return Config(
        rollout=RolloutConfig(temperature=0.7),
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=1e9),
    )


def gradients_of(trainer, batches):
    seen = {}

    def look(optimizer, args, kwargs):
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    handle = trainer.optimizer.register_step_pre_hook(look)
    metrics = trainer.step(batches)
    handle.remove()
    return seen, {name: value for name, value in metrics.items() if name != "tokens_per_s"}


def assert_equal_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).norm() / gradient.norm()
        assert difference < relative, f"{name}: {difference}"


def with_noise(batch, scale):
    """Old and rollout log-probs off the policy's and each other's; for a token the same in every cut."""
    noise = ((batch.target_ids * 7 + batch.position_ids * 13) % 17 - 8) / 8 * scale
    policy = batch.old_log_probs
    return replace(batch, old_log_probs=policy + noise, rollout_log_probs=policy - noise)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"aggregation": "token", "loss": "dual_clip", "dual_clip": 1.1},
        {"aggregation": "sequence", "entropy_weight": 0.01, "kl_weight": 0.1},
        {"aggregation": "constant", "entropy_weight": 0.01, "kl_weight": 0.1},
        {"aggregation": "sequence", "loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        {"loss": "cispo", "clip_high": 0.1},
        {"aggregation": "sequence", "loss": "reinforce"},
        {"correction": "truncate", "correction_high": 1.1, "normalize_correction": True},
        {"correction": "mask", "correction_level": "sequence", "correction_low": 0.7, "aggregation": "sequence"},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_gradient_and_metrics_are_the_same_for_every_cut(make_model, make_trajectories, algorithm):
    trajectories = make_trajectories(num=8)
    silent = Trajectory(
        group_id=0,
        episode_id="silent",
        turns=(Turn(observation_ids=tuple(range(9)), action_ids=(), rollout_log_probs=()),),
        reward=0.0,
        stop=Stop.MAX_TOKENS,
    )

    def result(*parts):
        trainer = Trainer(make_model(), config(**algorithm))
        batches = []
        for part in parts:
            chosen = [silent if i is None else trajectories[i] for i in part]
            advantages = torch.tensor([9.0 if i is None else ADVANTAGES[i].item() for i in part])
            batches += pack(chosen, advantages, tokens_per_microbatch=BUDGET)
        batches = [with_noise(batch, 0.3) for batch in trainer.with_old_log_probs(batches)]
        if "kl_weight" in algorithm:
            batches = trainer.with_ref_log_probs(batches, make_model(seed=5))
        return gradients_of(trainer, batches)

    whole, whole_metrics = result(range(8))
    for cut in (
        (range(4), range(4, 8)),
        ([0, 1], [2, 3], [4, 5], [6, 7]),
        ([6], [1, 2, 3, 5, 7], [0, 4]),
        ([None, 0, 1, 2, None], [3, 4, 5, 6, 7], [None]),
    ):
        gradients, metrics = result(*cut)
        assert_equal_gradients(gradients, whole, 1e-5)
        for key, value in whole_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-12), key
    # The case is one in which bounds and weights do something.
    if "correction" in algorithm:
        assert 0 < whole_metrics["correction_limited"] < 1
    elif algorithm.get("loss", "reinforce") != "reinforce":
        assert 0 < whole_metrics["clip_fraction"] < 1


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_aggregation_is_the_mean_that_its_name_says(make_model, make_trajectories, aggregation):
    """Sequence by sequence: on-policy the loss of a token is -A log p, its value -A."""
    trainer = Trainer(make_model(), config(aggregation=aggregation))
    trajectories = make_trajectories(num=8)
    rows = []
    for trajectory, advantage in zip(trajectories, ADVANTAGES, strict=True):
        (batch,) = pack([trajectory], advantage[None], tokens_per_microbatch=BUDGET)
        rows.append(-advantage * trainer.log_probs(batch)[0][batch.response_mask])
    lengths = [len(row) for row in rows]
    if aggregation == "token":
        loss, value = (
            torch.cat(rows).mean(),
            sum(-a * n for a, n in zip(ADVANTAGES, lengths, strict=True)) / sum(lengths),
        )
    elif aggregation == "sequence":
        loss, value = torch.stack([row.mean() for row in rows]).mean(), -ADVANTAGES.mean()
    else:  # max_context_tokens is 512
        loss = torch.stack([row.sum() / 512 for row in rows]).mean()
        value = sum(-a * n / 512 for a, n in zip(ADVANTAGES, lengths, strict=True)) / 8
    names = [name for name, _ in trainer.model.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(loss, list(trainer.model.parameters())), strict=True))
    gradients, metrics = gradients_of(trainer, pack(trajectories, ADVANTAGES, tokens_per_microbatch=60))
    assert_equal_gradients(gradients, expected, 1e-4)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)


def engine_that_differs(trainer, batches, differences):
    """Batches whose engine disagreed by ``differences`` at the first response tokens of the first, else not at all."""
    batches = [replace(b, rollout_log_probs=b.old_log_probs) for b in trainer.with_old_log_probs(batches)]
    rollout_log_probs = batches[0].rollout_log_probs.clone()
    places = batches[0].response_mask.nonzero()[: len(differences), 0]
    rollout_log_probs[places] -= torch.tensor(differences)
    batches[0] = replace(batches[0], rollout_log_probs=rollout_log_probs)
    return [replace(batch, old_log_probs=None) for batch in batches], places


def test_rollout_correction_weighs_the_loss_and_leaves_the_ratio_at_one(make_model, make_trajectories):
    trainer = Trainer(make_model(), config(correction="truncate", correction_high=1.5))
    batches = pack(make_trajectories(), torch.linspace(-1, 2, 6), tokens_per_microbatch=BUDGET)
    (batch,), places = engine_that_differs(trainer, batches, [math.log(2.0), -math.log(4.0)])
    # Ratios trainer / engine: 2, truncated to 1.5, and 1/4; all others 1.
    weights = torch.ones(len(batch.input_ids))
    weights[places] = torch.tensor([1.5, 0.25])
    expected, _ = gradients_of(Trainer(make_model(), config()), [replace(batch, advantages=batch.advantages * weights)])
    gradients, metrics = gradients_of(trainer, [batch])
    assert_equal_gradients(gradients, expected, 1e-5)
    num_tokens, num_sequences = batch.num_response_tokens, 6
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["correction_limited"] == pytest.approx(1 / num_tokens)
    assert metrics["mismatch_k1"] == pytest.approx(math.log(2.0) / num_tokens, rel=1e-4)  # -(ln 2 - 2 ln 2)
    assert metrics["mismatch_chi2"] == pytest.approx((1 + 0.75**2) / num_tokens, rel=1e-4)
    total, squares = num_tokens - 2 + 2.25, num_tokens - 2 + 4 + 1 / 16
    assert metrics["effective_samples"] == pytest.approx(total**2 / (num_tokens * squares), rel=1e-5)
    # Both tokens are of sequence 0, or the second opens sequence 1: sums of d tell.
    borders = batch.cu_seqlens[1:-1]
    owner = [int((borders <= place).sum()) for place in places]
    lengths = [
        int(batch.response_mask[s:e].sum()) for s, e in zip([0, *borders], [*borders, len(weights)], strict=True)
    ]
    means = np.zeros(num_sequences)
    for sequence, d in zip(owner, [math.log(2.0), -math.log(4.0)], strict=True):
        means[sequence] += d / lengths[sequence]
    assert metrics["perplexity_gap"] == pytest.approx(np.abs(means).mean(), rel=1e-4)


def test_normalized_correction_divides_by_the_mean_weight_of_the_step(make_model, make_trajectories):
    settings = config(correction="truncate", correction_high=1.5, normalize_correction=True)
    trainer = Trainer(make_model(), settings)
    batches = pack(make_trajectories(), torch.linspace(-1, 2, 6), tokens_per_microbatch=40)
    assert len(batches) > 1
    batches, places = engine_that_differs(trainer, batches, [math.log(2.0), -math.log(4.0)])
    num_tokens = sum(batch.num_response_tokens for batch in batches)
    mean = (num_tokens - 2 + 1.5 + 0.25) / num_tokens
    weights = torch.ones(len(batches[0].input_ids))
    weights[places] = torch.tensor([1.5, 0.25])
    weighed = [replace(batches[0], advantages=batches[0].advantages * weights), *batches[1:]]
    expected, _ = gradients_of(Trainer(make_model(), config()), weighed)
    gradients, metrics = gradients_of(trainer, batches)
    assert_equal_gradients(gradients, {name: gradient / mean for name, gradient in expected.items()}, 1e-5)
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0


def test_a_mask_that_leaves_nothing_stops_the_run_and_says_which(make_model, make_trajectories):
    trainer = Trainer(make_model(), config(correction="mask", correction_high=1.5))
    batches = trainer.with_old_log_probs(pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=60))
    batches = [replace(b, rollout_log_probs=b.old_log_probs - 1) for b in batches]  # every ratio is e
    before = trainer.model.lm_head.weight.clone()
    with pytest.raises(
        CorrectionError, match=r"masked every token: .* correction_low \(0.5\) and correction_high \(1.5\)"
    ):
        trainer.step(batches)
    assert torch.equal(trainer.model.lm_head.weight, before)


def recorded_by(model, batch):
    """The experts that the policy itself takes, and the batch that carries them."""
    recorded = []

    def route(layer, logits):
        ids, weights = top_k_route(model.config.experts_per_token)(layer, logits)
        recorded.append(ids)
        return ids, weights

    with torch.no_grad():
        Trainer(model, config()).log_probs(batch, route=route)
    return replace(batch, routes=torch.stack(recorded, dim=1).to(torch.int16))


def test_replay_route_by_hand():
    # Logits 0, 1, 2, 3; the top two are 3 and 2, replayed are 1 and 3: softmax of (1, 3) = 1 / (1 + e^2).
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    drifted = []
    route = replay_route(torch.tensor([[[1, 3]], [[2, 3]]], dtype=torch.int16), drifted)
    ids, weights = route(0, logits)
    assert ids.tolist() == [[1, 3], [2, 3]]
    low = 1 / (1 + math.e**2)
    assert weights[0].tolist() == pytest.approx([low, 1 - low])
    assert weights[1].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])
    assert [rows.tolist() for rows in drifted] == [[True, False]]  # 3 2 and 2 3 are the same experts
    with pytest.raises(ValueError, match=r"routes of \[2, 1, 2\] cannot route 3 rows of layer 0"):
        route(0, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="of layer 1"):
        route(1, logits)
    with pytest.raises(ValueError, match=r"row 1 of 2, layer 0: routed to experts \[2, 4\] of a model with 4"):
        replay_route(torch.tensor([[[1, 3]], [[2, 4]]], dtype=torch.int16))(0, logits)


def test_replay_with_the_same_weights_changes_nothing(make_model, make_trajectories):
    (batch,) = pack(make_trajectories(), torch.linspace(-1, 1, 6), tokens_per_microbatch=BUDGET)
    batch = recorded_by(make_model(), batch)
    free, replaying = Trainer(make_model(), config()), Trainer(make_model(), config(replay_routes="engine"))
    expected, expected_metrics = gradients_of(free, [batch])
    gradients, metrics = gradients_of(replaying, [batch])
    assert metrics.pop("route_drift") == 0.0
    assert metrics == expected_metrics
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_replay_uses_the_recorded_experts_of_a_router_that_has_drifted(make_model, make_trajectories):
    (batch,) = pack(make_trajectories(), torch.linspace(-1, 1, 6), tokens_per_microbatch=BUDGET)
    batch = recorded_by(make_model(), batch)
    model = make_model()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.add_(torch.randn(4, generator=generator))
    used, shares = [], []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, args: (used.append(args[1]), shares.append(args[2]))[0]
        )
    trainer = Trainer(model, config(replay_routes="engine"))
    gradients, metrics = gradients_of(trainer, [batch])
    own = recorded_by(model, batch).routes
    assert torch.equal(torch.stack(used[:2], dim=1), batch.routes.long())
    differs = own.sort(-1).values.ne(batch.routes.sort(-1).values).any(-1)
    assert 0.05 < differs.float().mean() < 0.95
    # Layer 1 sees other inputs than it would without replay, so only layer 0's drift is known from outside.
    assert metrics["route_drift"] >= differs[:, 0].float().mean().item() / 2
    for layer in range(2):
        assert gradients[f"model.layers.{layer}.mlp.router.weight"].norm() > 1e-4
        assert shares[layer].min() > 0
        assert shares[layer].sum(-1).allclose(torch.ones(len(shares[layer])))


def test_several_updates_replay_the_routes_of_the_pass_before_them(make_model, make_trajectories):
    trainer = Trainer(make_model(), config(replay_routes="trainer", updates_per_batch=2))
    batches = pack(make_trajectories(), torch.linspace(-1, 1, 6), tokens_per_microbatch=60)
    with pytest.raises(ValueError, match='replay_routes is "trainer" but a batch has no routes'):
        trainer.step(batches)
    ready = trainer.with_old_log_probs(batches)
    for batch in ready:
        assert torch.equal(batch.routes, recorded_by(make_model(), batch).routes)
    first = trainer.step(ready)
    second = trainer.step(ready)
    assert first["route_drift"] == 0.0
    assert first["ratio_min"] == pytest.approx(1.0, abs=1e-6)
    assert second["route_drift"] > 0.0


def test_a_separate_pass_in_another_type_breaks_the_ratio_of_one(make_model, make_trajectories):
    """Why there is no second pass: at learning rate 0 the ratio is not 1, and tight bounds clip."""
    batches = pack(make_trajectories(), torch.linspace(-1, 1, 6), tokens_per_microbatch=60)
    plain = Trainer(make_model(), config(clip_low=1e-3, clip_high=1e-3))
    metrics = plain.step(batches)
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    broken = Trainer(make_model(), config(clip_low=1e-3, clip_high=1e-3, recompute_old_log_probs="bfloat16"))
    metrics = broken.step(broken.with_old_log_probs(batches))
    assert metrics["ratio_min"] < 0.999
    assert metrics["ratio_max"] > 1.001
    assert metrics["clip_fraction"] > 0.1
    assert next(broken.model.parameters()).dtype == torch.float32


def test_metrics_hold_no_graph(make_model, make_trajectories):
    from poise.train.totals import Totals

    trainer, totals = Trainer(make_model(), config(entropy_weight=0.1)), Totals()
    (batch,) = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    trainer._loss(batch, 1.0, totals)
    held = [*totals._sums.values(), *totals._extremes.values()]
    assert len(held) > 10
    assert not any(value.requires_grad for value in held)
