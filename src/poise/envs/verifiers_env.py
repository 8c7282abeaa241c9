"""Environments of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers), version 0.4.

    from poise.envs.verifiers_env import VerifiersTask

    def make_task():
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        return VerifiersTask({"taskset": {"id": "my-taskset"}, "agent": agent}, python=".venv-verifiers/bin/python")

and ``poise train RECIPE --task custom --task.factory my_module:make_task``.

verifiers runs an episode by itself and asks for the policy's answers at a chat endpoint. Here that endpoint is the
rollout: what verifiers asks is the observation, what the policy samples is the answer, as messages. So token ids and
log-probs are the engine's own, prompts are rendered by poise for whatever tokenizer the policy has, every engine
works, and nothing has to be read back out of a trace but the rewards.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from poise.config import ConfigError
from poise.envs.chat import Answer, declared_tools, extension, to_answer, to_conversation
from poise.envs.dialogue import History
from poise.envs.env import Observation, Outcome, Row
from poise.envs.tools import ToolServerError
from poise.harmony.messages import Conversation, Message, Role, SystemContent

CHILD = Path(__file__).with_name("verifiers_child.py")


class VerifiersTask:
    """The tasks of a verifiers environment with one agent, which is the policy.

    ``env``: what a verifiers configuration says in its ``[env]`` block. ``python``: the interpreter of an environment
    that has verifiers installed; a process of it plays all episodes, and ends with this one. The first
    ``num_test_rows`` tasks are held out, of the rest at most ``num_train_rows`` are trained on. ``history``: as in
    ``DialogueEnv``, where the environment adds a user message. ``time_limit_s`` bounds the wait for the environment's
    next request or its end. Raises ConfigError where verifiers is missing or refuses ``env``.
    """

    def __init__(
        self,
        env: Mapping[str, Any],
        *,
        python: str | Path = sys.executable,
        num_train_rows: int = 10_000,
        num_test_rows: int = 100,
        system: SystemContent | None = SystemContent(),  # noqa: B008  (frozen)
        history: History = "harmony",
        time_limit_s: float = 600.0,
    ) -> None:
        if history not in ("harmony", "append"):
            raise ValueError(f'history must be "harmony" or "append", got {history!r}')
        self._child = _Child(python, {"env": dict(env), "num_tasks": num_test_rows + num_train_rows})
        self._system, self._history, self._time_limit_s = system, history, time_limit_s
        rows: Sequence[Row] = [{"task": i} for i in range(self._child.num_tasks)]
        self.test_rows, self.train_rows = rows[:num_test_rows], rows[num_test_rows:]
        if not self.train_rows:
            self.close()
            raise ConfigError(
                f"the verifiers environment has {len(rows)} tasks and num_test_rows is {num_test_rows}: nothing is "
                "left to train on"
            )

    def make_env(self, row: Row) -> "VerifiersEnv":
        return VerifiersEnv(
            self._child, row["task"], system=self._system, history=self._history, time_limit_s=self._time_limit_s
        )

    def demonstrate(self, row: Row) -> None:
        return None

    def close(self) -> None:
        """Ends the process; it also ends with this one."""
        self._child.close()


class VerifiersEnv:
    """One episode. A request that continues the last one is an observation of the same stream; any other, as after a
    program has rewritten its history or for a second one beside it, starts a stream of its own.

    After a limit of the rollout the environment reads an empty answer that was cut (``finish_reason`` "length"), to
    further requests that the context is full, and grades what it has. ``Outcome.metrics``: verifiers' metrics, its
    rewards by weight as "reward/NAME", and "tool_calls".
    """

    def __init__(
        self, child: "_Child", index: int, *, system: SystemContent | None, history: History, time_limit_s: float
    ) -> None:
        self._child, self._index = child, index
        self._system, self._history, self._time_limit_s = system, history, time_limit_s
        self._episode: _Episode | None = None
        self._request: dict[str, Any] | None = None
        self._end: dict[str, Any] | None = None
        self._num_answers = self._num_calls = 0

    async def reset(self) -> Conversation:
        self._episode = self._child.play(self._index)
        await self._listen()
        if self._request is None:
            raise ToolServerError(f"the verifiers environment has asked the policy nothing: {self._end}")
        return self._conversation(self._request)

    async def step(self, messages: Sequence[Message]) -> Observation:
        asked = self._request
        assert asked is not None, "reset comes before step"
        answer = to_answer(messages, number=self._num_answers)
        self._num_answers += 1
        self._num_calls += len(answer.calls)
        self._answer(answer, "tool_calls" if answer.calls else "stop")
        await self._listen()
        if self._request is None:
            return Observation(is_done=True)
        added = extension([*asked["messages"], answer.message], self._request["messages"], answer.calls)
        if added is None or asked["tools"] != self._request["tools"]:
            return Observation(restart=self._conversation(self._request))
        if self._history == "harmony" and any(message.role is Role.USER for message in added):
            return Observation(restart=self._conversation(self._request))
        return Observation(messages=added)

    async def outcome(self) -> Outcome:
        if self._request is not None:
            self._answer(Answer(message={"role": "assistant", "content": ""}, calls={}), "length")
            await self._listen()
        while self._request is not None:
            self._child.tell(refuse=self._request["request"])
            await self._listen()
        assert self._end is not None, "reset comes before outcome"
        if "error" in self._end:
            raise ToolServerError(f"the verifiers environment failed: {self._end['error']}")
        metrics = {"tool_calls": float(self._num_calls), **self._end["metrics"]}
        return Outcome(reward=self._end["reward"], metrics=metrics)

    async def close(self) -> None:
        if self._episode is not None:
            self._child.forget(self._episode, is_over=self._end is not None)

    def _answer(self, answer: Answer, finish_reason: Literal["stop", "tool_calls", "length"]) -> None:
        assert self._request is not None
        self._child.tell(answer=self._request["request"], message=answer.message, finish_reason=finish_reason)

    async def _listen(self) -> None:
        """Waits for the next request, or the end."""
        assert self._episode is not None
        self._request = None
        async with asyncio.timeout(self._time_limit_s):
            line = await self._episode.lines.get()
        if "request" in line:
            self._request = line
        else:
            self._end = line

    def _conversation(self, request: Mapping[str, Any]) -> Conversation:
        return to_conversation(request["messages"], declared_tools(request["tools"]), system=self._system)


@dataclass(frozen=True)
class _Episode:
    """What the process says about one episode, in the loop that plays it."""

    number: int
    loop: asyncio.AbstractEventLoop
    lines: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)

    def hear(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody plays it any more
            self.loop.call_soon_threadsafe(self.lines.put_nowait, line)


class _Child:
    """The process that plays, in a session of its own: Ctrl-C is for this one, which closes it in its own time."""

    def __init__(self, python: str | Path, settings: Mapping[str, Any]) -> None:
        # As in an activated environment, where verifiers looks for uv; tasksets may lie in the folder of the start.
        added = {"PATH": Path(python).absolute().parent, "PYTHONPATH": Path.cwd()}
        paths = {
            name: os.pathsep.join(filter(None, [str(folder), os.environ.get(name)])) for name, folder in added.items()
        }
        try:
            self._process = subprocess.Popen(
                [str(python), "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **paths},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"VerifiersTask: python {python} does not start: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._end = weakref.finalize(self, _end, self._process)
        self._numbers = itertools.count()
        self._episodes: dict[int, _Episode] = {}
        self._writing = threading.Lock()
        first = b""
        with contextlib.suppress(BrokenPipeError):
            self.tell(**settings)
            first = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(first) if first else {"error": "its process has ended"}
        if "error" in answer:
            self.close()
            raise ConfigError(f"VerifiersTask: {python} cannot play this environment: {answer['error']}")
        self.num_tasks: int = answer["num_tasks"]
        threading.Thread(
            target=_read, args=(self._process.stdout, self._episodes), name="verifiers", daemon=True
        ).start()

    def play(self, index: int) -> _Episode:
        episode = _Episode(next(self._numbers), asyncio.get_running_loop())
        self._episodes[episode.number] = episode
        self.tell(play=episode.number, task=index)
        return episode

    def forget(self, episode: _Episode, *, is_over: bool) -> None:
        self._episodes.pop(episode.number, None)
        if not is_over:
            self.tell(stop=episode.number)

    def tell(self, **line: Any) -> None:
        """Raises BrokenPipeError where the process has ended."""
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        self._end()


def _read(lines: IO[bytes], episodes: dict[int, _Episode]) -> None:
    for text in lines:
        line = json.loads(text)
        episode = episodes.get(line["episode"] if "request" in line else line["end"])
        if episode is not None:
            episode.hear(line)
    for episode in list(episodes.values()):
        episode.hear({"end": episode.number, "error": "the process that played it has ended"})


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The end of its input is what it ends at; by force where it does not."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
