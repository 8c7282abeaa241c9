"""Environment classes as TRL's GRPOTrainer takes them: discovery, prompts, tools and rewards by TRL's conventions."""

import asyncio
import inspect

import pytest
from transformers.utils import get_json_schema

from poise.envs.class_env import ClassTask
from poise.harmony.messages import Message, Role, analysis, final, user


class Counter:
    """Count to a goal. A class that poise and TRL take without a change."""

    def reset(self, **kwargs) -> str | None:
        self.goal = kwargs["goal"]
        self.count = 0
        self.log = []
        return f" Reach {self.goal}."

    def increment(self, step: int = 1) -> int:
        """
        Adds to the counter.

        Args:
            step: How much to add.

        Returns:
            The counter.
        """
        if step < 0:
            raise ValueError("only forward")
        self.count += step
        return self.count

    async def peek(self) -> str:
        """Shows the counter."""
        await asyncio.sleep(0)
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _secret(self) -> int:
        return self.goal

    @property
    def trap(self):
        raise RuntimeError("a property is no tool and is not evaluated")


def closeness(environments, **kwargs):
    return [1 / (1 + abs(e.goal - e.count)) for e in environments]


async def said_done(completions, **kwargs):
    return [float(completion[-1]["content"] == "done") for completion in completions]


def call(name, arguments):
    return Message(role=Role.ASSISTANT, recipient=f"functions.{name}", channel="commentary", content=arguments)


def episode(task, row, *actions):
    async def run():
        env = task.make_env(row)
        conversation = await env.reset()
        observations = [await env.step(action) for action in actions]
        outcome = await env.outcome()
        await env.close()
        return conversation, observations, outcome

    return asyncio.run(run())


ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}], "goal": 3}


def test_an_episode():
    task = ClassTask(Counter, train_rows=[ROW], reward_functions=[closeness, said_done], reward_weights=[0.5, 2.0])
    conversation, observations, outcome = episode(
        task,
        ROW,
        [analysis("One."), call("increment", "{}")],
        [call("increment", '{"step": -1}')],
        [call("_secret", "{}")],
        [call("reset", '{"goal": 0}')],
        [call("get_reward", "{}")],
        [call("increment", '{"step": 1}'), call("peek", "")],
        [final("done")],
    )
    assert conversation.messages == (user("Count. Reach 3."),)
    assert conversation.developer is not None
    assert conversation.developer.instructions == "Be brief."
    assert [tool.name for tool in conversation.developer.tools] == ["increment", "peek"]
    assert [[message.content for message in o.messages] for o in observations] == [
        ["1"],
        ["Error: ValueError: only forward"],
        ["Error: there is no tool 'functions._secret'; tools: functions.increment, functions.peek"],
        ["Error: there is no tool 'functions.reset'; tools: functions.increment, functions.peek"],
        ["Error: there is no tool 'functions.get_reward'; tools: functions.increment, functions.peek"],
        ["2", "at 2"],
        [],
    ]
    # 0.5 * 1 / (1 + |3 - 2|) + 2 * 1 + get_reward 0
    assert outcome.reward == 2.25
    assert outcome.metrics == {
        "reward/closeness": 0.5, "reward/said_done": 1.0, "reward/Counter": 0.0, "tool_calls": 7.0, "tool_errors": 4.0,
    }  # fmt: skip


def test_tools_are_those_that_trl_finds():
    # TRL: functions of the class but reset, get_reward and private names; schema by transformers.get_json_schema.
    found = [
        getattr(Counter(), name)
        for name, _ in inspect.getmembers(Counter, predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]
    conversation, _, _ = episode(ClassTask(Counter, train_rows=[ROW]), ROW, [final("")])
    assert conversation.developer is not None
    declared = conversation.developer.tools
    assert [tool.name for tool in declared] == [method.__name__ for method in found]
    reference = get_json_schema(Counter().increment)["function"]
    assert declared[0].description == reference["description"]
    assert declared[0].parameters == reference["parameters"]


def test_reward_functions_get_what_trl_passes():
    seen = {}

    def probe(prompts, completions, environments, goal, log_metric, log_extra, **kwargs):
        log_metric("steps", 2)
        log_extra("column", ["x"])
        seen.update(prompts=prompts, completions=completions, goal=goal, rest=kwargs)
        return [None]

    task = ClassTask(Counter, train_rows=[ROW], reward_functions=[probe])
    _, _, outcome = episode(task, ROW, [analysis("One."), call("increment", "{}")], [analysis("Hm."), final("done")])
    assert seen["prompts"] == [[ROW["prompt"][0], {"role": "user", "content": "Count. Reach 3."}]]
    assert seen["completions"] == [[
        {"role": "assistant", "content": "", "thinking": "One.",
         "tool_calls": [{"type": "function", "function": {"name": "increment", "arguments": {}}}]},
        {"role": "tool", "name": "increment", "content": "1"},
        {"role": "assistant", "content": "done", "thinking": "Hm."},
    ]]  # fmt: skip
    assert seen["goal"] == [3]
    assert seen["rest"] == {}
    assert outcome.reward == 0.0  # get_reward alone: the probe has no opinion
    assert outcome.metrics["steps"] == 2
    assert ROW["prompt"][1]["content"] == "Count."  # the row stays as it was


class Silent:
    async def reset(self, **kwargs):
        return None


def test_prompts():
    def nothing(environments, **kwargs):
        return [1.0]

    task = ClassTask(Silent, train_rows=[], reward_functions=[nothing])
    assert episode(task, {"prompt": "Hi"}, [final("")])[0].messages == (user("Hi"),)
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}]  # fmt: skip
    assert episode(task, {"prompt": chat}, [final("")])[0].messages == (user("a"), final("b"), user("c"))
    counter = ClassTask(Counter, train_rows=[])
    assert episode(counter, {"goal": 1}, [final("")])[0].messages == (user(" Reach 1."),)
    with pytest.raises(ValueError, match="images are not supported"):
        episode(task, {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, [final("")])


def test_environments_by_name():
    task = ClassTask({"count": Counter, "other": Silent}, train_rows=[], reward_functions=[lambda **_: [1.0]])
    conversation, _, _ = episode(task, {"environment": "count", "goal": 2, "prompt": "Go."}, [final("")])
    assert conversation.messages == (user("Go. Reach 2."),)
    with pytest.raises(ValueError, match="row has environment 'third'; environments: count, other"):
        task.make_env({"environment": "third"})


def test_refusals():
    class NoReset:
        pass

    with pytest.raises(ValueError, match=r"environment class NoReset needs a method reset\(\*\*row\)"):
        ClassTask(NoReset, train_rows=[]).make_env({})
    with pytest.raises(ValueError, match="Silent has no get_reward: give reward_functions"):
        ClassTask(Silent, train_rows=[]).make_env({})
    with pytest.raises(ValueError, match="reward_weights has 1 numbers for 0 reward_functions"):
        ClassTask(Counter, train_rows=[], reward_weights=[1.0])
    unscored = ClassTask(Silent, train_rows=[], reward_functions=[lambda **_: [None]])
    with pytest.raises(ValueError, match="every reward function returned None"):
        episode(unscored, {}, [final("")])
