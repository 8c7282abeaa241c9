"""An environment that is a partner to talk to: it says something, the policy answers on its final channel, in turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from poise.envs.env import Observation, Outcome, Row, final_text
from poise.envs.tools import answer_calls
from poise.harmony.messages import Conversation, DeveloperContent, Message, SystemContent, final, user

History = Literal["harmony", "append"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a partner says to an answer, what the answer earned, and whether that was the end."""

    text: str
    reward: float = 0.0
    is_done: bool = False


class Partner(Protocol):
    """One episode's other side. What it raises ends the episode as ENV_ERROR, which is never trained on."""

    async def reset(self) -> str: ...

    async def step(self, text: str) -> Reply: ...

    async def close(self) -> None: ...


def seed_rows(num_train_rows: int, num_test_rows: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Training and held-out rows that are seeds: odd ones to train on, even ones held out."""
    return [{"seed": 2 * i + 1} for i in range(num_train_rows)], [{"seed": 2 * i} for i in range(num_test_rows)]


class DialogueEnv:
    """The reward of the episode is the sum of the replies' rewards, which also are the credit of their turns.

    ``history`` "harmony": before each answer the policy reads the conversation as the format has it once a user speaks
    again, earlier analysis dropped and final answers ended by ``<|end|>``; each answer is then a stream of its own.
    "append": one stream, in which everything that was sampled stays: fewer tokens to train on, but not how GPT-OSS
    was trained. ``Outcome.metrics`` holds "answers".
    """

    def __init__(
        self,
        partner: Partner,
        *,
        system: SystemContent | None = None,
        instructions: str | None = None,
        history: History = "harmony",
    ) -> None:
        if history not in ("harmony", "append"):
            raise ValueError(f'history must be "harmony" or "append", got {history!r}')
        self.partner = partner
        self._system = system
        self._developer = None if instructions is None else DeveloperContent(instructions=instructions)
        self._history = history
        self._messages: list[Message] = []
        self._reward = 0.0
        self._num_answers = 0

    async def reset(self) -> Conversation:
        self._messages = [user(await self.partner.reset())]
        return self._conversation()

    async def step(self, messages: Sequence[Message]) -> Observation:
        if messages and messages[-1].is_tool_call:
            results, _ = await answer_calls(messages, {})  # there are no tools, and the policy is told so
            return Observation(messages=results)
        answer = final_text(messages)
        reply = await self.partner.step(answer)
        self._num_answers += 1
        self._reward += reply.reward
        if reply.is_done:
            return Observation(is_done=True, reward=reply.reward)
        self._messages += [final(answer), user(reply.text)]
        if self._history == "append":
            return Observation(messages=(self._messages[-1],), reward=reply.reward)
        return Observation(restart=self._conversation(), reward=reply.reward)

    async def outcome(self) -> Outcome:
        return Outcome(reward=self._reward, metrics={"answers": float(self._num_answers)})

    async def close(self) -> None:
        await self.partner.close()

    def _conversation(self) -> Conversation:
        return Conversation(system=self._system, developer=self._developer, messages=tuple(self._messages))
