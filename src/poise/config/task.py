"""The task's keys."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require


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
        require(self.num_train_rows >= 1, f"task.num_train_rows must be at least 1, got {self.num_train_rows}")
        require(self.num_test_rows >= 1, f"task.num_test_rows must be at least 1, got {self.num_test_rows}")
        require(self.tool_time_limit_s > 0, f"task.tool_time_limit_s must be positive, got {self.tool_time_limit_s}")
        require(0 <= self.mental_share <= 1, f"task.mental_share must be 0..1, got {self.mental_share}")
