"""PPO's critic: advantages worked out by hand, gradients through Transformers, and what may change nothing."""

import math
from dataclasses import replace

import pytest
import torch

from poise.config import AlgorithmConfig, Config, CriticConfig, OptimizerConfig, RolloutConfig
from poise.loop import Rollout, pack_update, train
from poise.train.checkpoint import load_checkpoint, save_checkpoint
from poise.train.credit import credited, token_rewards
from poise.train.critic import Critic, make_critic
from poise.train.packing import TokenCredit, pack
from poise.train.scoring import RolloutError, scored, trainable_groups
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn

BUDGET = 4096
PLAIN = {"whiten_advantages": False}


def config(*, critic=None, learning_rate=1e-2, **algorithm):
    return Config(
        rollout=RolloutConfig(temperature=0.7),
        algorithm=AlgorithmConfig(normalize_advantages="gae", max_mismatch=1e9, **algorithm),
        critic=CriticConfig(**critic or {}),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=0, max_grad_norm=1e9),
    )


def make_trainer(model, settings):
    return Trainer(model, settings, critic=make_critic(model, settings))


def with_random_head(trainer, scale=0.3):
    """A critic that has opinions."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        head = trainer.critic.head
        head.weight.copy_(scale * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.25)
    return trainer


def episode(*streams, reward=1.0, stop=Stop.DONE, group_id=0):
    """Each stream is a list of turns (number of sampled tokens, reward); every observation has three tokens."""
    return [
        Trajectory(
            group_id=group_id,
            episode_id=str(group_id),
            turns=tuple(
                Turn(
                    observation_ids=(1, 2, 3),
                    action_ids=tuple(range(4, 4 + num_tokens)),
                    rollout_log_probs=(-1.0,) * num_tokens,
                    reward=turn_reward,
                )
                for num_tokens, turn_reward in stream
            ),
            reward=reward,
            stop=stop,
        )
        for stream in streams
    ]


def credits_of(trainer, groups, settings, reference=None):
    scores, metrics = credited(trainer, reference, groups, settings)
    return [credit for group in scores for _, credit in group], metrics


def test_advantages_by_hand_over_turns_and_streams(make_model):
    # Every value is 0.5: a head of zeros with this bias. gamma 0.9, lam 0.5, so gamma lam = 0.45.
    settings = config(critic=PLAIN | {"gamma": 0.9, "lam": 0.5})
    trainer = make_trainer(make_model(), settings)
    trainer.critic.head.bias.data.fill_(0.5)
    # Two turns of 2 and 1 tokens in one stream, and an episode of two streams with 1 token each: both earn 1 at the
    # end.
    groups = [[episode([(2, 0.0), (1, 0.0)])], [episode([(1, 0.0)], [(1, 0.0)], group_id=1)]]
    (first, second, third), metrics = credits_of(trainer, groups, settings)
    # Last token: 1 - 0.5 = 0.5. Before it: delta = 0.9 x 0.5 - 0.5 = -0.05; -0.05 + 0.45 x 0.5 = 0.175;
    # -0.05 + 0.45 x 0.175 = 0.02875. The tool's tokens between the turns are no steps, nor is the border of streams.
    assert first.advantages.tolist() == pytest.approx([0.02875, 0.175, 0.5], abs=1e-7)
    assert first.returns.tolist() == pytest.approx([0.52875, 0.675, 1.0], abs=1e-7)
    assert first.values.tolist() == [0.5] * 3
    assert second.advantages.tolist() == pytest.approx([0.175], abs=1e-7)
    assert third.advantages.tolist() == pytest.approx([0.5], abs=1e-7)
    assert metrics["value_mean"] == 0.5
    assert metrics["return_mean"] == pytest.approx((0.52875 + 0.675 + 1.0 + 0.675 + 1.0) / 5)
    assert metrics["explained_variance"] == pytest.approx(0.0, abs=1e-12)
    # In the batch they stand at the sampled tokens alone.
    (batch,) = pack_update(credited(trainer, None, groups, settings)[0], settings)
    assert batch.advantages.tolist() == pytest.approx(
        [0, 0, 0.02875, 0.175, 0, 0, 0, 0.5, 0, 0, 0.175, 0, 0, 0.5], abs=1e-7
    )
    assert batch.returns[batch.response_mask].tolist() == pytest.approx([0.52875, 0.675, 1.0, 0.675, 1.0], abs=1e-7)
    assert not batch.values[~batch.response_mask].any()


def test_rewards_stand_at_the_last_token_of_what_earned_them():
    played = episode([(2, 0.25), (3, -1.0)], [(1, 4.0)], reward=10.0)
    assert [part.tolist() for part in token_rewards(played, config())] == [[0, 0, 0, 0, 0], [10]]
    turns = config(credit="turn")
    assert [part.tolist() for part in token_rewards(played, turns)] == [[0, 0.25, 0, 0, -1], [14]]


def test_without_discount_and_values_every_token_has_its_episodes_reward(make_model):
    settings = config(critic=PLAIN)
    groups = [[episode([(2, 0.0), (3, 0.0)], reward=0.75)], [episode([(1, 0.0)], reward=-2.0, group_id=1)]]
    (first, second), _ = credits_of(make_trainer(make_model(), settings), groups, settings)
    assert first.advantages.tolist() == [0.75] * 5
    assert second.advantages.tolist() == [-2.0]
    # Whitened: five times 0.75 and -2: mean 1.75 / 6, deviation of the sample, floor 1e-4 x 2.
    mean = 1.75 / 6
    deviation = math.sqrt((5 * (0.75 - mean) ** 2 + (2 + mean) ** 2) / 5) + 2e-4
    settings = config()
    (first, second), _ = credits_of(make_trainer(make_model(), settings), groups, settings)
    assert first.advantages.tolist() == pytest.approx([(0.75 - mean) / deviation] * 5)
    assert second.advantages.tolist() == pytest.approx([(-2 - mean) / deviation])
    assert first.returns.tolist() == [0.75] * 5  # the critic learns what was earned
    # Equal rewards under equal values teach exactly nothing.
    (first, _), metrics = credits_of(
        make_trainer(make_model(), settings), [[episode([(2, 0.0)], reward=0.1)] * 2], settings
    )
    assert first.advantages.tolist() == [0.0, 0.0]
    assert math.isnan(metrics["explained_variance"])


def test_kl_in_the_reward_is_paid_token_by_token(make_model, make_trajectories):
    settings = config(critic=PLAIN | {"gamma": 0.5}, kl_weight=0.3, kl_in="reward")
    trainer, reference = make_trainer(make_model(), settings), make_model(seed=5)
    stream = replace(make_trajectories()[2], reward=2.0)
    (batch,) = pack([stream], torch.zeros(1), tokens_per_microbatch=BUDGET)
    with torch.no_grad():
        k1 = (trainer.log_probs(batch)[0] - trainer.log_probs(batch, model=reference)[0])[batch.response_mask]
    expected, later = [], 0.0
    for number, paid in enumerate(reversed(k1.tolist())):
        later = (2.0 if number == 0 else 0.0) - 0.3 * paid + 0.5 * later
        expected.append(later)
    (credit,), metrics = credits_of(trainer, [[[stream]]], settings, reference)
    assert credit.advantages.tolist() == pytest.approx(expected[::-1], rel=1e-4, abs=1e-6)
    assert metrics["kl"] == pytest.approx(k1.mean().item(), rel=1e-4)
    # Then the loss knows no reference, and the ratio of the one update is exactly 1.
    numbers = trainer.step(pack_update([[(stream, credit)]], settings))
    assert numbers["ratio_min"] == numbers["ratio_max"] == 1.0
    assert "kl" not in numbers


def test_values_are_those_of_the_state_before_the_token(make_model, make_trajectories):
    """A value may not know the token it speaks of, and knows all before it."""
    trainer = with_random_head(make_trainer(make_model(), config()))
    (batch,) = pack([make_trajectories()[2]], torch.zeros(1), tokens_per_microbatch=BUDGET)
    (valued,) = trainer.with_values([batch])
    places = batch.response_mask.nonzero()[:, 0].tolist()
    for place in (places[0], places[2]):
        changed = batch.input_ids.clone()
        changed[place + 1 :] = (changed[place + 1 :] + 7) % 40  # targets `place` and later
        (other,) = trainer.with_values([replace(batch, input_ids=changed)])
        same = [t for t in places if t <= place]
        assert torch.equal(other.values[same], valued.values[same])
        assert not torch.allclose(other.values[places[-1]], valued.values[places[-1]], atol=1e-3)


def gradients_of(trainer, batches):
    """What the two optimizers see."""
    seen = {}

    def look(prefix, module):
        def hook(optimizer, args, kwargs):
            seen.update({prefix + n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})

        return hook

    handles = [
        trainer.optimizer.register_step_pre_hook(look("policy.", trainer.model)),
        trainer.critic.optimizer.register_step_pre_hook(look("critic.", trainer.critic)),
    ]
    metrics = trainer.step(batches)
    for handle in handles:
        handle.remove()
    return seen, {name: value for name, value in metrics.items() if name != "tokens_per_s"}


def assert_equal_gradients(actual, expected, relative):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert difference < relative, f"{name}: {difference}"


def credits_for(trajectories, seed=3):
    """Arbitrary numbers for each sampled token of each trajectory."""
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenCredit(
            **dict(
                zip(
                    ("advantages", "values", "returns"),
                    torch.randn(3, sum(t.response_mask), generator=generator),
                    strict=True,
                )
            )
        )
        for t in trajectories
    ]


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_gradient_equals_the_formula_through_transformers(make_model, make_trajectories, backbone):
    """mean_t (w . h_t + b - R_t)^2 / 2 for the critic, and on a shared backbone value_weight of it for the policy."""
    transformers = pytest.importorskip("transformers")
    settings = config(critic={"backbone": backbone} | ({"value_weight": 0.7} if backbone == "shared" else {}))
    model, trajectories = make_model(), make_trajectories()
    credits = credits_for(trajectories)
    trainer = with_random_head(make_trainer(model, settings))

    hf_config = transformers.GptOssConfig(**model.config.to_hf_dict(), attn_implementation="eager")
    hf_model = transformers.GptOssForCausalLM(hf_config).float()
    hf_model.load_state_dict(model.state_dict())
    weight = trainer.critic.head.weight.detach().clone().requires_grad_()
    bias = trainer.critic.head.bias.detach().clone().requires_grad_()
    squares, surrogates = [], []
    for trajectory, credit in zip(trajectories, credits, strict=True):
        token_ids = torch.tensor(trajectory.token_ids)
        sampled = [t for t, is_action in enumerate(trajectory.response_mask) if is_action]
        hidden = hf_model.model(token_ids[None]).last_hidden_state[0][[t - 1 for t in sampled]]
        log_p = (hf_model.lm_head(hidden) / 0.7).log_softmax(-1)[range(len(sampled)), token_ids[sampled]]
        squares.append((hidden @ weight[0] + bias - credit.returns).square())
        surrogates.append(-credit.advantages * log_p)
    value, policy = torch.cat(squares).mean() / 2, torch.cat(surrogates).mean()

    batches = pack(trajectories, credits, tokens_per_microbatch=60)
    assert len(batches) > 1
    # On a first update the values have not moved, so the bound is nowhere: values as before the update.
    batches = trainer.with_values(batches)
    actual, metrics = gradients_of(trainer, batches)
    head = torch.autograd.grad(value, [weight, bias], retain_graph=True)
    share = 0.7 if backbone == "shared" else 1.0
    expected = {"critic.head.weight": share * head[0], "critic.head.bias": share * head[1]}
    names, parameters = zip(*hf_model.named_parameters(), strict=True)
    if backbone == "shared":
        gradients = torch.autograd.grad(policy + 0.7 * value, parameters)
    else:
        gradients = torch.autograd.grad(policy, parameters, retain_graph=True)
        own = torch.autograd.grad(value, parameters, allow_unused=True)
        expected |= {
            f"critic.backbone.{name}": gradient
            for name, gradient in zip(names, own, strict=True)
            if name != "lm_head.weight"
        }
    expected |= {f"policy.{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    assert_equal_gradients(actual, expected, 2e-4)
    assert metrics["value_loss"] == pytest.approx(value.item(), rel=1e-5)
    assert metrics["value_clip_fraction"] == 0.0


def silent(num_tokens):
    turn = Turn(observation_ids=tuple(range(num_tokens)), action_ids=(), rollout_log_probs=())
    return Trajectory(group_id=0, episode_id="silent", turns=(turn,), reward=0.0, stop=Stop.MAX_TOKENS)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_gradient_is_the_same_for_every_cut_and_with_masked_sequences(
    make_model, make_trajectories, backbone, aggregation
):
    trajectories = make_trajectories(num=8)
    credits = credits_for(trajectories)
    nothing = TokenCredit(advantages=torch.zeros(0), values=torch.zeros(0), returns=torch.zeros(0))

    def result(*parts):
        settings = config(aggregation=aggregation, critic={"backbone": backbone})
        trainer = with_random_head(make_trainer(make_model(), settings))
        batches = []
        for part in parts:
            chosen = [silent(9) if i is None else trajectories[i] for i in part]
            numbers = [nothing if i is None else credits[i] for i in part]
            batches += pack(chosen, numbers, tokens_per_microbatch=BUDGET)
        return gradients_of(trainer, batches)

    whole, whole_metrics = result(range(8))
    assert 0 < whole_metrics["value_clip_fraction"] < 1  # the bound has something to do
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


class Engine:
    """Its log-probs are in the rollouts already."""

    def new_policy_version(self, version):
        pass


def play(make_model, groups, settings, num_steps=2):
    """Steps on the same rollout; returns the weights of policy and critic, and the numbers of the steps."""
    trainer = make_trainer(make_model(), settings)
    numbers = []
    train(
        trainer,
        trainer.make_reference(),
        Engine(),
        [Rollout(groups=groups, seconds=1.0)] * num_steps,
        settings,
        first_step=1,
        on_step=lambda step, metrics, rollout: numbers.append(metrics),
    )
    return trainer, numbers


def rollout_of(make_trajectories, num=6, group_size=1):
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(num, generator=generator).tolist()
    episodes = [
        [replace(t, group_id=i // group_size, reward=rewards[i], episode_id=str(i))]
        for i, t in enumerate(make_trajectories(num=num))
    ]
    return [episodes[i : i + group_size] for i in range(0, num, group_size)]


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_an_environment_failure_changes_nothing(make_model, make_trajectories, backbone):
    settings = config(critic={"backbone": backbone}, updates_per_batch=2)
    groups = rollout_of(make_trajectories)
    failed = [[replace(groups[0][0][0], stop=Stop.ENV_ERROR, reward=0.0, group_id=9)]]
    clean, clean_numbers = play(make_model, groups, settings)
    dirty, dirty_numbers = play(make_model, [failed, *groups[:3], [*groups[3], *failed], *groups[4:]], settings)
    for name, parameter in clean.model.state_dict().items():
        assert torch.equal(parameter, dirty.model.state_dict()[name]), name
    for name, parameter in clean.critic.state_dict().items():
        assert torch.equal(parameter, dirty.critic.state_dict()[name]), name
    for key in ("explained_variance", "value_loss", "return_mean"):
        assert [n[key] for n in clean_numbers] == [n[key] for n in dirty_numbers]
    with pytest.raises(RolloutError, match="there is no episode that can be trained on"):
        trainable_groups([failed], settings)


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_what_speaks_of_observations_changes_nothing(make_model, make_trajectories, backbone):
    settings = config(critic={"backbone": backbone})
    trajectories = make_trajectories()
    batches = pack(trajectories, credits_for(trajectories), tokens_per_microbatch=60)

    def garbled(batch):
        mask = batch.response_mask
        return replace(
            batch,
            target_ids=torch.where(mask, batch.target_ids, (batch.target_ids + 13) % 40),
            rollout_log_probs=torch.where(mask, batch.rollout_log_probs, torch.nan),
            advantages=torch.where(mask, batch.advantages, torch.inf),
            values=torch.where(mask, batch.values, torch.nan),
            returns=torch.where(mask, batch.returns, -torch.inf),
        )

    clean = with_random_head(make_trainer(make_model(), settings))
    dirty = with_random_head(make_trainer(make_model(), settings))
    expected, expected_metrics = gradients_of(clean, batches)
    actual, metrics = gradients_of(dirty, [garbled(batch) for batch in batches])
    assert metrics == expected_metrics
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize(("backbone", "explained"), [("own", 0.9), ("shared", 0.4)])
def test_the_critic_learns_what_episodes_earn(make_model, make_trajectories, backbone, explained):
    """The same six episodes again and again. A shared backbone learns with the policy's learning rate: slower."""
    settings = config(critic={"backbone": backbone, "learning_rate": 1e-2}, learning_rate=1e-3)
    _, numbers = play(make_model, rollout_of(make_trajectories), settings, num_steps=20)
    assert numbers[0]["explained_variance"] == 0.0
    assert numbers[-1]["explained_variance"] > explained
    assert numbers[-1]["value_loss"] < numbers[0]["value_loss"] / 2


def test_a_later_update_is_bounded_by_the_values_before_the_step(make_model, make_trajectories):
    """Values of the second update's episodes have moved with the first; those past the bound are counted."""
    settings = config(critic={"learning_rate": 3e-2, "value_clip": 0.05}, updates_per_batch=2)
    groups = rollout_of(make_trajectories)
    trainer = make_trainer(make_model(), settings)
    scores, _ = credited(trainer, None, groups, settings)
    first, second = ([*pack_update(part, settings)] for part in (scores[:3], scores[3:]))
    assert trainer.step(trainer.with_old_log_probs(first))["value_clip_fraction"] == 0.0
    moved, towards, total = [], [], 0
    for batch, now in zip(second, trainer.with_values(second), strict=True):
        mask = batch.response_mask
        v, old, ret = now.values[mask], batch.values[mask], batch.returns[mask]
        bounded = torch.minimum(torch.maximum(v, old - 0.05), old + 0.05)
        moved.append((v - old).abs() > 0.05)
        towards.append((bounded - ret).abs() >= (v - ret).abs())
        total += len(v)
    expected = (torch.cat(moved) & torch.cat(towards)).sum().item() / total
    assert 0 < expected < 1
    assert trainer.step(trainer.with_old_log_probs(second))["value_clip_fraction"] == pytest.approx(expected)


def test_pretraining_leaves_the_policy_alone(make_model, make_trajectories):
    settings = config(critic={"pretrain_steps": 2}, entropy_weight=0.1)
    groups = rollout_of(make_trajectories)
    trainer, numbers = play(make_model, groups, settings, num_steps=2)
    for name, parameter in make_model().state_dict().items():
        assert torch.equal(parameter, trainer.model.state_dict()[name]), name
    assert trainer.steps_done == 0
    assert [n["learning_rate"] for n in numbers] == [0.0, 0.0]
    assert numbers[0]["grad_norm"] > 0
    assert trainer.critic.head.weight.any()
    after, numbers = play(make_model, groups, settings, num_steps=3)
    assert after.steps_done == 1
    assert numbers[-1]["learning_rate"] > 0
    assert not torch.equal(after.model.lm_head.weight, make_model().lm_head.weight)


def test_a_critic_of_its_own_does_not_move_the_policy_nor_the_other_way(make_model, make_trajectories):
    # Two updates with the values from before the first: the second gradient reaches beyond the head, which was 0.
    groups = rollout_of(make_trajectories)
    slow, _ = play(make_model, groups, config(critic={"learning_rate": 0.0}, updates_per_batch=2), num_steps=1)
    fast, _ = play(make_model, groups, config(critic={"learning_rate": 0.1}, updates_per_batch=2), num_steps=1)
    for name, parameter in slow.model.state_dict().items():
        assert torch.equal(parameter, fast.model.state_dict()[name]), name
    assert not fast.critic.backbone.model.norm.weight.equal(slow.critic.backbone.model.norm.weight)
    assert slow.critic.backbone.model.norm.weight.equal(make_model().model.norm.weight)


def test_pop_art_by_hand(make_model):
    settings = config(critic={"normalize_returns": "popart"})
    critic = Critic(make_model(), settings)
    assert (critic.mean, critic.deviation) == (0.0, 1.0)
    # The first step's own numbers: 1, 3: mean 2, variance 1.
    critic.observe(torch.tensor([1.0, 3.0]))
    assert critic.mean == pytest.approx(2.0)
    assert critic.deviation == pytest.approx(1.0)
    # Weights 0.95 and 1 of (2; 1) and of (6; 4): share = 0.05 / (1 - 0.95^2) = 20 / 39, mean 2 + 80 / 39.
    critic.observe(torch.tensor([4.0, 8.0]))
    share = 20 / 39
    mean = 2 + 4 * share
    variance = (1 - share) * (1 + (mean - 2) ** 2) + share * (4 + (6 - mean) ** 2)
    assert critic.mean == pytest.approx(mean)
    assert critic.deviation == pytest.approx(math.sqrt(variance))
    # A large offset costs no digits, and equal returns leave a floor under the deviation.
    critic = Critic(make_model(), settings)
    critic.observe(torch.tensor([1e9, 1e9 + 1], dtype=torch.float64))
    assert critic.deviation == pytest.approx(0.5)
    critic = Critic(make_model(), settings)
    critic.observe(torch.tensor([0.1, 0.1, 0.1]))
    assert critic.deviation == 1e-4


def test_pop_art_keeps_every_value(make_model, make_trajectories):
    trainer = with_random_head(make_trainer(make_model(), config(critic={"normalize_returns": "popart"})))
    (batch,) = pack(make_trajectories(), torch.zeros(6), tokens_per_microbatch=BUDGET)
    (before,) = trainer.with_values([batch])
    weight = trainer.critic.head.weight.clone()
    trainer.critic.observe(torch.tensor([30.0, 50.0, 10.0]))
    (after,) = trainer.with_values([batch])
    torch.testing.assert_close(after.values, before.values, rtol=1e-5, atol=2e-5)
    assert not torch.allclose(trainer.critic.head.weight, weight)
    plain = with_random_head(make_trainer(make_model(), config()))
    plain.critic.observe(torch.tensor([30.0, 50.0, 10.0]))
    assert torch.equal(plain.critic.head.weight, weight)


@pytest.mark.parametrize(
    "critic", [{"normalize_returns": "popart", "pretrain_steps": 1}, {"backbone": "shared"}], ids=["own", "shared"]
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, make_model, make_trajectories, critic):
    settings = config(critic=critic, updates_per_batch=2)
    rollouts = [Rollout(groups=rollout_of(make_trajectories, num=n), seconds=1.0) for n in (6, 4, 5, 6)]

    def steps(trainer, first, last):
        seen = []
        train(
            trainer,
            None,
            Engine(),
            rollouts[first - 1 : last],
            settings,
            first_step=first,
            on_step=lambda step, metrics, rollout: seen.append(
                {name: v for name, v in metrics.items() if not name.endswith("_s")}
            ),
        )
        return seen

    straight = make_trainer(make_model(), settings)
    expected = steps(straight, 1, 4)
    interrupted = make_trainer(make_model(), settings)
    actual = steps(interrupted, 1, 2)
    save_checkpoint(
        tmp_path / "c",
        model=interrupted.model,
        optimizer=interrupted.optimizer,
        state={},
        save_tokenizer=lambda folder: None,
        critic=interrupted.critic,
    )
    resumed = make_trainer(make_model(seed=50), settings)
    load_checkpoint(tmp_path / "c", model=resumed.model, optimizer=resumed.optimizer, critic=resumed.critic)
    actual += steps(resumed, 3, 4)
    assert actual == expected
    for module, other in ((straight.model, resumed.model), (straight.critic, resumed.critic)):
        for name, parameter in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], parameter), name
    # With a critic that has forgotten the same steps lead elsewhere: the comparison can fail.
    forgetful = make_trainer(make_model(seed=50), settings)
    load_checkpoint(tmp_path / "c", model=forgetful.model, optimizer=forgetful.optimizer)
    assert steps(forgetful, 3, 4) != expected[2:]


def test_a_checkpoint_without_a_critic_is_refused(tmp_path, make_model):
    trainer = make_trainer(make_model(), config())
    save_checkpoint(
        tmp_path / "c",
        model=trainer.model,
        optimizer=trainer.optimizer,
        state={},
        save_tokenizer=lambda folder: None,
    )
    with pytest.raises(ValueError, match="holds no critic to go on with"):
        load_checkpoint(tmp_path / "c", model=trainer.model, optimizer=trainer.optimizer, critic=trainer.critic)


def test_what_is_missing_is_named(make_model, make_trajectories):
    settings = config()
    plain = Trainer(make_model(), settings)
    groups = rollout_of(make_trajectories)
    with pytest.raises(ValueError, match="the trainer has no critic"):
        credited(plain, None, groups, settings)
    with pytest.raises(ValueError, match='"gae" needs a critic'):
        scored(groups, settings)
    batches = pack(make_trajectories(), torch.ones(6), tokens_per_microbatch=BUDGET)
    with pytest.raises(ValueError, match="with_values needs a critic"):
        plain.with_values(batches)
    with pytest.raises(ValueError, match="batches with values and returns"):
        make_trainer(make_model(), settings).step(batches)
    assert make_critic(make_model(), Config()) is None
