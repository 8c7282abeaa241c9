"""Task ``verifyif``: follow instructions that a program can check (IFEval, https://arxiv.org/abs/2311.07911)."""

import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from poise.config import ConfigError, TaskConfig
from poise.envs.env import Outcome, Row
from poise.envs.graders import GraderPool, GraderTimeout, shared_pool
from poise.envs.instruction_check import CheckerError, build_checker, check, load_registry
from poise.envs.instruction_demos import follow
from poise.envs.instruction_prompts import MadePrompts, make_instruction
from poise.envs.question import QuestionTask, load_splits
from poise.envs.rows import text_of
from poise.envs.seed_prompts import SEED_PROMPTS
from poise.envs.tool_env import answer_text
from poise.harmony.messages import Conversation, Message, final

CHECK = "poise.envs.instruction_check:check"
_SEED_KEYS = ("prompt", "question", "problem", "text")
_NUM_HELD_OUT_SEEDS = 48  # of our own seed prompts, four topics
_PROBE = "Certainly. Here is a short text; it has two sentences."


class VerifyIf(QuestionTask):
    """Prompts with instructions, of which the published checkers of ``task.checkers`` say whether they are followed.

    Rows are IFEval's ``{prompt, instruction_id_list, kwargs}``, or seed prompts (a text under "prompt", "question",
    "problem" or "text"; without ``task.data`` our own), to which instructions are added. Only the text on the final
    channel is judged. The reward is strict: 1 for all instructions, or (``task.score`` "share") the share of them.
    Metrics: ``strict_prompt_accuracy``, ``loose_prompt_accuracy`` (all instructions of a prompt) and
    ``strict_instruction_accuracy``, ``loose_instruction_accuracy`` (of all instructions of all prompts), as IFEval
    reports them; ``checker_errors``, ``grader_timeouts``.
    ``demonstrate``: for a handful of instructions, a minimal text that the checkers accept.
    """

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config, has_tool=False)
        try:
            self._registry = load_registry(config.checkers)
            self._load_rows()
        except CheckerError as error:
            raise ConfigError(str(error)) from error

    def question(self, row: Row) -> str:
        prompt: str = row["prompt"]
        return prompt

    async def grade(self, row: Row, transcript: Sequence[Message]) -> Outcome:
        number = len(row["instructions"])
        arguments = (
            self.config.checkers,
            row["prompt"],
            row["instructions"],
            row["arguments"],
            answer_text(transcript),
        )
        has_timed_out = False
        try:
            result = await self._pool(*arguments)
        except GraderTimeout:  # text on which a checker's regular expressions run for ever follows nothing
            result, has_timed_out = {"strict": [False] * number, "loose": [False] * number, "errors": 0}, True
        metrics = {"checker_errors": float(result["errors"]), "grader_timeouts": float(has_timed_out)}
        for kind in ("strict", "loose"):
            metrics[f"{kind}_prompt_accuracy"] = float(all(result[kind]))
            metrics[f"{kind}_instruction_accuracy/part"] = float(sum(result[kind]))
            metrics[f"{kind}_instruction_accuracy/whole"] = float(number)
        share = sum(result["strict"]) / number
        return Outcome(reward=share if self.config.score == "share" else float(share == 1), metrics=metrics)

    def demonstrate(self, row: Row) -> Conversation | None:
        text = follow(row["instructions"], row["arguments"])
        accepted = check(self.config.checkers, row["prompt"], row["instructions"], row["arguments"], text)
        return self.conversation(row, final(text)) if all(accepted["strict"]) else None

    def _load_rows(self) -> None:
        config = self.config
        train: Sequence[Row]
        test: Sequence[Row]
        if config.data is None and config.test_data is None:
            train = [{"prompt": prompt} for prompt in SEED_PROMPTS[:-_NUM_HELD_OUT_SEEDS]]
            test = [{"prompt": prompt} for prompt in SEED_PROMPTS[-_NUM_HELD_OUT_SEEDS:]]
        else:
            train, test = load_splits(config, self._check_row, key="prompt")
            if config.data is None:
                known = {row["prompt"] for row in test}
                train = [{"prompt": prompt} for prompt in SEED_PROMPTS if prompt not in known]
        names = config.instructions or tuple(sorted(self._registry.INSTRUCTION_DICT))
        for name in config.instructions:
            if name not in self._registry.INSTRUCTION_DICT:
                known_names = ", ".join(sorted(self._registry.INSTRUCTION_DICT))
                raise ConfigError(f"task.instructions: {name!r} is unknown to {config.checkers}; it has {known_names}")
        self.train_rows = self._with_instructions(train, names, config.num_train_rows, "train")
        self.test_rows = self._with_instructions(test, names, config.num_test_rows, "test")
        probes = self._probes()
        _try_once(self._registry, probes)
        self._pool = grader_of(config.checkers, probes)

    def _with_instructions(self, rows: Sequence[Row], names: Sequence[str], size: int, split: str) -> Sequence[Row]:
        """Rows that have instructions, or prompts made of those that have none."""
        if all("instructions" in row for row in rows):
            return rows
        if any("instructions" in row for row in rows):
            raise ConfigError("task data mixes rows with instruction_id_list and rows without: give one kind")
        return MadePrompts(
            self._registry,
            [row["prompt"] for row in rows],
            size=size,
            instructions=names,
            max_instructions=self.config.max_instructions,
            seed=self.config.seed,
            split=split,
        )

    def _check_row(self, row: dict[str, Any], where: str) -> Row:
        if "instruction_id_list" not in row:
            key = next((key for key in _SEED_KEYS if key in row), _SEED_KEYS[0])
            return {"prompt": text_of(row, key, where)}
        prompt, names, arguments = text_of(row, "prompt", where), row["instruction_id_list"], row.get("kwargs")
        if not (isinstance(names, list) and names and isinstance(arguments, list) and len(arguments) == len(names)):
            raise ConfigError(f"{where}: instruction_id_list and kwargs must be lists of equal length, not empty")
        given = [dict(one) if isinstance(one, Mapping) else {} for one in arguments]
        for name, one in zip(names, given, strict=True):
            try:
                build_checker(self._registry, name, one, prompt)
            except CheckerError as error:
                raise ConfigError(f"{where}: {error}") from error
        return {"prompt": prompt, "instructions": names, "arguments": given}

    def _probes(self) -> Mapping[str, Mapping[str, Any]]:
        """Every kind of checker that these rows use, with arguments."""
        probes: dict[str, Mapping[str, Any]] = {}
        if isinstance(self.train_rows, MadePrompts) or isinstance(self.test_rows, MadePrompts):
            names = self.config.instructions or tuple(sorted(self._registry.INSTRUCTION_DICT))
            probes = {name: make_instruction(self._registry, name, _PROBE, seed=0)[1] for name in names}
        for rows in (self.train_rows, self.test_rows):
            if not isinstance(rows, MadePrompts):
                probes |= {n: a for row in rows for n, a in zip(row["instructions"], row["arguments"], strict=True)}
        return probes


def grader_of(checkers: str, probes: Mapping[str, Mapping[str, Any]]) -> GraderPool:
    """The processes that run ``check``, warm: each of ``probes`` has been tried there, and its data is loaded."""
    return shared_pool(CHECK, json.dumps([checkers, _PROBE, list(probes), list(probes.values()), _PROBE]))


def _try_once(registry: ModuleType, probes: Mapping[str, Mapping[str, Any]]) -> None:
    """Missing data shows now, and not in the rewards."""
    for name, arguments in probes.items():
        try:
            build_checker(registry, name, arguments, _PROBE).check_following(_PROBE)
        except CheckerError:
            raise
        except Exception as error:  # the border to the package
            reason = " ".join(str(error).replace("*", " ").split())[:120]  # nltk's are framed, and many lines long
            raise CheckerError(f"the checker of {name} does not work: {type(error).__name__}: {reason}") from error
