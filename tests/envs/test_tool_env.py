"""The environment of one question: turns, counts, and what the grader sees."""

import asyncio

from poise.envs.env import Observation, Outcome
from poise.envs.tool_env import ToolEnv, answer_text
from poise.envs.tools import PythonTool
from poise.harmony.messages import Channel, Conversation, Message, Role, analysis, final, tool_result, user


def call(recipient, content):
    return Message(role=Role.ASSISTANT, recipient=recipient, channel=Channel.ANALYSIS, content=content)


def episode(*actions, grade):
    async def run():
        env = ToolEnv(conversation=Conversation(messages=(user("6 * 7?"),)), tools=(PythonTool(),), grade=grade)
        assert (await env.reset()).messages == (user("6 * 7?"),)
        observations = [await env.step(action) for action in actions]
        outcome = await env.outcome()
        await env.close()
        return observations, outcome, env.transcript

    return asyncio.run(run())


def is_42(transcript):
    return Outcome(reward=float(answer_text(transcript) == "42"), metrics={"length": len(transcript)})


def test_tools_then_answer():
    observations, outcome, transcript = episode(
        [analysis("Let me see."), call("python", "6 * 7")],
        [call("python", "1 / 0")],
        [call("functions.fly", "{}")],
        [analysis("It is 42."), final("42")],
        grade=is_42,
    )
    assert observations[0] == Observation(messages=(tool_result("python", "42", channel="analysis"),))
    assert [observation.is_done for observation in observations] == [False, False, False, True]
    assert outcome == Outcome(reward=1.0, metrics={"length": 9, "tool_calls": 3.0, "tool_errors": 2.0})
    roles = " ".join(message.role.value for message in transcript)
    assert roles == "assistant assistant tool assistant tool assistant tool assistant assistant"


def test_several_calls_in_one_action_are_all_answered():
    observations, outcome, _ = episode([call("python", "1"), call("python", "2")], [final("42")], grade=is_42)
    assert [message.content for message in observations[0].messages] == ["1", "2"]
    assert outcome.metrics["tool_calls"] == 2.0


def test_an_action_without_a_call_ends_the_episode():
    for action in ([], [analysis("hm")], [call("python", "1"), final("42")]):
        observations, outcome, _ = episode(action, grade=is_42)
        assert observations == [Observation(is_done=True)]
        assert outcome.metrics["tool_calls"] == 0.0
        assert outcome.reward == float(action[-1:] == [final("42")])


def test_only_the_final_channel_of_the_last_action_is_the_answer():
    assert answer_text([analysis("42")]) == ""
    assert answer_text([final("42"), call("python", "1"), tool_result("python", "1"), analysis("42")]) == ""
    assert answer_text([final("41"), final("42")]) == "42"
    assert answer_text([Message(role=Role.ASSISTANT, recipient="python", channel="final", content="42")]) == ""
    assert answer_text([]) == ""


def test_an_episode_cut_by_a_limit_is_graded():
    _, outcome, _ = episode([call("python", "6 * 7")], grade=is_42)
    assert outcome.reward == 0.0


def test_a_grader_may_wait():
    async def grade(transcript):
        await asyncio.sleep(0)
        return Outcome(reward=0.25)

    assert episode([final("x")], grade=grade)[1].reward == 0.25
