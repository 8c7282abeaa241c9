"""The optimizer step against Transformers' GPT-OSS in float32, against itself under every cut, and at its edges."""

import math
from dataclasses import replace

import pytest
import torch

from poise.config import AlgorithmConfig, Config, OptimizerConfig, RolloutConfig, WarmStartConfig
from poise.train.optimizer import GradientError, warm_start_schedule, warmup_schedule
from poise.train.packing import pack, pack_demonstrations
from poise.train.trainer import MismatchError, Trainer
from poise.types import Stop, Trajectory, Turn

TEMPERATURE = 0.7
BUDGET = 4096


def config(*, learning_rate=1e-2, warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0, **algorithm):
    return Config(
        rollout=RolloutConfig(temperature=TEMPERATURE),
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            weight_decay=weight_decay,
        ),
    )


def gradients_of(trainer, step):
    """What the optimizer sees, by name (its first step hides the scale)."""
    seen = {}

    def look(optimizer, args, kwargs):
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})

    handle = trainer.optimizer.register_step_pre_hook(look)
    metrics = step()
    handle.remove()
    return seen, metrics


def assert_equal_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).norm() / gradient.norm()
        assert difference < relative, f"{name}: {difference}"


def without_timing(metrics):
    return {name: value for name, value in metrics.items() if name != "tokens_per_s"}


@pytest.fixture(scope="module")
def transformers_model():
    transformers = pytest.importorskip("transformers")

    def convert(model):
        hf_config = transformers.GptOssConfig(**model.config.to_hf_dict(), attn_implementation="eager")
        hf_model = transformers.GptOssForCausalLM(hf_config).float()
        hf_model.load_state_dict(model.state_dict())
        return hf_model

    return convert


def reference_values(hf_model, trajectory, temperature=TEMPERATURE):
    """Log-probs of the sampled tokens and entropies of their distributions, one sequence at a time."""
    token_ids = torch.tensor(trajectory.token_ids)
    log_p = (hf_model(token_ids[None]).logits[0] / temperature).log_softmax(-1)
    sampled = [t for t, is_action in enumerate(trajectory.response_mask) if is_action]
    rows = log_p[[t - 1 for t in sampled]]
    return rows[range(len(sampled)), token_ids[sampled]], -(rows.exp() * rows).sum(-1)


def test_log_probs_and_entropy_equal_transformers_one_by_one(make_model, make_trajectories, transformers_model):
    model, trajectories = make_model(), make_trajectories()
    (batch,) = pack(trajectories, torch.ones(6), tokens_per_microbatch=BUDGET)
    log_probs, entropy = Trainer(model, config()).log_probs(batch)
    with torch.no_grad():
        expected = [reference_values(transformers_model(model), trajectory) for trajectory in trajectories]
    mask = batch.response_mask
    torch.testing.assert_close(log_probs[mask], torch.cat([lp for lp, _ in expected]), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(entropy[mask], torch.cat([h for _, h in expected]), rtol=2e-5, atol=2e-5)
    assert not log_probs[~mask].any()
    assert not entropy[~mask].any()


def test_gradient_equals_the_formula_through_transformers(make_model, make_trajectories, transformers_model):
    """-sum_t A_t grad log p_t / n - w sum_t grad H_t / n over every parameter."""
    model, trajectories = make_model(), make_trajectories()
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.5, 0.7])
    hf_model = transformers_model(model)
    values = [reference_values(hf_model, trajectory) for trajectory in trajectories]
    num_tokens = sum(len(log_probs) for log_probs, _ in values)
    policy = sum(-a * log_probs.sum() for a, (log_probs, _) in zip(advantages, values, strict=True)) / num_tokens
    bonus = 0.03 * sum(entropy.sum() for _, entropy in values) / num_tokens
    (policy - bonus).backward()
    expected = {name: p.grad for name, p in hf_model.named_parameters()}

    trainer = Trainer(model, config(entropy_weight=0.03))
    batches = pack(trajectories, advantages, tokens_per_microbatch=60)
    assert len(batches) > 1
    actual, metrics = gradients_of(trainer, lambda: trainer.step(batches))
    assert_equal_gradients(actual, expected, 1e-4)
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(bonus.item() / 0.03, rel=1e-5)
    # On-policy the surrogate's value is the mean advantage, negated.
    mean_advantage = sum(a * len(lp) for a, (lp, _) in zip(advantages.tolist(), values, strict=True)) / num_tokens
    assert metrics["loss"] == pytest.approx(-mean_advantage - bonus.item(), rel=1e-5)
    assert metrics["response_tokens"] == num_tokens


def silent(num_tokens):
    turn = Turn(observation_ids=tuple(range(num_tokens)), action_ids=(), rollout_log_probs=())
    return Trajectory(group_id=0, episode_id="silent", turns=(turn,), reward=0.0, stop=Stop.MAX_TOKENS)


def test_gradient_is_the_same_for_every_cut(make_model, make_trajectories):
    trajectories = make_trajectories(num=8)
    advantages = torch.linspace(-2, 1.5, 8)

    def cut(*parts):
        return [
            batch
            for part in parts
            for batch in pack([trajectories[i] for i in part], advantages[list(part)], tokens_per_microbatch=BUDGET)
        ]

    def with_silence(batches_of, lengths):
        """Every sequence again, with fully masked ones between them."""
        chosen = [trajectories[i] for i in batches_of] + [silent(length) for length in lengths]
        return pack(
            chosen,
            torch.cat([advantages[list(batches_of)], torch.full((len(lengths),), 9.0)]),
            tokens_per_microbatch=BUDGET,
        )

    cuts = {
        "two": cut(range(4), range(4, 8)),
        "four": cut([0, 1], [2, 3], [4, 5], [6, 7]),
        "ragged": cut([6], [1, 2, 3, 5, 7], [0, 4]),
        "one by one": cut(*[[i] for i in range(8)]),
        "masked sequences": with_silence(range(5), [3, 11]) + with_silence([7, 6, 5], [30]),
        "masked micro-batches": cut(range(8)) + with_silence([], [5, 9]),
    }
    trainer = Trainer(make_model(), config(entropy_weight=0.01))
    whole, whole_metrics = gradients_of(trainer, lambda: trainer.step(cut(range(8))))
    for name, batches in cuts.items():
        trainer = Trainer(make_model(), config(entropy_weight=0.01))
        parts, metrics = gradients_of(trainer, lambda batches=batches, trainer=trainer: trainer.step(batches))
        assert_equal_gradients(parts, whole, 1e-5)
        for key, value in without_timing(whole_metrics).items():
            assert metrics[key] == pytest.approx(value, rel=1e-5), (name, key)


def test_sequences_cannot_see_each_other(make_model, make_trajectories):
    trajectories = make_trajectories()
    trainer = Trainer(make_model(), config())
    (batch,) = pack(trajectories, torch.ones(6), tokens_per_microbatch=BUDGET)
    start, end = batch.cu_seqlens[2:4].tolist()
    changed = batch.input_ids.clone()
    changed[start:end] = (changed[start:end] + 7) % 40
    log_probs, _ = trainer.log_probs(batch)
    others, _ = trainer.log_probs(replace(batch, input_ids=changed))
    is_inside = torch.zeros_like(batch.response_mask)
    is_inside[start:end] = True
    torch.testing.assert_close(log_probs[~is_inside], others[~is_inside], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(log_probs[is_inside], others[is_inside], atol=1e-2)


def test_on_policy_the_ratio_is_exactly_one_and_there_is_one_forward(make_model, make_trajectories):
    trainer = Trainer(make_model(), config())
    batches = pack(make_trajectories(), torch.randn(6), tokens_per_microbatch=60)
    forwards = []
    trainer.model.register_forward_hook(lambda *_: forwards.append(1))
    for _ in range(2):
        metrics = trainer.step(batches)
        assert metrics["ratio_min"] == 1.0
        assert metrics["ratio_max"] == 1.0
        assert metrics["clip_fraction"] == 0.0
    assert len(forwards) == 2 * len(batches)


def test_what_speaks_of_observations_changes_nothing(make_model, make_trajectories):
    batches = pack(make_trajectories(), torch.linspace(-1, 1, 6), tokens_per_microbatch=60)

    def garbled(batch):
        mask = batch.response_mask
        return replace(
            batch,
            target_ids=torch.where(mask, batch.target_ids, (batch.target_ids + 13) % 40),
            rollout_log_probs=torch.where(mask, batch.rollout_log_probs, torch.nan),
            advantages=torch.where(mask, batch.advantages, torch.inf),
        )

    clean, dirty = Trainer(make_model(), config()), Trainer(make_model(), config())
    assert without_timing(clean.step(batches)) == without_timing(dirty.step([garbled(batch) for batch in batches]))
    for name, parameter in clean.model.state_dict().items():
        assert torch.equal(parameter, dirty.model.state_dict()[name]), name


def test_several_updates_compare_with_the_policy_before_the_first(make_model, make_trajectories):
    trainer = Trainer(make_model(), config(learning_rate=3e-2, clip_low=0.1, clip_high=0.15))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    batches = trainer.with_old_log_probs(pack(make_trajectories(), advantages, tokens_per_microbatch=60))
    first = trainer.step(batches)
    assert first["ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert first["clip_fraction"] == 0.0

    with torch.no_grad():
        ratios = [(trainer.log_probs(batch)[0] - batch.old_log_probs).exp()[batch.response_mask] for batch in batches]
        signs = torch.cat([batch.advantages[batch.response_mask] for batch in batches])
    ratios = torch.cat(ratios)
    is_clipped = ((ratios > 1.15) & (signs > 0)) | ((ratios < 0.9) & (signs < 0))
    assert 0 < is_clipped.sum() < len(ratios)
    second = trainer.step(batches)
    assert second["ratio_min"] == pytest.approx(ratios.min().item(), rel=1e-5)
    assert second["ratio_max"] == pytest.approx(ratios.max().item(), rel=1e-5)
    assert second["clip_fraction"] == pytest.approx(is_clipped.float().mean().item(), rel=1e-5)
    # The mismatch is that of the policy which acted, not of the one that has moved on.
    for name in ("mismatch_mean", "mismatch_max", "mismatch_k3"):
        assert second[name] == pytest.approx(first[name], rel=1e-5)


def test_mismatch_with_the_engine_by_hand_and_its_bound(make_model, make_trajectories):
    trainer = Trainer(make_model(), config())
    (batch,) = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    num_tokens = batch.num_response_tokens
    with torch.no_grad():
        rollout_log_probs = trainer.log_probs(batch)[0]
    # An engine that agrees but at two tokens: 0.5 too high, 0.25 too low.
    places = batch.response_mask.nonzero()[:2, 0]
    rollout_log_probs[places] += torch.tensor([0.5, -0.25])
    batch = replace(batch, rollout_log_probs=rollout_log_probs)

    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    bound = 0.75 / num_tokens
    with pytest.raises(MismatchError, match=r"step 0: trainer and engine differ by .* \(0\.5 at most"):
        trainer.step([batch], max_mismatch=bound * 0.99)
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(parameter, before[name]), name
    assert trainer.steps_done == 0

    # The refused gradient is gone: this is the step of a trainer which never made it.
    twin = Trainer(make_model(), config())
    metrics = trainer.step([batch], max_mismatch=bound * 1.01)
    assert without_timing(twin.step([batch])) == without_timing(metrics)
    assert torch.equal(trainer.model.lm_head.weight, twin.model.lm_head.weight)
    assert metrics["mismatch_mean"] == pytest.approx(bound, rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(0.5, rel=1e-5)
    # d = -0.5 and 0.25: e^-0.5 - 1 + 0.5 = 0.1065306597; e^0.25 - 1 - 0.25 = 0.0340254167
    assert metrics["mismatch_k3"] == pytest.approx((0.1065306597 + 0.0340254167) / num_tokens, rel=1e-4)
    assert trainer.steps_done == 1

    # A mismatch that is no number does not pass for a small one.
    rollout_log_probs[places[0]] = torch.nan
    with pytest.raises(MismatchError, match="differ by nan"):
        trainer.step([replace(batch, rollout_log_probs=rollout_log_probs)], max_mismatch=1e3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss(make_model, make_trajectories, estimator):
    trainer = Trainer(make_model(), config(kl_weight=0.2, kl_estimator=estimator))
    reference = trainer.make_reference()
    batches = pack(make_trajectories(), torch.zeros(6), tokens_per_microbatch=60)
    with pytest.raises(ValueError, match="kl_weight is positive but a batch has no ref_log_probs"):
        trainer.step(batches)

    # The reference is the policy itself: KL 0, and with advantage 0 nothing moves.
    same, metrics = gradients_of(trainer, lambda: trainer.step(trainer.with_ref_log_probs(batches, reference)))
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert max(g.norm() for g in same.values()) < 1e-5

    # Another reference: the mean over response tokens, and its gradient by autograd over the same log-probs.
    trainer = Trainer(make_model(), config(kl_weight=0.2, kl_estimator=estimator))
    batches = trainer.with_ref_log_probs(batches, make_model(seed=5))
    total, num_tokens = 0.0, 0
    for batch in batches:
        difference = (trainer.log_probs(batch)[0] - batch.ref_log_probs)[batch.response_mask]
        terms = difference**2 / 2 if estimator == "k2" else (-difference).exp() - 1 + difference
        total, num_tokens = total + terms.sum(), num_tokens + len(terms)
    expected = torch.autograd.grad(0.2 * total / num_tokens, list(trainer.model.parameters()))
    names = [name for name, _ in trainer.model.named_parameters()]
    actual, metrics = gradients_of(trainer, lambda: trainer.step(batches))
    assert metrics["kl"] == pytest.approx((total / num_tokens).item(), rel=1e-5)
    assert metrics["kl"] > 0.01
    assert_equal_gradients(actual, dict(zip(names, expected, strict=True)), 1e-5)


def test_the_reference_is_frozen_and_only_made_when_read(make_model, make_trajectories):
    assert Trainer(make_model(), config()).make_reference() is None
    trainer = Trainer(make_model(), config(kl_weight=0.1))
    reference = trainer.make_reference()
    trainer.step(
        trainer.with_ref_log_probs(pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET), reference)
    )
    assert not any(p.requires_grad for p in reference.parameters())
    for name, parameter in make_model().state_dict().items():
        assert torch.equal(reference.state_dict()[name], parameter)
    assert not torch.equal(trainer.model.lm_head.weight, reference.lm_head.weight)


def demonstrations(trajectories):
    return [[(turn.observation_ids, turn.action_ids) for turn in trajectory.turns] for trajectory in trajectories]


def test_supervised_loss_and_gradient_equal_transformers(make_model, make_trajectories, transformers_model):
    model, trajectories = make_model(), make_trajectories()
    hf_model = transformers_model(model)
    num_tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
    losses = []
    for trajectory in trajectories:
        token_ids = torch.tensor(trajectory.token_ids)
        labels = torch.where(torch.tensor(trajectory.response_mask), token_ids, -100)
        losses.append(hf_model(token_ids[None], labels=labels[None]).loss * sum(trajectory.response_mask))
    expected_loss = torch.stack(losses).sum() / num_tokens
    expected_loss.backward()

    trainer = Trainer(model, config())
    batches = pack_demonstrations(demonstrations(trajectories), tokens_per_microbatch=60)
    actual, metrics = gradients_of(trainer, lambda: trainer.supervised_step(batches))
    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-5)
    assert_equal_gradients(actual, {name: p.grad for name, p in hf_model.named_parameters()}, 1e-4)


def test_imitation_is_reinforce_with_advantage_one(make_model, make_trajectories):
    batches = pack_demonstrations(demonstrations(make_trajectories()), tokens_per_microbatch=60)
    settings = replace(config(), rollout=RolloutConfig(temperature=1.0))
    imitator, reinforcer = Trainer(make_model(), settings), Trainer(make_model(), settings)
    imitation, _ = gradients_of(imitator, lambda: imitator.supervised_step(batches))
    reinforcement, _ = gradients_of(reinforcer, lambda: reinforcer.step(batches))
    assert_equal_gradients(reinforcement, imitation, 1e-6)


def test_weight_decay_spares_norms_biases_and_sinks(make_model, make_trajectories):
    # Advantages 0: no gradient, so a step multiplies by 1 - learning_rate x weight_decay = 0.9 or leaves alone.
    trainer = Trainer(make_model(), config(learning_rate=0.2, weight_decay=0.5))
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    trainer.step(pack(make_trajectories(), torch.zeros(6), tokens_per_microbatch=BUDGET))
    decayed = set()
    for name, parameter in trainer.model.state_dict().items():
        if torch.equal(parameter, before[name]):
            continue
        torch.testing.assert_close(parameter, before[name] * 0.9)
        decayed.add(name.replace(".1.", ".0."))
    assert decayed == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "lm_head.weight",
    }


def test_two_steps_are_adam_by_hand(make_model, make_trajectories):
    """theta -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + 1e-8) (Kingma and Ba 2015), in float64."""
    settings = replace(config(), optimizer=OptimizerConfig(warmup_steps=0, learning_rate=1e-2, beta1=0.8, beta2=0.95))
    settings = replace(settings, optimizer=replace(settings.optimizer, max_grad_norm=1e9))
    trainer = Trainer(make_model(), settings)
    expected = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    m = dict.fromkeys(expected, 0.0)
    v = dict.fromkeys(expected, 0.0)
    for t, advantages in enumerate((torch.ones(6), torch.linspace(-2, 1, 6)), start=1):
        batches = pack(make_trajectories(), advantages, tokens_per_microbatch=BUDGET)
        gradients, _ = gradients_of(trainer, lambda batches=batches: trainer.step(batches))
        for name, parameter in trainer.model.named_parameters():
            gradient = gradients[name].double()
            m[name] = 0.8 * m[name] + 0.2 * gradient
            v[name] = 0.95 * v[name] + 0.05 * gradient**2
            expected[name] -= 1e-2 * m[name] / (1 - 0.8**t) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_the_norm_and_reported_as_they_were(make_model, make_trajectories):
    batches = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    free, bound = Trainer(make_model(), config()), Trainer(make_model(), config(max_grad_norm=0.01))
    whole, free_metrics = gradients_of(free, lambda: free.step(batches))
    clipped, bound_metrics = gradients_of(bound, lambda: bound.step(batches))
    assert bound_metrics["grad_norm"] == free_metrics["grad_norm"] > 0.1
    scale = 0.01 / free_metrics["grad_norm"]
    assert_equal_gradients(clipped, {name: g * scale for name, g in whole.items()}, 1e-4)


def test_a_gradient_that_is_not_finite_stops_the_step(make_model, make_trajectories):
    trainer, twin = Trainer(make_model(), config()), Trainer(make_model(), config())
    batches = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    for t in (trainer, twin):
        t.step(batches)
    broken = replace(batches[0], advantages=torch.full_like(batches[0].advantages, torch.nan))
    with pytest.raises(GradientError, match="step 1: the gradient norm is nan; the weights were left alone"):
        trainer.step([broken])
    # Nothing of it is left behind: the next step is that of a trainer which never saw it.
    assert trainer.steps_done == 1
    assert without_timing(trainer.step(batches)) == without_timing(twin.step(batches))
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(parameter, twin.model.state_dict()[name])


def test_nothing_to_learn_from_is_an_error(make_model):
    trainer = Trainer(make_model(), config())
    for batches in ([], pack([silent(4)], torch.ones(1), tokens_per_microbatch=BUDGET)):
        with pytest.raises(ValueError, match="no response token"):
            trainer.step(batches)
        with pytest.raises(ValueError, match="no response token"):
            trainer.supervised_step(batches)


def test_schedules_by_hand():
    schedule = warmup_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4))
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_schedule(OptimizerConfig(learning_rate=0.5, warmup_steps=0))(0) == 0.5
    # Warm start: peak 1 at step 1, a tenth at step 5; half way, at step 3, (1 + 0.1) / 2.
    schedule = warm_start_schedule(WarmStartConfig(steps=6, learning_rate=1.0, warmup_steps=2))
    quarter = 0.55 + 0.45 * math.sqrt(0.5)
    assert [schedule(step) for step in range(6)] == pytest.approx([0.5, 1.0, quarter, 0.55, 1.1 - quarter, 0.1])
    assert warm_start_schedule(WarmStartConfig(steps=1, learning_rate=1.0, warmup_steps=0))(0) == 1.0


def test_the_schedule_drives_the_optimizer_and_a_phase_brings_its_own(make_model, make_trajectories):
    batches = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    model = make_model()
    trainer = Trainer(model, config(learning_rate=0.04, warmup_steps=2))
    assert [trainer.step(batches)["learning_rate"] for _ in range(3)] == [0.02, 0.04, 0.04]
    second = Trainer(model, config(), schedule=lambda step: 0.5 + step)
    assert second.steps_done == 0
    assert [second.step(batches)["learning_rate"] for _ in range(2)] == [0.5, 1.5]
