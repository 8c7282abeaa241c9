"""Environment classes in the style of TRL's ``environment_factory``, run as they are.

Such a class has a method ``reset(**row)``, which returns None or text to append to the prompt; its other public
methods, typed and documented, are the policy's tools; the reward comes from a method ``get_reward()``, from reward
functions that take lists and the keyword ``environments``, or from both
(https://huggingface.co/docs/trl/grpo_trainer).
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poise.envs.chat import text_of_content, to_conversation
from poise.envs.env import Observation, Outcome, Row, final_text, resolved
from poise.envs.tool_env import ToolEnv
from poise.envs.tools import CallableTool
from poise.harmony.messages import Channel, Conversation, Message, Role

Factory = Callable[[], Any]
RewardFunction = Callable[..., Any]


class ClassTask:
    """Rows for environment classes.

    ``environment_factory``: called without arguments for each episode, or several by name, chosen by a row's key
    "environment". A row may hold a "prompt": messages ``{"role", "content"}``, or one text. Every row is passed to
    ``reset``. ``reward_functions`` are called as TRL calls them, with lists of one episode (``prompts``,
    ``completions``, ``environments``, the row's columns, ``log_metric``, ``log_extra``); None means no opinion; the
    reward is the sum weighted by ``reward_weights`` (1 each). Not passed, since environments see no tokens and no
    trainer: ``completion_ids`` and ``trainer_state``.
    """

    def __init__(
        self,
        environment_factory: Factory | Mapping[str, Factory],
        *,
        train_rows: Sequence[Row],
        test_rows: Sequence[Row] = (),
        reward_functions: Sequence[RewardFunction] = (),
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        weights = [1.0] * len(reward_functions) if reward_weights is None else list(reward_weights)
        if len(weights) != len(reward_functions):
            raise ValueError(f"reward_weights has {len(weights)} numbers for {len(reward_functions)} reward_functions")
        self.train_rows = train_rows
        self.test_rows = test_rows
        self._factory = environment_factory
        self._rewards = tuple(zip(reward_functions, weights, strict=True))

    def make_env(self, row: Row) -> "ClassEnv":
        if not isinstance(self._factory, Mapping):
            return ClassEnv(self._factory(), row, row, self._rewards)
        name = str(row.get("environment"))
        if name not in self._factory:
            raise ValueError(f"row has environment {name!r}; environments: {', '.join(self._factory)}")
        arguments = {key: value for key, value in row.items() if key != "environment"}
        return ClassEnv(self._factory[name](), row, arguments, self._rewards)

    def demonstrate(self, row: Row) -> None:
        return None


class ClassEnv:
    """One episode of an environment object: a ``ToolEnv`` around its methods."""

    def __init__(
        self, instance: Any, row: Row, arguments: Row, rewards: Sequence[tuple[RewardFunction, float]]
    ) -> None:
        names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        if "reset" not in names:
            raise ValueError(f"environment class {type(instance).__name__} needs a method reset(**row)")
        if not rewards and "get_reward" not in names:
            raise ValueError(f"{type(instance).__name__} has no get_reward: give reward_functions")
        tools = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]
        self.instance = instance
        self._row = row
        self._arguments = arguments
        self._rewards = rewards
        self._tools = [CallableTool(getattr(instance, name), in_thread=False) for name in tools]
        self._prompt: list[dict[str, str]] = []
        self._episode: ToolEnv | None = None

    async def reset(self) -> Conversation:
        observed = await resolved(self.instance.reset(**self._arguments))
        prompt = self._row.get("prompt", "")
        self._prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if observed is not None:
            self._prompt[-1]["content"] = text_of_content(self._prompt[-1]["content"]) + text_of_content(observed)
        conversation = to_conversation(self._prompt, [tool.declaration for tool in self._tools])
        self._episode = ToolEnv(conversation=conversation, tools=self._tools, grade=self._grade)
        return conversation

    async def step(self, messages: Sequence[Message]) -> Observation:
        assert self._episode is not None, "reset comes before step"
        return await self._episode.step(messages)

    async def outcome(self) -> Outcome:
        assert self._episode is not None, "reset comes before outcome"
        return await self._episode.outcome()

    async def close(self) -> None:
        """Nothing to give back: such classes have no method for it."""

    async def _grade(self, transcript: Sequence[Message]) -> Outcome:
        metrics: dict[str, float] = {}
        columns = {key: [value] for key, value in self._row.items() if key not in _NOT_COLUMNS}
        scores: list[tuple[str, Any, float]] = []
        for function, weight in self._rewards:
            values = await resolved(
                function(
                    prompts=[self._prompt],
                    completions=[_completion(transcript)],
                    environments=[self.instance],
                    log_metric=metrics.__setitem__,
                    log_extra=lambda column, values: None,  # columns of TRL's table of completions
                    **columns,
                )
            )
            scores.append((getattr(function, "__name__", type(function).__name__), values[0], weight))
        if hasattr(self.instance, "get_reward"):
            scores.append((type(self.instance).__name__, await resolved(self.instance.get_reward()), 1.0))
        known = [(name, float(score), weight) for name, score, weight in scores if score is not None]
        if not known:
            raise ValueError("every reward function returned None: the episode cannot be scored")
        metrics |= {f"reward/{name}": score for name, score, _ in known}
        return Outcome(reward=sum(score * weight for _, score, weight in known), metrics=metrics)


_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def _completion(transcript: Sequence[Message]) -> list[dict[str, Any]]:
    """The transcript as chat messages: one assistant message an action, its analysis under "thinking"."""
    chat: list[dict[str, Any]] = []
    action: list[Message] = []
    for message in transcript:
        if message.role is not Role.TOOL:
            action.append(message)
            continue
        if action:
            chat.append(_assistant(action))
            action = []
        name = (message.name or "").removeprefix("functions.")
        chat.append({"role": "tool", "name": name, "content": message.content})
    return [*chat, _assistant(action)] if action else chat


def _assistant(action: Sequence[Message]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": final_text(action)}
    thinking = [m.content for m in action if m.channel == Channel.ANALYSIS and not m.is_tool_call]
    if thinking:
        message["thinking"] = "\n".join(thinking)
    calls = [_call(m) for m in action if m.is_tool_call]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(message: Message) -> dict[str, Any]:
    try:
        arguments = json.loads(message.content)
    except (ValueError, RecursionError):
        arguments = message.content
    name = (message.recipient or "").removeprefix("functions.")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
