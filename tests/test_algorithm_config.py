"""A key that nothing would read is refused, in one sentence that names it."""

import dataclasses

import pytest

from poise.config import AlgorithmConfig, Config, ConfigError, CriticConfig, RolloutConfig


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"dual_clip": 2.0}, 'algorithm.dual_clip does nothing without algorithm.loss "dual_clip"'),
        ({"loss": "dual_clip", "dual_clip": 1.0}, "algorithm.dual_clip must be above 1, got 1.0"),
        ({"loss": "reinforce", "clip_low": 0.1}, 'algorithm.clip_low .* which algorithm.loss "reinforce" lacks'),
        ({"loss": "reinforce", "clip_high": 0.1}, "algorithm.clip_high does nothing"),
        ({"loss": "reinforce", "recompute_old_log_probs": "bfloat16"}, "recompute_old_log_probs does nothing"),
        ({"turn_discount": 0.9}, 'algorithm.turn_discount does nothing without algorithm.credit "turn"'),
        ({"normalize_advantages": "gae", "credit": "turn", "turn_discount": 0.9}, "critic.gamma discounts"),
        ({"credit": "turn", "turn_discount": 1.1}, r"algorithm.turn_discount must be in \[0, 1\], got 1.1"),
        ({"kl_in": "reward"}, "algorithm.kl_in does nothing without a positive algorithm.kl_weight"),
        ({"kl_estimator": "k3"}, "algorithm.kl_estimator does nothing without a positive algorithm.kl_weight"),
        ({"kl_weight": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, 'does nothing without algorithm.kl_in "loss"'),
        ({"correction_level": "sequence"}, "correction_level does nothing without algorithm.correction"),
        ({"correction_high": 3.0}, "correction_high does nothing without algorithm.correction"),
        ({"normalize_correction": True}, "normalize_correction does nothing without algorithm.correction"),
        ({"correction": "truncate", "correction_low": 0.1}, 'correction_low does nothing .* "mask"'),
        ({"correction": "mask", "correction_low": 1.1}, r"correction_low must be in \[0, 1\], got 1.1"),
        ({"correction": "mask", "correction_high": 0.9}, "correction_high must be at least 1, got 0.9"),
        ({"reject_above": 0.1}, "reject_above must be positive with algorithm.reject_by, and 0 without, got 0.1"),
        ({"reject_by": "mean"}, "reject_above must be positive with algorithm.reject_by, and 0 without, got 0.0"),
        ({"reject_estimator": "k3"}, "reject_estimator does nothing without algorithm.reject_by"),
        ({"veto_below": 1.0}, r"veto_below must be in \[0, 1\), got 1.0"),
        ({"overlong": "penalty"}, 'overlong_buffer_tokens must be positive with algorithm.overlong "penalty"'),
        ({"overlong_buffer_tokens": 3}, 'overlong_buffer_tokens must be positive .* and 0 without, got 3'),
        ({"max_resamples": -1}, "max_resamples must be at least 0, got -1"),
        ({"replay_routes": "trainer"}, "updates_per_batch of 2 or more"),
    ],
)  # fmt: skip
def test_refused(algorithm, sentence):
    with pytest.raises(ConfigError, match=sentence):
        AlgorithmConfig(**algorithm)


@pytest.mark.parametrize(
    ("critic", "sentence"),
    [
        ({"gamma": 1.1}, r"critic.gamma must be in \[0, 1\], got 1.1"),
        ({"lam": -0.1}, r"critic.lam must be in \[0, 1\], got -0.1"),
        ({"learning_rate": -1.0}, "critic.learning_rate must be at least 0, got -1.0"),
        ({"learning_rate": float("inf")}, "critic.learning_rate must be a finite number"),
        ({"pretrain_steps": -1}, "critic.pretrain_steps must be at least 0, got -1"),
        ({"value_clip": -0.2}, "critic.value_clip must be at least 0, got -0.2"),
        ({"backbone": "shared", "value_weight": 0.0}, "critic.value_weight must be positive, got 0.0"),
        ({"value_weight": 1.0}, 'critic.value_weight does nothing without critic.backbone "shared"'),
        ({"backbone": "shared", "pretrain_steps": 3}, 'critic.pretrain_steps needs critic.backbone "own"'),
    ],
)
def test_refused_of_the_critic(critic, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CriticConfig(**critic)


@pytest.mark.parametrize("field", dataclasses.fields(CriticConfig), ids=lambda field: field.name)
def test_a_key_of_the_critic_is_refused_where_there_is_none(field):
    value = {"backbone": "shared", "normalize_returns": "popart", "whiten_advantages": False, "pretrain_steps": 1}
    critic = {field.name: value.get(field.name, 0.3)} | ({"backbone": "shared"} if "weight" in field.name else {})
    with pytest.raises(ConfigError, match=r'critic.\w+ does nothing without algorithm.normalize_advantages "gae"'):
        Config(critic=CriticConfig(**critic))


def test_refused_together():
    single = RolloutConfig(group_size=1)
    for algorithm in ({}, *({"normalize_advantages": name, "max_resamples": 1} for name in ("global", "gae"))):
        with pytest.raises(ConfigError, match="group_size must be at least 2"):
            Config(rollout=single, algorithm=AlgorithmConfig(**algorithm))
    for name in ("global", "gae"):
        Config(rollout=single, algorithm=AlgorithmConfig(normalize_advantages=name))
    with pytest.raises(ConfigError, match=r"critic.value_clip does nothing with algorithm.updates_per_batch of 1"):
        Config(algorithm=AlgorithmConfig(normalize_advantages="gae"), critic=CriticConfig(value_clip=0.1))
    with pytest.raises(ConfigError, match=r"overlong_buffer_tokens \(600\) must not exceed"):
        Config(algorithm=AlgorithmConfig(overlong="penalty", overlong_buffer_tokens=600))


def test_defaults_are_accepted_everywhere():
    # Naming a key with its default changes nothing, so it is no error.
    values = {field.name: field.default for field in dataclasses.fields(AlgorithmConfig)}
    assert AlgorithmConfig(**values | {"loss": "reinforce"}).loss == "reinforce"
