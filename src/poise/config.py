"""Every knob of a run. A recipe is a function that returns a ``Config``; the command line overrides its fields.

Field comments become the help text of the command line: one line each, with the unit.
"""

import math
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(Exception):
    """A value or a combination that cannot work. The message is one sentence that names the key."""


class RunError(Exception):
    """A run that cannot go on. The message is one sentence that says what was found and what it means."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a checkpoint folder, or the shape of a new model with random weights."""

    path: str | None = None
    """Hugging Face checkpoint folder to start from; None makes a new model of the shape below with a byte tokenizer."""
    hidden_size: int = 128
    """Channels of the residual stream."""
    intermediate_size: int = 128
    """Channels inside each expert."""
    num_layers: int = 4
    """Blocks; even ones slide, odd ones see the whole sequence."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key/value heads; divides num_heads."""
    head_dim: int = 32
    """Channels per head; even."""
    num_experts: int = 8
    """Experts per layer."""
    experts_per_token: int = 2
    """Experts that each token is routed to."""
    sliding_window: int = 32
    """Tokens that a sliding layer sees, the token itself included."""
    rope: Literal["yarn", "default"] = "yarn"
    """Rotary positions: "yarn" as in the released models, "default" without its scaling."""
    rope_theta: float = 150_000.0
    """Base of the rotary wavelengths; the longest is about six times as many tokens."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:N"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "num_experts"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads ({self.num_kv_heads})",
        )
        _require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            f"model.head_dim must be an even number of at least 2, got {self.head_dim}",
        )
        _require(
            1 <= self.experts_per_token <= self.num_experts,
            f"model.experts_per_token must be 1..{self.num_experts} (num_experts), got {self.experts_per_token}",
        )
        _require_finite(self, "model", "rope_theta")
        _require(self.rope_theta > 1, f"model.rope_theta must exceed 1, got {self.rope_theta}")
        _require(self.sliding_window >= 1, f"model.sliding_window must be at least 1, got {self.sliding_window}")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the policy learns to do."""

    name: Literal["reasoning_gym", "gsm8k"] = "reasoning_gym"
    """Task: "reasoning_gym" (procedural problems with scorers) or "gsm8k" (rows of question and answer)."""
    dataset: str = "chain_sum"
    """Name of the reasoning-gym data set (task reasoning_gym)."""
    data: str | None = None
    """Training rows of task gsm8k: a .jsonl path or a Hugging Face data set id."""
    test_data: str | None = None
    """Held-out rows of task gsm8k: a .jsonl path or a Hugging Face data set id; None splits data."""
    num_train_rows: int = 100_000
    """Training problems generated (task reasoning_gym) or at most used (task gsm8k)."""
    num_test_rows: int = 200
    """Held-out problems generated (task reasoning_gym) or split off (task gsm8k without test_data)."""
    seed: int = 0
    """Seed of the generated problems; held-out problems use others."""
    tool_time_limit_s: float = 5.0
    """Wall-clock limit of one tool call, seconds."""
    describes_tools: bool = True
    """Put harmony's system message, with the tool's declaration, into the prompt; a tiny policy does without."""
    mental_share: float = 0.0
    """Share of demonstrations that answer at once, without a tool."""

    def __post_init__(self) -> None:
        _require(self.num_train_rows >= 1, f"task.num_train_rows must be at least 1, got {self.num_train_rows}")
        _require(self.num_test_rows >= 1, f"task.num_test_rows must be at least 1, got {self.num_test_rows}")
        _require(self.tool_time_limit_s > 0, f"task.tool_time_limit_s must be positive, got {self.tool_time_limit_s}")
        _require(0 <= self.mental_share <= 1, f"task.mental_share must be 0..1, got {self.mental_share}")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are sampled."""

    groups_per_step: int = 16
    """Problems per step."""
    group_size: int = 8
    """Episodes per problem."""
    max_turns: int = 4
    """Actions per episode at most."""
    max_action_tokens: int = 128
    """Sampled tokens per action at most."""
    max_context_tokens: int = 512
    """Tokens of an episode at most, prompt and tool results included."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in the trainer alike."""
    top_p: float = 1.0
    """Only 1.0: truncated sampling biases every importance ratio."""
    lockstep: bool = False
    """Sample only while no tool runs: slower, but the last digits then never depend on how long tools take."""
    num_slots: int = 128
    """Episodes that the embedded engine samples at once."""
    max_prefill_tokens: int = 8192
    """Prompt tokens that the embedded engine takes in one forward at most."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "max_turns", "max_action_tokens", "num_slots"):
            _require(getattr(self, name) >= 1, f"rollout.{name} must be at least 1, got {getattr(self, name)}")
        _require(
            self.max_prefill_tokens >= 1,
            f"rollout.max_prefill_tokens must be at least 1, got {self.max_prefill_tokens}",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"rollout.temperature must be a positive number, got {self.temperature}",
        )
        _require(
            self.top_p == 1.0,
            f"rollout.top_p must be 1.0 in training, got {self.top_p}: truncated sampling biases every ratio",
        )
        _require(
            self.max_context_tokens > self.max_action_tokens,
            f"rollout.max_context_tokens ({self.max_context_tokens}) must exceed rollout.max_action_tokens "
            f"({self.max_action_tokens})",
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The objective."""

    loss: Literal["clip", "dual_clip", "gspo", "cispo", "reinforce"] = "clip"
    """Policy loss: "clip" (PPO, GRPO, DAPO), "dual_clip", "gspo" (ratio of the sequence), "cispo", "reinforce"."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over "token" (DAPO), of "sequence" means (GRPO), or sums over max_context_tokens: "constant" (Dr.GRPO)."""
    normalize_advantages: Literal["std", "none", "leave_one_out", "global"] = "std"
    """Baseline: "std" (GRPO), "none" (mean only, Dr.GRPO), "leave_one_out" (RLOO), "global" (REINFORCE++)."""
    credit: Literal["episode", "turn"] = "episode"
    """One advantage an "episode", or one a "turn", from the rewards at and after it."""
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
    """Weights trainer / engine: "truncate" (TIS) above correction_high, or "mask" outside low..high (IcePop)."""
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
        _require_finite(self, "algorithm", "clip_high", "kl_weight", "entropy_weight", "max_mismatch", "reject_above")
        _require_finite(self, "algorithm", "dual_clip", "correction_high")
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
            _require(is_allowed, f"algorithm.{name} must be {allowed}, got {getattr(self, name)}")
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
            ("kl_in kl_estimator", self.kl_weight > 0, "a positive algorithm.kl_weight"),
            ("kl_estimator", self.kl_in == "loss", 'algorithm.kl_in "loss"'),
            ("correction_level correction_high normalize_correction", has_correction, "algorithm.correction"),
            ("correction_low", self.correction == "mask", 'algorithm.correction "mask"'),
            ("reject_estimator", self.reject_by != "none", "algorithm.reject_by"),
        ):
            for name in names.split():
                is_default = getattr(self, name) == type(self).__dataclass_fields__[name].default
                _require(is_read or is_default, f"algorithm.{name} does nothing without {needs}")
        _require(
            self.replay_routes != "trainer" or self.updates_per_batch > 1,
            'algorithm.replay_routes "trainer" needs algorithm.updates_per_batch of 2 or more: one update has one pass',
        )

    @property
    def rejects(self) -> bool:
        return self.reject_by != "none" or self.veto_below > 0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 5
    """Steps over which the learning rate rises linearly to its peak."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms, biases and sinks are exempt."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        _require_finite(self, "optimizer", "learning_rate", "weight_decay", "max_grad_norm")
        _require(self.learning_rate >= 0, f"optimizer.learning_rate must be at least 0, got {self.learning_rate}")
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps must be at least 0, got {self.warmup_steps}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")
        _require(self.max_grad_norm > 0, f"optimizer.max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps on the task's demonstrations, before reinforcement learning or by `poise sft`."""

    steps: int = 0
    """Supervised steps; 0 starts from the policy as it is."""
    demonstrations_per_step: int = 64
    """Demonstrations per supervised step."""
    learning_rate: float = 2e-3
    """Peak learning rate of the supervised steps; falls to a tenth along a cosine."""
    warmup_steps: int = 20
    """Supervised steps over which the learning rate rises linearly."""

    def __post_init__(self) -> None:
        _require(self.steps >= 0, f"warm_start.steps must be at least 0, got {self.steps}")
        _require(
            self.demonstrations_per_step >= 1,
            f"warm_start.demonstrations_per_step must be at least 1, got {self.demonstrations_per_step}",
        )
        _require_finite(self, "warm_start", "learning_rate")
        _require(self.learning_rate > 0, f"warm_start.learning_rate must be positive, got {self.learning_rate}")
        _require(self.warmup_steps >= 0, f"warm_start.warmup_steps must be at least 0, got {self.warmup_steps}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, memory and bookkeeping of a run."""

    steps: int = 100
    """Batches of rollouts."""
    seed: int = 0
    """Seed of weights, sampling and order of the data."""
    folder: str = "runs"
    """A run's folder is made inside this one."""
    name: str = "run"
    """Start of the run folder's name; a number is added, so nothing is overwritten."""
    tokens_per_microbatch: int = 8192
    """Packed tokens per forward and backward."""
    recompute: Literal["none", "experts", "block"] = "none"
    """What the backward pass computes again instead of keeping; "experts" keeps attention's part of a block."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    eval_every: int = 0
    """Steps between evaluations on the held-out problems; 0: before and after only."""
    eval_problems: int = 200
    """Held-out problems per evaluation; 0: all."""
    log_trajectories_every: int = 10
    """Steps between trajectory files; 0 writes none."""
    trackers: tuple[Literal["tensorboard"], ...] = ()
    """Loggers beside metrics.jsonl: "tensorboard"."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_microbatch", "save_every"):
            _require(getattr(self, name) >= 1, f"run.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_every", "eval_problems", "log_trajectories_every"):
            _require(getattr(self, name) >= 0, f"run.{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.model.path is None:
            _require(
                self.model.sliding_window <= self.rollout.max_context_tokens,
                f"model.sliding_window ({self.model.sliding_window}) is larger than rollout.max_context_tokens "
                f"({self.rollout.max_context_tokens})",
            )
        has_group_of_one = self.algorithm.normalize_advantages == "global" and self.algorithm.max_resamples == 0
        _require(
            self.rollout.group_size > 1 or has_group_of_one,
            "rollout.group_size must be at least 2: a group baseline needs siblings, and so does max_resamples",
        )
        _require(
            self.algorithm.overlong_buffer_tokens <= self.rollout.max_context_tokens,
            f"algorithm.overlong_buffer_tokens ({self.algorithm.overlong_buffer_tokens}) must not exceed "
            f"rollout.max_context_tokens ({self.rollout.max_context_tokens})",
        )
        _require(
            self.run.tokens_per_microbatch >= self.rollout.max_context_tokens,
            f"run.tokens_per_microbatch ({self.run.tokens_per_microbatch}) must hold one episode of "
            f"rollout.max_context_tokens ({self.rollout.max_context_tokens})",
        )
        _require(
            self.algorithm.updates_per_batch <= self.rollout.groups_per_step,
            f"algorithm.updates_per_batch ({self.algorithm.updates_per_batch}) must not exceed "
            f"rollout.groups_per_step ({self.rollout.groups_per_step}): each update takes whole groups",
        )


def _require_finite(section: object, name: str, *fields: str) -> None:
    for field_name in fields:
        value = getattr(section, field_name)
        _require(math.isfinite(value), f"{name}.{field_name} must be a finite number, got {value}")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
