"""What an environment and a task are. The smallest complete example::

class Echo:
    \"\"\"Reward 1 for repeating the word.\"\"\"

    def __init__(self, row):
        self.word, self.said = row["word"], ""

    async def reset(self):
        return Conversation(messages=(user(f"Say {self.word}"),))

    async def step(self, messages):
        self.said = final_text(messages)
        return Observation(is_done=True)

    async def outcome(self):
        return Outcome(reward=float(self.said == self.word))

    async def close(self):
        pass
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from poise.harmony.messages import Channel, Conversation, Message

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers to an action.

    ``messages``: tool results or user messages, appended to the stream. ``is_done``: the episode is over (messages are
    then not shown). ``reward``: credit of this turn. ``restart``: set where harmony rewrites history (earlier
    analysis is dropped once a new user turn begins): the rollout then opens a new Trajectory of the same episode with
    this conversation, and ``messages`` must be empty.
    """

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    reward: float = 0.0
    restart: Conversation | None = None

    def __post_init__(self) -> None:
        if self.restart is not None and self.messages:
            raise ValueError("Observation.messages must be empty when Observation.restart is given")
        if not self.is_done and not self.messages and self.restart is None:
            raise ValueError("Observation.messages is empty: an episode that goes on needs something to answer")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The grade of a whole episode.

    ``metrics``: named components and counts, for reports, which show their means; of a pair NAME/part and NAME/whole
    they show one ratio, of the sums.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode: ``reset`` once, ``step`` for each action, ``outcome`` once (also after a limit), ``close`` always.

    ``step`` receives the messages of one action, parsed; a tool call is a message with a recipient. What goes wrong in
    a *tool* comes back as text for the policy. An exception out of any of these methods ends the episode as ENV_ERROR.
    """

    async def reset(self) -> Conversation: ...

    async def step(self, messages: Sequence[Message]) -> Observation: ...

    async def outcome(self) -> Outcome: ...

    async def close(self) -> None: ...


class Task(Protocol):
    """Rows, an environment for each, and where there are any, demonstrations."""

    @property
    def train_rows(self) -> Sequence[Row]: ...

    @property
    def test_rows(self) -> Sequence[Row]:
        """Held out: never among ``train_rows``."""
        ...

    def make_env(self, row: Row) -> Env: ...

    def demonstrate(self, row: Row) -> Conversation | None:
        """A whole solved episode for supervised warm start, or None where the task has none for this row."""
        ...


async def resolved(value: Any) -> Any:
    """What was returned by a function that may be plain or a coroutine function."""
    return await value if inspect.isawaitable(value) else value


def final_text(messages: Sequence[Message]) -> str:
    """The text of the last message on the final channel that addresses nobody; "" where there is none."""
    for message in reversed(messages):
        if message.channel == Channel.FINAL and message.recipient is None:
            return message.content
    return ""
