"""Environments served by OpenEnv (https://github.com/meta-pytorch/OpenEnv), over its websocket and without its package.

    from poise.envs.openenv import OpenEnvTask

    def make_task():
        return OpenEnvTask("http://localhost:8000", to_action=lambda text: {"message": text},
                           to_text=lambda observation: observation["echoed_message"])

and ``poise train RECIPE --task custom --task.factory my_module:make_task``.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from poise.config import ConfigError
from poise.envs.dialogue import DialogueEnv, History, Reply, seed_rows
from poise.envs.env import Row
from poise.envs.tools import ToolServerError
from poise.harmony.messages import SystemContent

MAX_MESSAGE_BYTES = 100 * 2**20


class OpenEnvTask:
    """Episodes of the environment at ``url`` (http, https, ws or wss): one connection, hence one session, an episode.

    ``to_action``: the policy's answer as the fields of the environment's action; ``to_text``: the observation's fields
    as what the policy reads. A row is a seed, given to ``reset``; even seeds are held out, odd ones trained on.
    ``time_limit_s`` bounds the wait for each reply.
    """

    def __init__(
        self,
        url: str,
        *,
        to_action: Callable[[str], Mapping[str, Any]] = lambda text: {"message": text},
        to_text: Callable[[Mapping[str, Any]], str] = lambda observation: json.dumps(observation),
        num_train_rows: int = 100_000,
        num_test_rows: int = 200,
        system: SystemContent | None = SystemContent(),  # noqa: B008  (frozen)
        instructions: str | None = None,
        history: History = "harmony",
        time_limit_s: float = 60.0,
    ) -> None:
        scheme, separator, rest = url.partition("://")
        socket_scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(scheme)
        if not separator or socket_scheme is None:
            raise ConfigError(f"OpenEnvTask: url must begin with http, https, ws or wss, got {url!r}")
        self._url = f"{socket_scheme}://{rest.rstrip('/')}/ws"
        self._to_action, self._to_text, self._time_limit_s = to_action, to_text, time_limit_s
        self._dialogue: dict[str, Any] = {"system": system, "instructions": instructions, "history": history}
        self.train_rows, self.test_rows = seed_rows(num_train_rows, num_test_rows)

    def make_env(self, row: Row) -> DialogueEnv:
        partner = _OpenEnvPartner(self._url, row["seed"], self._to_action, self._to_text, self._time_limit_s)
        return DialogueEnv(partner, **self._dialogue)

    def demonstrate(self, row: Row) -> None:
        return None


class _OpenEnvPartner:
    def __init__(
        self,
        url: str,
        seed: int,
        to_action: Callable[[str], Mapping[str, Any]],
        to_text: Callable[[Mapping[str, Any]], str],
        time_limit_s: float,
    ) -> None:
        self._url, self._seed, self._time_limit_s = url, seed, time_limit_s
        self._to_action, self._to_text = to_action, to_text
        self._socket: Any = None

    async def reset(self) -> str:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ConfigError("OpenEnv needs the extra openenv: pip install 'poise[openenv]'") from error
        try:
            self._socket = await connect(self._url, open_timeout=self._time_limit_s, max_size=MAX_MESSAGE_BYTES)
        except (OSError, TimeoutError) as error:
            raise ToolServerError(f"no OpenEnv server answers at {self._url}: {error}") from error
        return (await self._exchange("reset", {"seed": self._seed})).text

    async def step(self, text: str) -> Reply:
        return await self._exchange("step", self._to_action(text))

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> Reply:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        async with asyncio.timeout(self._time_limit_s):
            message = json.loads(await self._socket.recv())
        content = message.get("data", {})
        if message.get("type") != "observation":
            raise ToolServerError(
                f"OpenEnv's answer to {kind}: {content.get('code')}: {content.get('message', message)}"
            )
        return Reply(
            text=self._to_text(content["observation"]),
            reward=float(content["reward"] or 0.0),
            is_done=bool(content["done"]),
        )
