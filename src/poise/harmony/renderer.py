"""Conversations to token ids, exactly as openai-harmony renders them (https://github.com/openai/harmony)."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from poise.harmony.declarations import builtin_section, functions_section
from poise.harmony.messages import Channel, Conversation, DeveloperContent, Message, Role, SystemContent
from poise.harmony.tokens import HarmonyTokenizer


class Renderer:
    """Renders with one tokenizer. Text never becomes a special token, whoever wrote it."""

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids
        self._opening = (tokenizer.start, *tokenizer.encode(Role.ASSISTANT))
        # Every episode of a task repeats its headers and its system and developer texts.
        self._header = lru_cache(maxsize=1024)(self._encode_header)
        self._preamble = lru_cache(maxsize=64)(self._encode_preamble)

    def prompt(self, conversation: Conversation) -> list[int]:
        """The history, then ``<|start|>assistant``: what an episode begins with."""
        return [*self.conversation(conversation), *self._opening]

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Tool results and user messages, then ``<|start|>assistant``: what is appended after an action.

        Raises ValueError for a message of the assistant, whose tokens only a policy may add.
        """
        if any(message.role is Role.ASSISTANT for message in messages):
            raise ValueError(
                "observation: messages must not contain assistant messages; their tokens come from the policy"
            )
        return [*self._messages(messages), *self._opening]

    def conversation(self, conversation: Conversation) -> list[int]:
        """The history: every message ends with ``<|end|>``, or ``<|call|>`` where the assistant addresses a tool.

        Once the last word of the assistant is a final answer, analysis before the first final answer is dropped.
        """
        return [*self._preambles(conversation), *self._messages(_without_old_analysis(conversation.messages))]

    def demonstration(self, conversation: Conversation) -> list[tuple[list[int], list[int]]]:
        """A solved episode as a rollout would have seen it: ``(observation_ids, action_ids)`` of each turn.

        The first observation is the prompt; an action is a run of assistant messages without the opening
        ``<|start|>assistant`` and ends with ``<|call|>`` or ``<|return|>``. Nothing is dropped. Raises ValueError for
        a conversation that does not end with the assistant, or a run that no policy could have sampled: one that does
        not end with a tool call or a final answer, or goes on after a tool call.
        """
        turns: list[tuple[list[int], list[int]]] = []
        observation = self._preambles(conversation)
        for is_action, run in _runs(conversation.messages):
            if is_action:
                turns.append(([*observation, *self._opening], self._action(run)))
                observation = []
            else:
                observation += self._messages(run)
        if not turns or observation:
            raise ValueError("demonstration: the conversation must end with an assistant message")
        return turns

    def _action(self, messages: Sequence[Message]) -> list[int]:
        *before, last = messages
        if any(message.is_tool_call for message in before):
            raise ValueError("demonstration: a tool call must be followed by its result, not by an assistant message")
        if not last.is_tool_call and last.channel != Channel.FINAL:
            raise ValueError("demonstration: a turn of the assistant must end with a tool call or a final answer")
        ids = self._messages(messages)[len(self._opening) :]
        if not last.is_tool_call:
            ids[-1] = self.tokenizer.return_
        return ids

    def _messages(self, messages: Iterable[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self._header(
                message.role,
                message.name,
                message.recipient,
                message.channel,
                message.content_type,
                message.is_constrained,
            )
            ids += self.tokenizer.encode(message.content)
            ids.append(self.tokenizer.call if message.is_tool_call else self.tokenizer.end)
        return ids

    def _encode_header(
        self,
        role: Role,
        name: str | None,
        recipient: str | None,
        channel: str | None,
        content_type: str | None,
        is_constrained: bool,
    ) -> tuple[int, ...]:
        # Each part is encoded on its own: joined text could merge into other tokens.
        encode = self.tokenizer.encode
        ids = [self.tokenizer.start, *encode(name if role is Role.TOOL and name else role)]
        if name and role is not Role.TOOL:
            ids += encode(f":{name}")
        if recipient is not None and recipient != "all":
            ids += encode(f" to={recipient}")
        if channel is not None:
            ids += [self.tokenizer.channel, *encode(channel)]
        if is_constrained:
            ids += [*encode(" "), self.tokenizer.constrain, *encode(content_type or "")]
        elif content_type is not None:
            ids += encode(f" {content_type}")
        return (*ids, self.tokenizer.message)

    def _preambles(self, conversation: Conversation) -> list[int]:
        system, developer = conversation.system, conversation.developer
        has_functions = developer is not None and bool(developer.tools)
        ids: list[int] = []
        if system is not None:
            ids += self._preamble(Role.SYSTEM, system_text(system, has_functions=has_functions))
        if developer is not None:
            ids += self._preamble(Role.DEVELOPER, developer_text(developer))
        return ids

    def _encode_preamble(self, role: Role, text: str) -> tuple[int, ...]:
        return tuple(self._messages([Message(role=role, content=text)]))


def system_text(system: SystemContent, *, has_functions: bool) -> str:
    """The body of the system message; ``has_functions`` says that the developer message declares functions."""
    facts = [
        system.model_identity,
        None if system.knowledge_cutoff is None else f"Knowledge cutoff: {system.knowledge_cutoff}",
        None if system.conversation_start_date is None else f"Current date: {system.conversation_start_date}",
    ]
    known = [fact for fact in facts if fact is not None]
    sections = ["\n".join(known)] if known else []
    if system.reasoning_effort is not None:
        sections.append(f"Reasoning: {system.reasoning_effort}")
    if system.builtin_tools:
        sections.append(builtin_section(system.builtin_tools))
    if system.channels:
        channels = f"# Valid channels: {', '.join(system.channels)}. Channel must be included for every message."
        if has_functions:
            channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
        sections.append(channels)
    return "\n\n".join(sections)


def developer_text(developer: DeveloperContent) -> str:
    """The body of the developer message: instructions, then the declared functions."""
    sections = [] if developer.instructions is None else ["# Instructions", developer.instructions]
    if developer.tools:
        sections.append(functions_section(developer.tools))
    return "\n\n".join(sections)


def _without_old_analysis(messages: Sequence[Message]) -> Sequence[Message]:
    spoken = [message for message in messages if message.role is Role.ASSISTANT]
    if not spoken or spoken[-1].channel != Channel.FINAL:
        return messages
    first_final = next(i for i, message in enumerate(messages) if message.channel == Channel.FINAL)
    return [m for i, m in enumerate(messages) if i >= first_final or m.channel != Channel.ANALYSIS]


def _runs(messages: Sequence[Message]) -> list[tuple[bool, list[Message]]]:
    """Consecutive messages of the assistant, and of everybody else."""
    runs: list[tuple[bool, list[Message]]] = []
    for message in messages:
        is_action = message.role is Role.ASSISTANT
        if not runs or runs[-1][0] != is_action:
            runs.append((is_action, []))
        runs[-1][1].append(message)
    return runs
