"""One run, whole: its sections, and what must hold between them."""

from dataclasses import dataclass, field, replace

from poise.config.algorithm import AlgorithmConfig
from poise.config.critic import CriticConfig
from poise.config.engine import EngineConfig
from poise.config.errors import require
from poise.config.model import ModelConfig
from poise.config.parallel import ParallelConfig
from poise.config.rollout import RolloutConfig
from poise.config.sandbox import SandboxConfig
from poise.config.task import TaskConfig
from poise.config.training import OptimizerConfig, RunConfig, WarmStartConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.rollout.max_staleness > 0 and self.algorithm.correction == "none":
            # Tokens of an older policy, uncorrected, bias every gradient: so the correction is on by default then.
            object.__setattr__(self, "algorithm", replace(self.algorithm, correction="truncate"))
        if self.model.path is None:
            require(
                self.model.sliding_window <= self.rollout.max_context_tokens,
                f"model.sliding_window ({self.model.sliding_window}) is larger than rollout.max_context_tokens "
                f"({self.rollout.max_context_tokens})",
            )
        require(
            self.engine.kind == "embedded"
            or self.rollout.max_prefill_tokens == RolloutConfig.__dataclass_fields__["max_prefill_tokens"].default,
            f'rollout.max_prefill_tokens does nothing with engine.kind "{self.engine.kind}"',
        )
        require(
            self.engine.kind != "sglang" or self.rollout.max_staleness == 0,
            'rollout.max_staleness needs engine.kind "embedded" or "vllm": SGLang does not say which weights sampled a '
            "token",
        )
        require(
            self.task.runs_code or self.task.name == "custom" or self.sandbox == SandboxConfig(),
            f"sandbox keys do nothing here: task {self.task.name} runs no code of its own",
        )
        has_group_of_one = not self.algorithm.has_group_baseline and self.algorithm.max_resamples == 0
        require(
            self.rollout.group_size > 1 or has_group_of_one,
            "rollout.group_size must be at least 2: a group baseline needs siblings, and so does max_resamples",
        )
        for name in self.critic.changed:
            require(
                self.algorithm.normalize_advantages == "gae",
                f'critic.{name} does nothing without algorithm.normalize_advantages "gae": there is no critic',
            )
        require(
            "value_clip" not in self.critic.changed or self.algorithm.updates_per_batch > 1,
            "critic.value_clip does nothing with algorithm.updates_per_batch of 1: no value has moved yet",
        )
        require(
            self.algorithm.overlong_buffer_tokens <= self.rollout.max_context_tokens,
            f"algorithm.overlong_buffer_tokens ({self.algorithm.overlong_buffer_tokens}) must not exceed "
            f"rollout.max_context_tokens ({self.rollout.max_context_tokens})",
        )
        require(
            self.run.tokens_per_microbatch >= self.rollout.max_context_tokens,
            f"run.tokens_per_microbatch ({self.run.tokens_per_microbatch}) must hold one episode of "
            f"rollout.max_context_tokens ({self.rollout.max_context_tokens})",
        )
        require(
            self.algorithm.updates_per_batch <= self.rollout.groups_per_step,
            f"algorithm.updates_per_batch ({self.algorithm.updates_per_batch}) must not exceed "
            f"rollout.groups_per_step ({self.rollout.groups_per_step}): each update takes whole groups",
        )
