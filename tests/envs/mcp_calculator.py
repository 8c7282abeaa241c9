"""A real MCP server for the tests: `python mcp_calculator.py` speaks over stdio, `... PORT` over HTTP."""

import sys

from mcp.server import MCPServer

server = MCPServer("calculator")
seen: list[int] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    seen.append(a)
    return a + b


@server.tool()
def calls() -> int:
    """How often add was called in this process."""
    return len(seen)


@server.tool()
def fail() -> int:
    """Always fails."""
    raise ValueError("out of order")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
