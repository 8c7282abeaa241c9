"""What the policies over servers share, whatever protocol the servers speak."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from poise.engine.handshake import TokenServer, shake_hands
from poise.engine.http import Servers


class ServerEngine(ABC):
    """A set of servers and what is asked of each answer; a subclass speaks a protocol."""

    def __init__(
        self,
        servers: Servers,
        *,
        stop_ids: Collection[int],
        vocab_size: int,
        temperature: float = 1.0,
        routes_shape: tuple[int, int] | None = None,
    ) -> None:
        self.servers = servers
        self.stop_ids = frozenset(stop_ids)
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.routes_shape = routes_shape
        self.policy_version = 0
        self.num_sampled_tokens = 0
        self._version_of: dict[str, int] = {}  # by mark

    async def post(self, path: str, json: Mapping[str, Any] | None = None, **arguments: Any) -> list[Any]:
        """The JSON with which every server answers, in the order of the urls. Raises Outage or EngineError."""
        return await self.servers.ask_all("POST", path, json=json, **arguments)

    async def handshake(self, *, max_context_tokens: int) -> None:
        """Waits until every server is healthy, then raises EngineError for the first reason not to train with it."""
        for server in self.servers.all:
            await self.servers.wait_until_healthy(server.url)
            await shake_hands(self._token_server(server.url, max_context_tokens), stop_ids=self.stop_ids)

    async def set_policy_version(self, step: int, *, mark: str | None = None) -> None:
        """From now on answers carry ``step``; ``mark``, where given, is what every server calls its weights."""
        if mark is not None:
            await self.write_marks(mark)
        self.note_policy_version(step, mark=mark)

    def note_policy_version(self, step: int, *, mark: str | None = None) -> None:
        """The same without telling a server, where somebody else tells them."""
        self.policy_version = step
        if mark is not None:
            self._version_of[mark] = step

    async def write_marks(self, mark: str) -> None:
        """Tells every server the name of the weights it holds."""
        await asyncio.gather(*(self.write_mark(server.url, mark) for server in self.servers.all))

    async def close(self) -> None:
        """Closes the connections; a later call opens new ones."""
        await self.servers.close()

    async def _max_context(self, url: str) -> int | None:
        """Tokens that one server can hold, where it says so."""
        models = await self.servers.ask(url, "GET", "/v1/models")
        return models["data"][0].get("max_model_len")

    @abstractmethod
    async def write_mark(self, url: str, mark: str) -> None:
        """Tells one server the name of the weights it holds."""

    @abstractmethod
    def _token_server(self, url: str, max_context_tokens: int) -> TokenServer:
        """What the handshake needs of one server."""
