"""Episodes that a process plays for ``VerifiersTask``, against one that does what environments rarely do."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from poise.envs.verifiers_env import VerifiersTask
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import Message, Role, analysis, final
from poise.rollout import Limits, run_episode
from poise.types import Action, Stop

RENDERER = Renderer(byte_tokenizer())


@pytest.fixture
def play(tmp_path):
    """``play(what the environment does, the policy's answers)``: the streams, and the orders that the process heard."""

    def play(task, *answers, max_turns=8, **options):
        stub, heard = Path(__file__).with_name("verifiers_stub.py"), tmp_path / "heard"
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" "{heard}"\n')
        python.chmod(0o755)
        verifiers = VerifiersTask({"tasks": [task, task]}, python=python, num_test_rows=1, system=None, **options)
        left = list(answers)

        async def policy(token_ids, *, episode_id, seed, max_tokens):
            ids = RENDERER._action(left.pop(0))
            return Action(token_ids=tuple(ids), log_probs=(-1.0,) * len(ids), is_stopped=True)

        limits = Limits(max_turns=max_turns, max_action_tokens=200, max_context_tokens=2000)
        try:
            streams = asyncio.run(
                run_episode(
                    lambda: verifiers.make_env(verifiers.train_rows[0]),
                    policy,
                    RENDERER,
                    group_id=0,
                    episode_id="0/0",
                    seed=0,
                    limits=limits,
                )
            )
        finally:
            verifiers.close()
        return streams, [json.loads(line) for line in heard.read_text().splitlines()]

    return play


def texts(streams):
    return [RENDERER.tokenizer.decode(stream.token_ids) for stream in streams]


def test_a_rewritten_history_is_a_stream_of_its_own(play):
    said = ([analysis("a"), final("told")], [final("short")], [final("end")])
    streams, _ = play("rewrites its history", *said, history="append")
    assert texts(streams) == [
        "<|start|>user<|message|>Long story.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>a<|end|>"
        "<|start|>assistant<|channel|>final<|message|>told<|return|>"
        "<|start|>user<|message|>Sum it up.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>short<|return|>",
        "<|start|>user<|message|>So far: short<|end|><|start|>assistant<|channel|>final<|message|>end<|return|>",
    ]
    # Every answer is trained on once, in one of the streams; the reward is the episode's.
    assert [len(stream.turns) for stream in streams] == [2, 1]
    assert [(stream.reward, stream.stop) for stream in streams] == [(1.5, Stop.DONE)] * 2
    assert streams[0].metrics == {"reward/good": 1.5, "tool_calls": 0.0}


def test_requests_at_the_same_time_are_answered_one_after_the_other(play):
    streams, _ = play("asks twice at once", [final("left")], [final("right")])
    assert [text.split("<|end|>")[0] for text in texts(streams)] == [
        "<|start|>user<|message|>left",
        "<|start|>user<|message|>right",
    ]
    assert streams[0].reward == 1.0  # each request got its own answer


def test_other_tools_are_another_conversation(play):
    look = Message(role=Role.ASSISTANT, recipient="functions.look", channel="commentary", content="{}")
    streams, _ = play("changes its tools", [analysis("hm"), look], [final("done")])
    first, second = texts(streams)
    assert "type look = () => any;" in first
    # Rendered anew, with the thinking of the turn under way, and without the tool.
    assert second == (
        "<|start|>user<|message|>Hi.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>seen<|end|>"
        "<|start|>assistant<|channel|>final<|message|>done<|return|>"
    )


def test_after_a_limit_the_environment_reads_that_the_context_is_full(play):
    streams, heard = play("goes on after a limit", [final("1")], max_turns=1)
    empty = {"role": "assistant", "content": ""}
    assert heard[2:] == [
        {"answer": 1, "message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"},
        {"answer": 2, "message": empty, "finish_reason": "length"},
        {"refuse": 3},
    ]
    assert (streams[0].stop, streams[0].reward) == (Stop.MAX_TURNS, 1.5)


@pytest.mark.parametrize("task", ["fails", "asks nothing", "falls silent", "dies"])
def test_failures_of_the_environment_are_no_fault_of_the_policy(play, caplog, task):
    reason = {
        "fails": "TaskError: the grader is broken",
        "asks nothing": "HarnessError: not installed",
        "falls silent": "TimeoutError",
        "dies": "the process that played it has ended",
    }[task]
    limits = {"time_limit_s": 0.2 if task == "falls silent" else 60.0}
    streams, heard = play(task, [final("Hi.")], **limits)
    assert (streams[0].stop, streams[0].is_trainable) == (Stop.ENV_ERROR, False)
    assert reason in caplog.text
    if task == "falls silent":
        assert heard[-1] == {"stop": 0}
