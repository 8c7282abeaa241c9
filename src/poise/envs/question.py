"""The base of tasks whose rows hold a question each, answered with or without the python tool."""

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from poise.config import ConfigError, SandboxConfig, TaskConfig
from poise.envs.env import Outcome, Row
from poise.envs.rows import Check, load_rows
from poise.envs.tool_env import ToolEnv
from poise.envs.tools import PythonTool
from poise.harmony.messages import (
    Channel,
    Conversation,
    DeveloperContent,
    FunctionTool,
    Message,
    Role,
    SystemContent,
    tool_result,
    user,
)
from poise.sandbox import Limits, Sandbox


class QuestionTask(ABC):
    """Rows, and for each an environment: the question, the tool that ``task.tool`` names, a grade.

    ``has_tool`` False: a task without tools. A subclass fills ``train_rows`` and ``test_rows`` and says what a row asks
    and how an answer is graded; where it has solutions, it overrides ``demonstrate``.
    """

    train_rows: Sequence[Row]
    test_rows: Sequence[Row]

    def __init__(self, config: TaskConfig, sandbox: SandboxConfig | None = None, *, has_tool: bool = True) -> None:
        sandbox = sandbox or SandboxConfig()
        self.config = config
        self._sandbox = Sandbox.from_config(sandbox)
        self._tool_kind = config.tool if has_tool else "none"
        self._limits = Limits(
            wall_s=config.tool_time_limit_s,
            cpu_s=config.tool_time_limit_s,
            memory_mib=sandbox.memory_mib,
            num_output_bytes=config.tool_output_bytes,
        )

    @abstractmethod
    def question(self, row: Row) -> str:
        """What the user asks."""

    @abstractmethod
    async def grade(self, row: Row, transcript: Sequence[Message]) -> Outcome:
        """The grade of everything that followed the question."""

    def instructions(self, row: Row) -> str | None:
        """What the developer demands, or None."""
        return None

    def make_env(self, row: Row) -> ToolEnv:
        conversation, grade = self.conversation(row), partial(self.grade, row)
        if self._tool_kind == "none":
            return ToolEnv(conversation=conversation, tools=(), grade=grade)
        tool = self._python()
        return ToolEnv(conversation=conversation, tools=(tool,), grade=grade, on_close=tool.close)

    def demonstrate(self, row: Row) -> Conversation | None:
        return None

    def conversation(self, row: Row, *messages: Message) -> Conversation:
        """The prompt, then ``messages``. ``task.describes_tools`` False leaves out whatever declares a tool."""
        instructions = self.instructions(row)
        functions: tuple[FunctionTool, ...] = ()
        system = None
        if self.config.describes_tools:
            system = SystemContent(builtin_tools=("python",) if self._tool_kind == "python" else ())
            declaration = self._python().declaration if self._tool_kind == "function" else None
            functions = () if declaration is None else (declaration,)
        has_developer = instructions is not None or bool(functions)
        developer = DeveloperContent(instructions=instructions, tools=functions) if has_developer else None
        return Conversation(system=system, developer=developer, messages=(user(self.question(row)), *messages))

    def python_exchange(self, code: str, output: str) -> tuple[Message, Message]:
        """A call of the python tool as GPT-OSS writes it, and the tool's answer."""
        if self._tool_kind == "function":
            call = Message(
                role=Role.ASSISTANT,
                recipient="functions.python",
                channel=Channel.COMMENTARY,
                content=json.dumps({"code": code}),
                content_type="json",
                is_constrained=True,
            )
            return call, tool_result("functions.python", output)
        call = Message(
            role=Role.ASSISTANT,
            recipient="python",
            channel=Channel.ANALYSIS,
            content=code,
            content_type="code" if self.config.describes_tools else None,
        )
        return call, tool_result("python", output, channel=Channel.ANALYSIS)

    def _python(self) -> PythonTool:
        return PythonTool(self._limits, is_function=self._tool_kind == "function", sandbox=self._sandbox)

    def answers_mentally(self, row: Row) -> bool:
        """Whether a demonstration does without the tool: always where there is none, else ``task.mental_share``."""
        return self._tool_kind == "none" or share_of(self.question(row)) < self.config.mental_share


def load_splits(config: TaskConfig, check: Check, *, key: str) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows of ``task.data`` and ``task.test_data``.

    Without ``test_data``, ``num_test_rows`` rows chosen by ``seed`` are held out of ``data``; without ``data`` there
    are only rows to evaluate on. A row whose ``key`` is held out is dropped from the training rows.
    """
    if config.data is None and config.test_data is None:
        raise ConfigError(f"task.data is required by task {config.name}: a .jsonl path or a Hugging Face data set id")
    rows = [] if config.data is None else load_rows(config.data, split="train", check=check)
    if config.test_data is None:
        if config.num_test_rows >= len(rows):
            raise ConfigError(
                f"task.num_test_rows ({config.num_test_rows}) must be below the {len(rows)} rows of {config.data}"
            )
        held_out = sorted(random.Random(config.seed).sample(range(len(rows)), config.num_test_rows))
        test_rows = [rows[i] for i in held_out]
    else:
        test_rows = load_rows(config.test_data, split="test", check=check)
    known = {row[key] for row in test_rows}
    kept = [row for row in rows if row[key] not in known]
    if not kept and config.data is not None:
        raise ConfigError(f"every question of task.data ({config.data}) is held out: nothing is left to train on")
    return kept[: config.num_train_rows], test_rows


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "big") / 2**56
