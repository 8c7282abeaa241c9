"""Environments made by others: Gymnasium's interface, OpenEnv's websocket, MCP servers."""

import asyncio
import importlib.util
import json
import socket
import sys
from pathlib import Path

import pytest
from serving import listening

from poise.config import ConfigError
from poise.envs.gym_env import GymTask
from poise.envs.mcp_tools import McpTask, read_servers
from poise.envs.openenv import OpenEnvTask
from poise.envs.tool_env import answer_text
from poise.envs.tools import ToolServerError
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import Message, Role, analysis, final
from poise.rollout import Limits, run_episode
from poise.types import Action, Stop

CALCULATOR = str(Path(__file__).with_name("mcp_calculator.py"))
RENDERER = Renderer(byte_tokenizer())
LIMITS = Limits(max_turns=8, max_action_tokens=200, max_context_tokens=2000)


class HigherOrLower:
    """Guess seed % 10: 0.5 off a wrong guess, 1 for the right one, over after three."""

    def reset(self, seed=None):
        self.goal, self.count, self.is_closed = seed % 10, 0, False
        return "Guess a digit.", {"hint": "0 to 9"}

    def step(self, action):
        self.count += 1
        if int(action) == self.goal:
            return "Right.", 1.0, True, False, {}
        return "Higher." if int(action) < self.goal else "Lower.", -0.5, False, self.count == 3, {}

    def close(self):
        self.is_closed = True


class AsyncHigherOrLower(HigherOrLower):
    async def reset(self, seed=None):
        return super().reset(seed)

    async def step(self, action):
        return super().step(action)


def spoken(*texts, thought="hm"):
    """A policy that says the texts, each after a thought."""
    left = list(texts)

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        ids = RENDERER._action([analysis(thought), final(left.pop(0))])
        return Action(token_ids=tuple(ids), log_probs=(-1.0,) * len(ids), is_stopped=True, policy_version=0)

    return policy


def play(task, policy, row=None):
    row = task.train_rows[1] if row is None else row
    return asyncio.run(
        run_episode(lambda: task.make_env(row), policy, RENDERER, group_id=0, episode_id="0/0", seed=0, limits=LIMITS)
    )


@pytest.mark.parametrize("env", [HigherOrLower, AsyncHigherOrLower], ids=["plain", "coroutines"])
def test_gym_episode_in_harmonys_history(env):
    task = GymTask(env, system=None)
    assert task.train_rows[1]["seed"] == 3  # the goal
    assert {row["seed"] for row in task.train_rows}.isdisjoint(row["seed"] for row in task.test_rows)
    streams = play(task, spoken("1", "9", "3"))
    # -0.5 - 0.5 + 1
    assert [s.reward for s in streams] == [0.0] * 3
    assert [s.turns[0].reward for s in streams] == [-0.5, -0.5, 1.0]
    assert {s.stop for s in streams} == {Stop.DONE}
    texts = [RENDERER.tokenizer.decode(s.turns[0].observation_ids) for s in streams]
    assert texts[0] == "<|start|>user<|message|>Guess a digit.<|end|><|start|>assistant"
    assert texts[2] == (
        "<|start|>user<|message|>Guess a digit.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>1<|end|><|start|>user<|message|>Higher.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>9<|end|><|start|>user<|message|>Lower.<|end|>"
        "<|start|>assistant"
    )


def test_gym_episode_as_one_stream():
    [stream] = play(GymTask(HigherOrLower, system=None, history="append"), spoken("5", "3"))
    assert stream.reward == 0.5  # -0.5 + 1
    assert [turn.reward for turn in stream.turns] == [-0.5, 1.0]
    text = RENDERER.tokenizer.decode(stream.token_ids)
    # What was sampled stays as it was sampled, the thought and <|return|> included.
    assert "hm<|end|><|start|>assistant<|channel|>final<|message|>5<|return|><|start|>user<|message|>Lower." in text


def test_gym_truncation_ends_the_episode():
    streams = play(GymTask(HigherOrLower), spoken("1", "1", "1"))
    assert [s.reward for s in streams] == [-1.5] * 3
    assert {s.stop for s in streams} == {Stop.DONE}


def test_gym_texts_instructions_and_info():
    task = GymTask(HigherOrLower, instructions="Be quick.", to_text=lambda seen, info: f"{seen} {info.get('hint')}")
    [stream] = play(task, spoken("3"))
    text = RENDERER.tokenizer.decode(stream.token_ids)
    assert "# Instructions\n\nBe quick." in text or "# Instructions\nBe quick." in text
    assert "Guess a digit. 0 to 9<|end|>" in text


def test_what_a_gym_environment_raises_ends_the_episode_as_its_error():
    [stream] = play(GymTask(HigherOrLower), spoken("no digit"))
    assert stream.stop is Stop.ENV_ERROR
    assert stream.reward == 0


def test_a_call_of_a_tool_is_answered_and_is_no_step():
    async def run():
        env = GymTask(HigherOrLower).make_env({"seed": 3})
        await env.reset()
        call = Message(role=Role.ASSISTANT, recipient="python", channel="analysis", content="1")
        answered = await env.step([call])
        return answered.messages[0].content, env.partner.env.count

    assert asyncio.run(run()) == ("Error: there is no tool 'python'; tools: none", 0)


def test_an_unknown_history_is_refused():
    with pytest.raises(ValueError, match='"harmony" or "append"'):
        GymTask(HigherOrLower, history="both").make_env({"seed": 1})


# --- OpenEnv ---


async def _served(handler, use):
    websockets = pytest.importorskip("websockets.asyncio.server")
    async with websockets.serve(handler, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await use(f"http://127.0.0.1:{port}")


def test_openenv_protocol():
    received = []

    async def handler(connection):
        received.append(("path", connection.request.path))
        async for raw in connection:
            message = json.loads(raw)
            received.append((message["type"], message.get("data")))
            if message["type"] == "close":
                return
            said = message["data"].get("message", "hello")
            content = {
                "observation": {"echoed": said},
                "reward": None if said == "hello" else 0.25,
                "done": said == "z",
            }
            await connection.send(json.dumps({"type": "observation", "data": content}))

    async def use(url):
        task = OpenEnvTask(url, to_text=lambda observation: observation["echoed"], history="append")
        make_env = lambda: task.make_env(task.train_rows[1])  # noqa: E731
        return await run_episode(
            make_env, spoken("a", "z"), RENDERER, group_id=0, episode_id="0/0", seed=0, limits=LIMITS
        )

    [stream] = asyncio.run(_served(handler, use))
    assert (stream.stop, stream.reward) == (Stop.DONE, 0.5)
    assert received == [
        ("path", "/ws"),
        ("reset", {"seed": 3}),
        ("step", {"message": "a"}),
        ("step", {"message": "z"}),
        ("close", None),
    ]


def test_openenv_errors_end_the_episode():
    async def handler(connection):
        await connection.recv()
        await connection.send(json.dumps({"type": "error", "data": {"code": "CAPACITY", "message": "full"}}))
        await connection.wait_closed()

    async def use(url):
        env = OpenEnvTask(url).make_env({"seed": 1})
        try:
            with pytest.raises(ToolServerError, match="CAPACITY: full"):
                await env.reset()
        finally:
            await env.close()

    asyncio.run(_served(handler, use))


def test_openenv_says_that_nobody_answers():
    pytest.importorskip("websockets")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening
        port = unused.getsockname()[1]
        with pytest.raises(ToolServerError, match=f"no OpenEnv server answers at ws://127.0.0.1:{port}/ws"):
            asyncio.run(OpenEnvTask(f"http://127.0.0.1:{port}").make_env({"seed": 1}).reset())


def test_openenv_refuses_other_schemes():
    with pytest.raises(ConfigError, match="ftp"):
        OpenEnvTask("ftp://somewhere")


# --- MCP ---

needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed")


def call(name, **arguments):
    content = json.dumps(arguments)
    return Message(role=Role.ASSISTANT, recipient=f"functions.{name}", channel="commentary", content=content)


async def mcp_episode(servers):
    task = McpTask(
        [{"prompt": "2 + 3?", "answer": "5"}],
        servers=servers,
        grade=lambda transcript, row: float(answer_text(transcript) == row["answer"]),
        instructions="Use tools.",
        time_limit_s=600.0,
    )
    env = task.make_env(task.train_rows[0])
    conversation = await env.reset()
    try:
        answers = []
        calls = (call("add", a=2, b=3), call("calls"), call("add", a="x", b=3), call("fail"), call("nothing"))
        for message in calls:
            observation = await env.step([message])
            answers.append(observation.messages[0].content)
        assert (await env.step([final("5")])).is_done
        return conversation, answers, await env.outcome()
    finally:
        await env.close()


def check(conversation, answers, outcome):
    tools = {tool.name: tool for tool in conversation.developer.tools}
    assert set(tools) == {"add", "calls", "fail"}
    assert tools["add"].description == "Adds two integers."
    assert tools["add"].parameters["properties"]["a"]["type"] == "integer"
    assert answers[:2] == ["5", "1"]
    assert answers[2] == "Error: argument 'a' must be integer, got string \"x\""
    assert "out of order" in answers[3] or "fail" in answers[3]
    assert answers[4].startswith("Error: there is no tool 'functions.nothing'")
    assert outcome.reward == 1
    assert outcome.metrics == {"tool_calls": 5, "tool_errors": 3}


@needs_mcp
def test_mcp_over_stdio_starts_a_server_an_episode():
    servers = {"calculator": {"command": sys.executable, "args": [CALCULATOR]}}

    async def two():
        return await asyncio.gather(mcp_episode(servers), mcp_episode(servers))

    for result in asyncio.run(two()):
        check(*result)  # `calls` is 1 in both: no state is shared


@needs_mcp
def test_mcp_over_http():
    with listening([sys.executable, CALCULATOR]) as url:
        check(*asyncio.run(mcp_episode({"calculator": {"url": f"{url}/mcp"}})))


@needs_mcp
def test_an_mcp_server_that_does_not_start_is_named():
    task = McpTask([{"prompt": "?"}], servers={"gone": {"command": "/nonexistent/server"}}, grade=lambda t, row: 0.0)

    async def run():
        env = task.make_env(task.train_rows[0])
        try:
            with pytest.raises(ToolServerError, match="MCP servers gone: FileNotFoundError"):
                await env.reset()
        finally:
            await env.close()

    asyncio.run(run())


def test_mcp_servers_from_a_file(tmp_path):
    path = tmp_path / "servers.json"
    path.write_text('{"mcpServers": {"a": {"command": "python", "args": ["x.py"]}, "b": {"url": "http://h/mcp"}}}')
    assert read_servers(path) == {"a": {"command": "python", "args": ["x.py"]}, "b": {"url": "http://h/mcp"}}


@pytest.mark.parametrize(
    ("servers", "names"),
    [
        ({"a": {}}, '"command" or "url"'),
        ({"a": {"command": "x", "url": "y"}}, '"command" or "url"'),
        ({"a": {"command": "x", "argz": []}}, "argz"),
        ("/nonexistent.json", "nonexistent"),
    ],
    ids=["neither", "both", "unknown", "no-file"],
)
def test_mcp_servers_that_are_described_wrongly(servers, names):
    with pytest.raises(ConfigError, match=names):
        read_servers(servers)
