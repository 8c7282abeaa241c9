"""Tools of Model Context Protocol servers (https://modelcontextprotocol.io), through the official client.

    from poise.envs.mcp_tools import McpTask

    def make_task():
        rows = [{"prompt": "What is 17 * 23?", "answer": "391"}]
        servers = {"calculator": {"command": "python", "args": ["calculator_server.py"]}}
        return McpTask(rows, servers=servers, grade=lambda said, row: float(row["answer"] in answer_text(said)))

and ``poise train RECIPE --task custom --task.factory my_module:make_task``.
"""

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from poise.config import ConfigError
from poise.envs.env import Observation, Outcome, Row
from poise.envs.schema import check_arguments
from poise.envs.tool_env import ToolEnv
from poise.envs.tools import Tool, ToolOutput, ToolServerError
from poise.harmony.messages import Conversation, DeveloperContent, FunctionTool, Message, SystemContent, user

Servers = Mapping[str, Mapping[str, Any]]
Grade = Callable[[Sequence[Message], Row], float | Outcome]


class McpTask:
    """Questions answered with the tools of MCP servers, which are started, or connected to, anew for each episode.

    ``servers``: name -> ``{"command", "args", "env", "cwd"}`` (stdio) or ``{"url"}`` (streamable HTTP), or the path of
    a JSON file that holds such an object under "mcpServers". A row has a "prompt"; ``grade(transcript, row)`` sees
    everything after it. A tool is "functions.NAME"; ``time_limit_s`` bounds each call and the start.
    Raises ConfigError for servers that are described wrongly, and where the package mcp is missing.
    """

    def __init__(
        self,
        train_rows: Sequence[Row],
        *,
        servers: Servers | str | Path,
        grade: Grade,
        test_rows: Sequence[Row] = (),
        system: SystemContent | None = SystemContent(),  # noqa: B008  (frozen)
        instructions: str | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("MCP tools need the extra mcp: pip install 'poise[mcp]'")
        self.train_rows, self.test_rows = train_rows, test_rows
        self._servers = read_servers(servers)
        self._grade = grade
        self._system, self._instructions = system, instructions
        self._time_limit_s = time_limit_s

    def make_env(self, row: Row) -> "McpEnv":
        def conversation(tools: Sequence[FunctionTool]) -> Conversation:
            developer = DeveloperContent(instructions=self._instructions, tools=tuple(tools))
            return Conversation(system=self._system, developer=developer, messages=(user(row["prompt"]),))

        def grade(transcript: Sequence[Message]) -> Outcome:
            graded = self._grade(transcript, row)
            return graded if isinstance(graded, Outcome) else Outcome(reward=float(graded))

        return McpEnv(self._servers, conversation, grade, time_limit_s=self._time_limit_s)

    def demonstrate(self, row: Row) -> None:
        return None


def read_servers(servers: Servers | str | Path) -> Servers:
    """The servers by name. Raises ConfigError naming the server and the key that is wrong."""
    if isinstance(servers, str | Path):
        try:
            described: Servers = json.loads(Path(servers).read_text(encoding="utf-8"))["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{servers} is no JSON object with mcpServers: {error!r}") from error
    else:
        described = servers
    for name, server in described.items():
        if ("command" in server) == ("url" in server):
            raise ConfigError(
                f'MCP server {name} needs either "command" or "url", got {", ".join(server) or "nothing"}'
            )
        allowed = {"url"} if "url" in server else {"command", "args", "env", "cwd"}
        if unknown := sorted(set(server) - allowed):
            raise ConfigError(f"MCP server {name} has unknown keys {', '.join(unknown)}; known: {', '.join(allowed)}")
    return described


class McpEnv:
    """One episode: a ``ToolEnv`` whose tools live as long as it does."""

    def __init__(
        self,
        servers: Servers,
        conversation: Callable[[Sequence[FunctionTool]], Conversation],
        grade: Callable[[Sequence[Message]], Outcome],
        *,
        time_limit_s: float,
    ) -> None:
        self._servers, self._conversation, self._grade, self._time_limit_s = servers, conversation, grade, time_limit_s
        self._episode: ToolEnv | None = None
        self._session: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def reset(self) -> Conversation:
        # The client's scopes must be left by the task that entered them, and reset and close may be called by two.
        opened: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._session = asyncio.create_task(self._hold_open(opened))
        async with asyncio.timeout(self._time_limit_s):
            tools = await opened
        conversation = self._conversation([tool.declaration for tool in tools if tool.declaration])
        self._episode = ToolEnv(conversation=conversation, tools=tools, grade=self._grade)
        return conversation

    async def step(self, messages: Sequence[Message]) -> Observation:
        assert self._episode is not None, "reset comes before step"
        return await self._episode.step(messages)

    async def outcome(self) -> Outcome:
        assert self._episode is not None, "reset comes before outcome"
        return await self._episode.outcome()

    async def close(self) -> None:
        self._is_over.set()
        if self._session is not None:
            await self._session

    async def _hold_open(self, opened: "asyncio.Future[list[Tool]]") -> None:
        from mcp import Client, StdioServerParameters

        try:
            async with AsyncExitStack() as stack:
                tools: dict[str, Tool] = {}
                for name, server in self._servers.items():
                    where = server["url"] if "url" in server else StdioServerParameters(**server)
                    client = await stack.enter_async_context(Client(where, read_timeout_seconds=self._time_limit_s))
                    for tool in await _tools_of(client):
                        if tool.name in tools:
                            raise ToolServerError(f"MCP server {name} has a tool {tool.name}, and another one does too")
                        tools[tool.name] = tool
                if not opened.done():
                    opened.set_result(list(tools.values()))
                await self._is_over.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(ToolServerError(f"MCP servers {', '.join(self._servers)}: {_reason(error)}"))


class _McpTool:
    is_independent = True

    def __init__(self, client: Any, described: Any) -> None:
        self._client, self._tool_name, self._parameters = client, described.name, described.input_schema
        self.name = f"functions.{described.name}"
        self.declaration: FunctionTool | None = FunctionTool(
            name=described.name, description=described.description or "", parameters=described.input_schema
        )

    async def __call__(self, content: str) -> ToolOutput:
        from mcp import MCPError

        arguments, problem = check_arguments(content, self._parameters)
        if problem:
            return ToolOutput(text=f"Error: {problem}", is_error=True)
        try:
            result = await self._client.call_tool(self._tool_name, arguments)
        except MCPError as error:
            return ToolOutput(text=f"Error: {error}", is_error=True)
        except Exception as error:  # not the answer of a tool but the loss of its server
            raise ToolServerError(f"MCP tool {self._tool_name}: {_reason(error)}") from error
        parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        return ToolOutput(text="\n".join(parts), is_error=bool(result.is_error))


async def _tools_of(client: Any) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [_McpTool(client, described) for described in page.tools]
        cursor = page.next_cursor
        if not cursor:
            return tools


def _reason(error: BaseException) -> str:
    """The innermost error of a group: the transports run in task groups, which wrap what happens in them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
