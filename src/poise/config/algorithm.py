"""The objective's keys."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require, require_finite


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The objective."""

    loss: Literal["clip", "dual_clip", "gspo", "cispo", "reinforce"] = "clip"
    """Policy loss: "clip" (PPO, GRPO, DAPO), "dual_clip", "gspo" (ratio of the sequence), "cispo", "reinforce"."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over "token" (DAPO), of "sequence" means (GRPO), or sums over max_context_tokens: "constant" (Dr.GRPO)."""
    normalize_advantages: Literal["std", "none", "leave_one_out", "global", "gae"] = "std"
    """Baseline: "std" (GRPO), "none" (mean, Dr.GRPO), "leave_one_out" (RLOO), "global" (REINFORCE++), "gae" (PPO)."""
    credit: Literal["episode", "turn"] = "episode"
    """One advantage an "episode", or one a "turn", from the rewards at and after it; gae: which rewards there are."""
    turn_discount: float = 1.0
    """Discount between turns, in [0, 1] (credit turn)."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = 3.0
    """Where the advantage is negative, the loss is at most dual_clip times its size (loss dual_clip)."""
    overlong: Literal["train", "filter", "penalty"] = "train"
    """Episodes cut by a limit of tokens: "train" on them, "filter" them out, or a soft "penalty" on long ones."""
    overlong_buffer_tokens: int = 0
    """The penalty rises from 0 to 1 over the last so many of max_context_tokens (overlong penalty)."""
    max_resamples: int = 0
    """Rounds in which groups of equal rewards are sampled anew, with other problems (dynamic sampling, DAPO)."""
    kl_weight: float = 0.0
    """Weight of the KL to the frozen reference; 0 loads no reference."""
    reference_experts: Literal["plain", "mxfp4"] = "plain"
    """The reference's experts: "plain", or "mxfp4": 4.25 bits a weight, exact for a policy as it was released."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: into the "loss", or, as k1 summed over the episode, off its "reward"."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """Estimator of the KL in the loss: k2 has the gradient of the reverse KL, k3 has not."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""
    updates_per_batch: int = 1
    """Optimizer steps per batch of rollouts; at 1 the ratio is exactly 1."""
    max_mismatch: float = 1e-3
    """Largest mean |trainer - engine| log-prob (nats) with which step 0 goes on."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Weights trainer / engine: "truncate" (TIS) above correction_high (with rollout.max_staleness at least that), or
    "mask" outside low..high (IcePop)."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whose ratio is the weight: the "token"'s or the "sequence"'s."""
    correction_low: float = 0.5
    """Ratios below are masked (correction mask)."""
    correction_high: float = 2.0
    """Ratios above are truncated or masked."""
    normalize_correction: bool = False
    """Divide the weights by their mean over the optimizer step; costs one more forward pass."""
    reject_by: Literal["none", "sum", "mean", "max"] = "none"
    """Reject an episode where this statistic over a stream's tokens, of the engine-trainer KL, exceeds reject_above."""
    reject_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator in that statistic; of k1, the absolute value."""
    reject_above: float = 0.0
    """Bound of that statistic, nats; must be positive with reject_by."""
    veto_below: float = 0.0
    """Reject an episode with a token of trainer / engine ratio below this; 0: none."""
    replay_routes: Literal["none", "trainer", "engine"] = "none"
    """Experts in training: the router's own, those of the "trainer" before its updates (R2), of the "engine" (R3)."""
    recompute_old_log_probs: Literal["none", "float32", "bfloat16"] = "none"
    """An experiment: old log-probs from a separate pass in this type, which breaks the ratio of 1."""

    def __post_init__(self) -> None:
        require_finite(self, "algorithm", "clip_high", "kl_weight", "entropy_weight", "max_mismatch", "reject_above")
        require_finite(self, "algorithm", "dual_clip", "correction_high")
        for name, is_allowed, allowed in (
            ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
            ("clip_high", self.clip_high > 0, "positive"),
            ("dual_clip", self.dual_clip > 1, "above 1"),
            ("turn_discount", 0 <= self.turn_discount <= 1, "in [0, 1]"),
            ("max_resamples", self.max_resamples >= 0, "at least 0"),
            ("kl_weight", self.kl_weight >= 0, "at least 0"),
            ("updates_per_batch", self.updates_per_batch >= 1, "at least 1"),
            ("max_mismatch", self.max_mismatch > 0, "positive"),
            ("correction_low", 0 <= self.correction_low <= 1, "in [0, 1]"),
            ("correction_high", self.correction_high >= 1, "at least 1"),
            ("veto_below", 0 <= self.veto_below < 1, "in [0, 1)"),
            ("reject_above", (self.reject_above > 0) == (self.reject_by != "none"),
             "positive with algorithm.reject_by, and 0 without"),
            ("overlong_buffer_tokens", (self.overlong_buffer_tokens > 0) == (self.overlong == "penalty"),
             'positive with algorithm.overlong "penalty", and 0 without'),
        ):  # fmt: skip
            require(is_allowed, f"algorithm.{name} must be {allowed}, got {getattr(self, name)}")
        # A key that nothing reads must not be set.
        has_ratio, has_correction = self.loss != "reinforce", self.correction != "none"
        for names, is_read, needs in (
            ("dual_clip", self.loss == "dual_clip", 'algorithm.loss "dual_clip"'),
            (
                "clip_low clip_high recompute_old_log_probs",
                has_ratio,
                'a ratio, which algorithm.loss "reinforce" lacks',
            ),
            ("turn_discount", self.credit == "turn", 'algorithm.credit "turn"'),
            ("turn_discount", self.normalize_advantages != "gae", "a baseline of episodes; critic.gamma discounts"),
            ("kl_in kl_estimator reference_experts", self.kl_weight > 0, "a positive algorithm.kl_weight"),
            ("kl_estimator", self.kl_in == "loss", 'algorithm.kl_in "loss"'),
            ("correction_level correction_high normalize_correction", has_correction, "algorithm.correction"),
            ("correction_low", self.correction == "mask", 'algorithm.correction "mask"'),
            ("reject_estimator", self.reject_by != "none", "algorithm.reject_by"),
        ):
            for name in names.split():
                is_default = getattr(self, name) == type(self).__dataclass_fields__[name].default
                require(is_read or is_default, f"algorithm.{name} does nothing without {needs}")
        require(
            self.replay_routes != "trainer" or self.updates_per_batch > 1,
            'algorithm.replay_routes "trainer" needs algorithm.updates_per_batch of 2 or more: one update has one pass',
        )

    @property
    def has_group_baseline(self) -> bool:
        """Whether an episode is compared with its siblings, of which it then needs at least one."""
        return self.normalize_advantages not in ("global", "gae")

    @property
    def rejects(self) -> bool:
        return self.reject_by != "none" or self.veto_below > 0
