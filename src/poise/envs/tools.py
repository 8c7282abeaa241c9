"""Tools: what a policy can call, and how its mistakes come back to it as text.

A ``Tool`` takes the content of a call and returns a ``ToolOutput``. ``answer_calls`` answers every call of one action:
unknown names, arguments that do not parse, wrong arguments and exceptions are error texts, never exceptions.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from poise.envs.schema import check_arguments, declaration_of
from poise.harmony.messages import Channel, FunctionTool, Message, tool_result
from poise.sandbox import Limits, Sandbox, SandboxError, Session
from poise.seeding import EPISODE_SEED, derive_seed

_PYTHON_STREAM = 2**31  # part of a seed: keeps the interpreter's numbers apart from those of the policy's turns
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")


class ToolServerError(RuntimeError):
    """What stands behind a tool is broken. Not the policy's fault: the episode ends as ENV_ERROR."""


@dataclass(frozen=True, kw_only=True)
class ToolOutput:
    """What the policy reads. ``is_error``: the call failed, by a mistake of the policy or of the tool."""

    text: str
    is_error: bool = False


class Tool(Protocol):
    """Something a policy calls by name.

    ``name``: the recipient of a call ("python", "functions.add"). ``declaration``: for the developer message; None for
    tools built into the model. ``is_independent``: calls of one action may run at the same time.
    An exception of a call becomes an error text, but ``ToolServerError`` ends the episode.
    """

    @property
    def name(self) -> str: ...

    @property
    def declaration(self) -> FunctionTool | None: ...

    @property
    def is_independent(self) -> bool: ...

    async def __call__(self, content: str) -> ToolOutput: ...


class PythonTool:
    """A stateful interpreter in the sandbox, of one episode: variables persist from call to call until ``close``.

    ``is_function`` False: the tool "python" that GPT-OSS was trained with, raw code; True: a declared tool
    "functions.python" with the JSON argument ``code``. The interpreter starts with the first call, and its random
    numbers from the seed of the episode: they differ between episodes, and are the same when an episode is played
    again. Outside of an episode they are drawn anew.
    """

    is_independent = False

    def __init__(
        self, limits: Limits | None = None, *, is_function: bool = False, sandbox: Sandbox | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._sandbox = sandbox or Sandbox()
        self._session: Session | None = None
        self.is_function = is_function

    @property
    def name(self) -> str:
        return "functions.python" if self.is_function else "python"

    @property
    def declaration(self) -> FunctionTool | None:
        if not self.is_function:
            return None
        code = {"type": "string", "description": "Python code; the value of a last expression is shown."}
        return FunctionTool(
            name="python",
            description="Runs Python code in a stateful interpreter and returns what it prints.",
            parameters={"type": "object", "properties": {"code": code}, "required": ["code"]},
        )

    async def __call__(self, content: str) -> ToolOutput:
        if self.declaration is not None:
            arguments, problem = check_arguments(content, self.declaration.parameters)
            if problem:
                return ToolOutput(text=f"Error: {problem}", is_error=True)
            content = arguments["code"]
        try:
            if self._session is None:
                seed = EPISODE_SEED.get()
                own = None if seed is None else derive_seed(seed, _PYTHON_STREAM)
                self._session = self._sandbox.session(self._limits, seed=own)
            result = await self._session.run(content)
        except SandboxError as error:
            raise ToolServerError(str(error)) from error
        return ToolOutput(text=result.text, is_error=result.is_error)

    async def close(self) -> None:
        """Ends the interpreter."""
        if self._session is not None:
            await self._session.close()
            self._session = None


@dataclass(frozen=True)
class CallableTool:
    """A typed, documented Python function as "functions.NAME"; the result is ``str`` of what it returns.

    A coroutine function runs on the event loop, at the same time as other calls. A plain function runs in a thread,
    one call after another, or with ``in_thread`` False on the event loop, where it holds up every episode.
    ``time_limit_s``: after it the policy is told so (a thread that hangs is left behind).
    Raises ``ValueError`` for a function without a docstring, types, or a Google-style ``Args:`` entry per parameter.
    """

    function: Callable[..., Any]
    in_thread: bool = True
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_declaration", declaration_of(self.function))

    @property
    def declaration(self) -> FunctionTool:
        declaration: FunctionTool = self.__dict__["_declaration"]
        return declaration

    @property
    def name(self) -> str:
        return f"functions.{self.declaration.name}"

    @property
    def is_independent(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    async def __call__(self, content: str) -> ToolOutput:
        arguments, problem = check_arguments(content, self.declaration.parameters)
        if problem:
            return ToolOutput(text=f"Error: {problem}", is_error=True)
        try:
            async with asyncio.timeout(self.time_limit_s) as clock:
                if self.in_thread and not self.is_independent:
                    value = await asyncio.to_thread(self.function, **arguments)
                else:
                    value = self.function(**arguments)
                if inspect.isawaitable(value):
                    value = await value
        except TimeoutError:
            if not clock.expired():
                raise  # the function's own
            return ToolOutput(text=f"Error: timed out after {self.time_limit_s:g} s", is_error=True)
        return ToolOutput(text=str(value))


async def answer_calls(
    messages: Sequence[Message], tools: Mapping[str, Tool]
) -> tuple[tuple[Message, ...], tuple[ToolOutput, ...]]:
    """The tool results of one action, in the order of its calls, and the outputs they were made of."""
    calls = [message for message in messages if message.is_tool_call]
    in_order = asyncio.Lock()

    async def answer(call: Message) -> ToolOutput:
        tool = tools.get(call.recipient or "")
        if tool is None:
            known = ", ".join(sorted(tools)) or "none"
            return ToolOutput(text=f"Error: there is no tool {call.recipient!r}; tools: {known}", is_error=True)
        if tool.is_independent:
            return await _call(tool, call.content)
        async with in_order:  # first come, first served: the order of the calls
            return await _call(tool, call.content)

    outputs = tuple(await asyncio.gather(*map(answer, calls)))
    results = tuple(
        tool_result(tool_author(call), output.text, channel=call.channel or Channel.COMMENTARY)
        for call, output in zip(calls, outputs, strict=True)
    )
    return results, outputs


async def _call(tool: Tool, content: str) -> ToolOutput:
    try:
        return await tool(content)
    except ToolServerError:
        raise
    except Exception as error:  # the border to code that is not ours: the policy reads what went wrong
        return ToolOutput(text=f"Error: {type(error).__name__}: {error}", is_error=True)


def tool_author(call: Message) -> str:
    """The called name as the author of the answer, where it is a name at all."""
    recipient = call.recipient or ""
    return recipient if _PLAIN_NAME.fullmatch(recipient) else "unknown"
