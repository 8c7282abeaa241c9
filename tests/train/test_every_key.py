"""Every key of objective, critic and optimizer changes the result of a tiny run of each recipe, or raises."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from poise.config import AlgorithmConfig, Config, ConfigError, CriticConfig, OptimizerConfig, RolloutConfig
from poise.loop import Rollout, train
from poise.recipes import RECIPES
from poise.train.critic import make_critic
from poise.train.packing import pack
from poise.train.trainer import MismatchError, Trainer
from poise.types import Stop

# What each key is changed to, and the keys that must be set for it to be read.
SEVERAL = {"updates_per_batch": 3}
ALGORITHM = {
    "loss": ("gspo", SEVERAL),
    "aggregation": ("sequence", {}),
    "normalize_advantages": ("global", {}),
    "credit": ("turn", {}),
    "turn_discount": (0.5, {"credit": "turn"}),
    "clip_low": (0.01, SEVERAL),
    "clip_high": (0.01, SEVERAL),
    "dual_clip": (1.01, SEVERAL | {"loss": "dual_clip"}),
    "overlong": ("filter", {}),
    "overlong_buffer_tokens": (30, {"overlong": "penalty", "overlong_buffer_tokens": 25}),
    "kl_weight": (0.1, {}),
    "kl_in": ("reward", {"kl_weight": 0.1}),
    "kl_estimator": ("k3", {"kl_weight": 10.0}),
    "entropy_weight": (0.1, {}),
    "updates_per_batch": (2, {}),
    "correction": ("truncate", {}),
    "correction_level": ("sequence", {"correction": "truncate"}),
    "correction_low": (0.99, {"correction": "mask"}),
    "correction_high": (1.01, {"correction": "truncate"}),
    "normalize_correction": (True, {"correction": "truncate"}),
    "reject_by": ("mean", {"reject_by": "max", "reject_above": 0.7}),
    "reject_estimator": ("k3", {"reject_by": "sum", "reject_above": 1.2}),
    "reject_above": (0.15, {"reject_by": "mean", "reject_above": 1e9}),
    "veto_below": (0.5, {}),
    "replay_routes": ("engine", {}),
    "recompute_old_log_probs": ("bfloat16", {}),
}
PPO = {"normalize_advantages": "gae", "updates_per_batch": 2}
# With PPO's keys beneath, what needs another value to have something to do.
PPO_ALGORITHM = {
    "clip_high": (50.0, {}),  # what moves up moves past both of the other bounds
    "updates_per_batch": (3, {}),
}
CRITIC = {
    "backbone": ("shared", {}),
    "gamma": (0.9, {}),
    "lam": (0.9, {}),
    "whiten_advantages": (False, {}),
    "learning_rate": (0.3, {}),
    "pretrain_steps": (1, {}),
    "value_clip": (0.01, {}),
    "value_weight": (0.1, {"backbone": "shared"}),
    "normalize_returns": ("popart", {}),
}
OPTIMIZER = {
    "learning_rate": 0.01,
    "warmup_steps": 3,
    "beta1": 0.5,
    "beta2": 0.5,
    "weight_decay": 0.1,
    "max_grad_norm": 1e-9,  # Adam forgets the scale of a gradient, but not next to its epsilon of 1e-8
}


ROLLOUT = RolloutConfig(temperature=0.7, max_context_tokens=40, max_action_tokens=10)


class Engine:
    """Its log-probs are in the rollouts already."""

    def new_policy_version(self, version):
        pass


@pytest.fixture
def play(make_model, make_trajectories):
    """Two steps on fixed rollouts in which every option has something to do; returns the weights.

    Turn rewards, episodes that were cut, some near the limit of 40 tokens, an engine that differs, arbitrary routes.
    """
    generator = np.random.default_rng(0)
    trainer = Trainer(make_model(), Config(rollout=ROLLOUT))
    groups = [[], [], []]
    for number, trajectory in enumerate(make_trajectories(num=9)):
        (batch,) = trainer.with_old_log_probs(pack([trajectory], torch.zeros(1), tokens_per_microbatch=99))
        engine = iter(
            (batch.old_log_probs[batch.response_mask] + 0.3 * torch.randn(batch.num_response_tokens)).tolist()
        )
        turns = []
        for turn in trajectory.turns:
            num_tokens = len(turn.observation_ids) + len(turn.action_ids)
            routes = np.stack([generator.permutation(4)[:2] for _ in range(2 * num_tokens)]).reshape(-1, 2, 2)
            turns.append(
                replace(
                    turn,
                    reward=float(generator.integers(3)),
                    rollout_log_probs=tuple(next(engine) for _ in turn.action_ids),
                    routes=routes.astype(np.int16),
                )
            )
        stop = Stop.MAX_TOKENS if number % 3 == 2 else Stop.DONE
        changes = {"turns": tuple(turns), "group_id": number // 3, "reward": float(generator.normal()), "stop": stop}
        groups[number // 3].append([replace(trajectory, **changes)])

    def run(algorithm, optimizer, critic=None, **sizes):
        # Everything is far from the engine here, so the bound on the mismatch is out of the way unless asked for.
        config = Config(
            rollout=ROLLOUT,
            algorithm=AlgorithmConfig(**{"max_mismatch": 1e9} | algorithm),
            critic=CriticConfig(**critic or {}),
            optimizer=OptimizerConfig(**{"learning_rate": 0.03, "warmup_steps": 0} | optimizer),
        )
        model = make_model(**sizes)
        trainer = Trainer(model, config, critic=make_critic(model, config))
        rollouts = [Rollout(groups=groups, seconds=1.0)] * 2
        train(trainer, trainer.make_reference(), Engine(), rollouts, config, first_step=1, on_step=lambda *_: None)
        return trainer.model.state_dict()

    return run


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("key", ALGORITHM)
def test_a_key_of_the_algorithm_changes_the_result(play, key):
    value, needs = ALGORITHM[key]
    # Rejection needs a policy that stays near the engine's.
    optimizer = {"learning_rate": 1e-4} if "reject" in key or "veto" in key else {}
    before = play(needs, optimizer)
    assert equal(play(needs, optimizer), before), "the run itself must repeat"
    assert not equal(play(needs | {key: value}, optimizer), before)


def changes(section):
    """The keys of a section that are not at their default."""
    return {
        f.name: getattr(section, f.name) for f in dataclasses.fields(section) if getattr(section, f.name) != f.default
    }


def test_the_objectives_walked_here_are_those_of_the_recipes():
    assert changes(RECIPES["arithmetic_tiny"]().algorithm) == {}
    assert changes(RECIPES["ppo_tiny"]().algorithm) == PPO


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_of_the_objective_that_a_recipe_sets_matters(play, name):
    """Put back to its default, it leaves another result, or is refused."""
    recipe = RECIPES[name]()
    algorithm, critic, optimizer = (changes(part) for part in (recipe.algorithm, recipe.critic, recipe.optimizer))
    algorithm |= {"max_mismatch": 1e9}  # these rollouts are far from the policy
    if "overlong_buffer_tokens" in algorithm:
        algorithm["overlong_buffer_tokens"] = 25  # of their 40 tokens at most
    before = play(algorithm, optimizer, critic)
    # Sampling acts elsewhere; and bounds on a ratio that is 1 are kept for the day on which it is not.
    idle = {"max_mismatch", "max_resamples"}
    if recipe.algorithm.updates_per_batch == 1:
        idle |= {"clip_low", "clip_high"}
    for keys, position in ((algorithm, 0), (critic, 2), (optimizer, 1)):
        for key in keys.keys() - idle:
            arguments = [algorithm, optimizer, critic]
            arguments[position] = {k: v for k, v in keys.items() if k != key}
            try:
                after = play(*arguments)
            except ConfigError:
                continue
            assert not equal(after, before), key


@pytest.mark.parametrize("key", CRITIC)
def test_a_key_of_the_critic_changes_the_result(play, key):
    value, needs = CRITIC[key]
    needs = {"learning_rate": 0.1} | needs
    before = play(PPO, {}, needs)
    assert equal(play(PPO, {}, needs), before), "the run itself must repeat"
    assert not equal(play(PPO, {}, needs | {key: value}), before)


@pytest.mark.parametrize("key", ALGORITHM)
def test_a_key_of_the_algorithm_changes_the_result_with_a_critic_or_raises(play, key):
    value, needs = PPO_ALGORITHM.get(key, ALGORITHM[key])
    needs = PPO | needs
    if key == "turn_discount":
        with pytest.raises(ConfigError, match=r"critic\.gamma discounts"):
            AlgorithmConfig(**needs | {key: value})
        return
    optimizer = {"learning_rate": 1e-4} if "reject" in key or "veto" in key else {}
    before = play(needs, optimizer)
    assert not equal(play(needs | {key: value}, optimizer), before)


@pytest.mark.parametrize("key", OPTIMIZER)
@pytest.mark.parametrize("algorithm", [{}, PPO], ids=["groups", "critic"])
def test_a_key_of_the_optimizer_changes_the_result(play, algorithm, key):
    assert not equal(play(algorithm, {key: OPTIMIZER[key]}), play(algorithm, {}))


def test_the_packed_reference_changes_the_result(play):
    sizes = {"hidden_size": 32, "intermediate_size": 32}  # what MXFP4 can hold
    before = play({"kl_weight": 10.0}, {}, **sizes)
    assert not equal(play({"kl_weight": 10.0, "reference_experts": "mxfp4"}, {}, **sizes), before)


def test_the_bound_on_the_mismatch_raises(play):
    with pytest.raises(MismatchError):
        play({"max_mismatch": 1e-3}, {})


def test_no_key_is_forgotten():
    # `max_resamples` acts on the rollout, see test_loop.py.
    own = {"max_mismatch", "reference_experts"}  # tests of their own, above
    assert {*ALGORITHM, *own, "max_resamples"} == {f.name for f in dataclasses.fields(AlgorithmConfig)}
    assert set(CRITIC) == {f.name for f in dataclasses.fields(CriticConfig)}
    assert set(OPTIMIZER) == {f.name for f in dataclasses.fields(OptimizerConfig)}
