"""The task's keys."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require, require_finite

_WITH_QUESTIONS = ("reasoning_gym", "gsm8k", "retool")
_BUILT_IN = (*_WITH_QUESTIONS, "verifyif")
_WITH_FILES = ("gsm8k", "retool", "verifyif")
READ_BY: dict[str, tuple[str, ...]] = {
    "factory": ("custom",),
    "num_train_rows": _BUILT_IN,
    "num_test_rows": _BUILT_IN,
    "seed": _BUILT_IN,
    "describes_tools": _BUILT_IN,
    "dataset": ("reasoning_gym",),
    "data": _WITH_FILES,
    "test_data": _WITH_FILES,
    "tool": _WITH_QUESTIONS,
    "tool_time_limit_s": _WITH_QUESTIONS,
    "tool_output_bytes": _WITH_QUESTIONS,
    "mental_share": _WITH_QUESTIONS,
    "format_penalty": ("retool",),
    "no_code_penalty": ("retool",),
    "length_penalty": ("retool",),
    "length_characters": ("retool",),
    "checkers": ("verifyif",),
    "instructions": ("verifyif",),
    "max_instructions": ("verifyif",),
    "score": ("verifyif",),
}
"""Tasks that read a key."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the policy learns to do."""

    name: Literal["reasoning_gym", "gsm8k", "retool", "verifyif", "custom"] = "reasoning_gym"
    """"reasoning_gym" (procedural), "gsm8k", "retool" (mathematics, code), "verifyif" (instructions), "custom"."""
    factory: str | None = None
    """Task custom: MODULE:FUNCTION, imported from the folder of the start or what is installed; it makes the task."""
    dataset: str = "chain_sum"
    """Name of the reasoning-gym data set (task reasoning_gym)."""
    data: str | None = None
    """Training rows: a .jsonl, .json or .parquet path, or a Hugging Face id; verifyif has seed prompts of its own."""
    test_data: str | None = None
    """Held-out rows: a path or a Hugging Face id as in data; None splits data."""
    num_train_rows: int = 100_000
    """Training problems generated (reasoning_gym, verifyif) or at most used (gsm8k, retool)."""
    num_test_rows: int = 200
    """Held-out problems generated (reasoning_gym, verifyif) or split off (gsm8k, retool), without test_data."""
    seed: int = 0
    """Seed of the generated problems and of the split; held-out problems use others."""
    tool: Literal["python", "function", "none"] = "python"
    """"python": the tool GPT-OSS knows, raw code; "function": functions.python with JSON; "none": a single turn."""
    tool_time_limit_s: float = 5.0
    """Wall-clock limit of one tool call, seconds."""
    tool_output_bytes: int = 8192
    """Bytes of a tool's output that the policy sees; of longer output the middle is cut, and the cut is said."""
    describes_tools: bool = True
    """Put harmony's system message, with the tool's declaration, into the prompt; a tiny policy does without."""
    mental_share: float = 0.0
    """Share of demonstrations that answer at once, without a tool."""
    format_penalty: float = 0.0
    """Task retool: taken off the reward of an answer that is not in \\\\boxed{}."""
    no_code_penalty: float = 0.0
    """Task retool: taken off the reward of an episode without a call of python."""
    length_penalty: float = 0.0
    """Task retool: taken off the reward of an episode of 2 length_characters; of shorter ones in proportion."""
    length_characters: int = 8000
    """Task retool: characters that the policy may write before length_penalty begins."""
    checkers: str = "lm_eval.tasks.ifeval.instructions_registry"
    """Task verifyif: importable module with INSTRUCTION_DICT."""
    instructions: tuple[str, ...] = ()
    """Task verifyif: ids that prompts are made with; none given: all of the module's."""
    max_instructions: int = 3
    """Task verifyif: a made prompt has 1 to this many instructions."""
    score: Literal["all", "share"] = "all"
    """Task verifyif: reward 1 for "all" instructions followed, or the "share" of them that was."""

    @property
    def runs_code(self) -> bool:
        """Whether the policy's code is run: the task has questions and a python tool."""
        return self.name in _WITH_QUESTIONS and self.tool != "none"

    def __post_init__(self) -> None:
        require(
            (self.name == "custom") == (self.factory is not None),
            f'task.factory must be given with task.name "custom", and with no other, got {self.factory}',
        )
        for name in ("num_train_rows", "num_test_rows", "max_instructions", "length_characters"):
            require(getattr(self, name) >= 1, f"task.{name} must be at least 1, got {getattr(self, name)}")
        require_finite(self, "task", "tool_time_limit_s", "format_penalty", "no_code_penalty", "length_penalty")
        require(self.tool_time_limit_s > 0, f"task.tool_time_limit_s must be positive, got {self.tool_time_limit_s}")
        require(
            self.tool_output_bytes >= 64, f"task.tool_output_bytes must be at least 64, got {self.tool_output_bytes}"
        )
        require(0 <= self.mental_share <= 1, f"task.mental_share must be 0..1, got {self.mental_share}")
        for name in ("format_penalty", "no_code_penalty", "length_penalty"):
            require(getattr(self, name) >= 0, f"task.{name} must be at least 0, got {getattr(self, name)}")
        if self.tool == "none":
            for name in ("tool_time_limit_s", "tool_output_bytes", "mental_share", "no_code_penalty"):
                is_default = getattr(self, name) == type(self).__dataclass_fields__[name].default
                require(is_default, f'task.{name} does nothing with task.tool "none"')
        require(
            self.length_penalty > 0
            or self.length_characters == type(self).__dataclass_fields__["length_characters"].default,
            "task.length_characters does nothing without task.length_penalty",
        )
