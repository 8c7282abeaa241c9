"""The environment of one question: a prompt, tools, and a function that grades the whole exchange."""

from collections.abc import Awaitable, Callable, Sequence

from poise.envs.env import Observation, Outcome, final_text, resolved
from poise.envs.tools import Tool, answer_calls
from poise.harmony.messages import Conversation, Message, Role

Grade = Callable[[Sequence[Message]], Outcome | Awaitable[Outcome]]


class ToolEnv:
    """Answers tool calls until an action ends without one, then grades.

    ``grade(transcript)`` takes everything after the prompt: the policy's messages and the tools' results. An action
    whose last message is a call gets the results of all its calls; calls before a last message that is none are not
    run, since nobody waits for them. ``on_close`` gives back what the tools hold. ``Outcome.metrics`` gains
    "tool_calls" and "tool_errors".
    """

    def __init__(
        self,
        *,
        conversation: Conversation,
        tools: Sequence[Tool],
        grade: Grade,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.conversation = conversation
        self.tools = {tool.name: tool for tool in tools}
        self.transcript: list[Message] = []
        self._grade, self._on_close = grade, on_close
        self._num_calls = self._num_errors = 0

    async def reset(self) -> Conversation:
        return self.conversation

    async def step(self, messages: Sequence[Message]) -> Observation:
        self.transcript.extend(messages)
        if not messages or not messages[-1].is_tool_call:
            return Observation(is_done=True)
        results, outputs = await answer_calls(messages, self.tools)
        self.transcript.extend(results)
        self._num_calls += len(outputs)
        self._num_errors += sum(output.is_error for output in outputs)
        return Observation(messages=results)

    async def outcome(self) -> Outcome:
        outcome: Outcome = await resolved(self._grade(self.transcript))
        counts = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return Outcome(reward=outcome.reward, metrics={**outcome.metrics, **counts})

    async def close(self) -> None:
        if self._on_close is not None:
            await self._on_close()


def answer_text(transcript: Sequence[Message]) -> str:
    """The text on the final channel of the last action, "" where it has none."""
    last = max((i for i, message in enumerate(transcript) if message.role is Role.TOOL), default=-1)
    return final_text(transcript[last + 1 :])
