"""Environments of the package verifiers, played by itself in its own interpreter: ``make test-adapters`` builds it."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from poise.cli import run
from poise.config import ConfigError
from poise.envs.verifiers_env import VerifiersTask
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import Message, Role, analysis, final
from poise.rollout import Limits, run_episode
from poise.types import Action, Stop

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
HERE = Path(__file__).parent
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
SUMS = {"taskset": {"id": "poise-sums"}, "agent": AGENT}
TALK = {"taskset": {"id": "poise-talk"}, "speaker": AGENT}
RENDERER = Renderer(byte_tokenizer())
needs_verifiers = pytest.mark.skipif(
    not PYTHON.exists() or "PYTEST_XDIST_WORKER" in os.environ,
    reason="make test-adapters builds .venv-verifiers and runs",
)


@pytest.fixture(scope="module", autouse=True)
def where_the_tasksets_are():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE / "verifiers_tasks")
        yield


@pytest.fixture(scope="module")
def sums():
    task = VerifiersTask(SUMS, python=PYTHON, num_test_rows=2)
    yield task
    task.close()


@pytest.fixture(scope="module")
def talk():
    task = VerifiersTask(TALK, python=PYTHON, num_test_rows=1)
    yield task
    task.close()


def action(*messages):
    ids = RENDERER._action(messages)
    return Action(token_ids=tuple(ids), log_probs=tuple(-0.01 * i for i in range(len(ids))), is_stopped=True)


def call(arguments, name="functions.add", channel="commentary"):
    return Message(role=Role.ASSISTANT, recipient=name, channel=channel, content=arguments)


def play(task, row, *policies, **limits):
    """An episode for each policy, at the same time: a policy is ``text so far -> messages``."""
    bounds = Limits(**({"max_turns": 8, "max_action_tokens": 500, "max_context_tokens": 9000} | limits))

    async def episode(index, answer):
        async def policy(token_ids, *, episode_id, seed, max_tokens):
            answered = answer(RENDERER.tokenizer.decode(token_ids))
            return answered if isinstance(answered, Action) else action(*answered)

        return await run_episode(
            lambda: task.make_env(row), policy, RENDERER, group_id=0, episode_id=f"0/{index}", seed=0, limits=bounds
        )

    async def group():
        return await asyncio.gather(*(episode(i, answer) for i, answer in enumerate(policies)))

    return asyncio.run(group())


def with_the_tool(text):
    found = re.search(r"functions\.add to=assistant<\|channel\|>commentary<\|message\|>(\d+)", text)
    if found:
        return [final(found[1])]
    a, b = re.search(r"What is (\d+) \+ (\d+)", text).groups()
    return [analysis("I add."), call(f'{{"a": {a}, "b": {b}}}')]


@needs_verifiers
def test_an_episode_with_a_tool_of_the_environment(sums):
    assert (len(sums.train_rows), len(sums.test_rows)) == (3, 2)
    [right], [wrong] = play(sums, sums.train_rows[1], with_the_tool, lambda text: [final("5")])
    # Task 3 is 13 + 3; its reward weighs 2.
    assert (right.stop, right.reward) == (Stop.DONE, 2.0)
    assert right.metrics == {"reward/right": 2.0, "results": 1.0, "tool_calls": 1.0}
    assert (wrong.stop, wrong.reward, wrong.metrics["results"]) == (Stop.DONE, 0.0, 0.0)
    text = RENDERER.tokenizer.decode(right.token_ids)
    assert "<|start|>developer<|message|># Instructions\n\nAnswer with the number alone.\n\n# Tools" in text
    # pydantic titles the arguments, which harmony shows above them.
    assert "// Adds two numbers.\ntype add = (_: {\n// A\n//\na: number,\n// B\n//\nb: number,\n}) => any;" in text
    assert text.endswith(
        "<|start|>user<|message|>What is 13 + 3?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I add.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"a": 13, "b": 3}<|call|>'
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>16<|end|>"
        "<|start|>assistant<|channel|>final<|message|>16<|return|>"
    )
    # What is trained on is what was sampled, id by id, with the log-probs it was sampled with.
    sampled = [i for i, is_sampled in zip(right.token_ids, right.response_mask, strict=True) if is_sampled]
    first = action(analysis("I add."), call('{"a": 13, "b": 3}'))
    assert sampled == [*first.token_ids, *action(final("16")).token_ids]
    assert right.turns[0].rollout_log_probs == first.log_probs


@needs_verifiers
def test_mistakes_of_the_policy_are_answered(sums):
    def wrong_calls(text):
        said = text.count("<|start|>assistant")
        return {1: [call("13")], 2: [call("{}", name="python", channel="analysis")]}.get(said, [final("10")])

    [[stream]] = play(sums, sums.test_rows[0], wrong_calls)
    text = RENDERER.tokenizer.decode(stream.token_ids)
    assert "<|message|>error: tool arguments must be a JSON object" in text
    assert "<|start|>python to=assistant<|channel|>analysis<|message|>error: unknown tool 'python'" in text
    assert (stream.stop, stream.reward) == (Stop.DONE, 2.0)  # 10 + 0


@needs_verifiers
def test_a_limit_ends_the_episode_and_it_is_graded(sums):
    def cut(text):
        ids = RENDERER._action([final("12")])[:-1]
        return Action(token_ids=tuple(ids), log_probs=(-1.0,) * len(ids), is_stopped=False)

    def no_harmony(text):
        return Action(token_ids=(65, RENDERER.tokenizer.return_), log_probs=(-1.0, -1.0), is_stopped=True)

    [[one], [two], [three]] = play(sums, sums.test_rows[1], with_the_tool, cut, no_harmony, max_turns=1)
    assert [one.stop, two.stop, three.stop] == [Stop.MAX_TURNS, Stop.MAX_TOKENS, Stop.PARSE_ERROR]
    assert [one.reward, two.reward, three.reward] == [0.0, 0.0, 0.0]
    assert one.metrics["results"] == 1.0  # the tool had answered
    assert all(stream.is_trainable for stream in (one, two, three))


def speaks(*texts):
    left = list(texts)
    return lambda text: [analysis("hm"), final(left.pop(0))]


@needs_verifiers
def test_users_that_go_on_talking(talk):
    [streams, endless] = play(
        talk, talk.train_rows[0], speaks("one", "two", "bye"), lambda text: [final("x")], max_turns=3
    )
    assert [s.reward for s in streams] == [2.0] * 3
    assert streams[0].stop is Stop.DONE
    texts = [RENDERER.tokenizer.decode(stream.token_ids) for stream in streams]
    # Earlier thinking is dropped when a user speaks: each answer is a stream of its own.
    assert texts[2].endswith(
        "<|start|>user<|message|>Speak, Bob.<|end|><|start|>assistant<|channel|>final<|message|>one<|end|>"
        "<|start|>user<|message|>You said one.<|end|><|start|>assistant<|channel|>final<|message|>two<|end|>"
        "<|start|>user<|message|>You said two.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>bye<|return|>"
    )
    # After the rollout's limit the environment reads one empty answer, and that the context is full.
    assert (endless[0].stop, endless[0].reward) == (Stop.MAX_TURNS, 4.0)


@needs_verifiers
def test_one_growing_stream_and_an_environment_that_breaks():
    task = VerifiersTask(TALK, python=PYTHON, num_test_rows=1, history="append", system=None)
    try:
        [[stream], broken] = play(task, task.train_rows[1], speaks("one", "bye"), speaks("break"))
        assert RENDERER.tokenizer.decode(stream.token_ids) == (
            "<|start|>user<|message|>Speak, Eve.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>one<|return|>"
            "<|start|>user<|message|>You said one.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>bye<|return|>"
        )
        assert stream.reward == 1.0
        assert (broken[-1].stop, broken[-1].is_trainable) == (Stop.ENV_ERROR, False)
        process = task._child._process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        [[dead]] = play(task, task.train_rows[0], speaks("bye"))
        assert dead.stop is Stop.ENV_ERROR
    finally:
        task.close()


@needs_verifiers
def test_it_ends_by_itself_in_the_middle_of_an_episode():
    task = VerifiersTask(TALK, python=PYTHON, num_test_rows=1)
    asyncio.run(task.make_env(task.train_rows[0]).reset())  # a request waits for its answer
    task.close()
    assert task._child._process.returncode == 0  # no force was needed


@needs_verifiers
def test_it_is_trained_on(tmp_path, monkeypatch):
    code = f"""
from poise.envs.verifiers_env import VerifiersTask
TASKSETS = {str(HERE / "verifiers_tasks")!r}
def make_task():
    return VerifiersTask({TALK!r}, python={str(PYTHON)!r}, num_test_rows=1)
"""
    (tmp_path / "my_verifiers.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = f"--task custom --task.factory my_verifiers:make_task --warm-start.steps 0 --run.folder {tmp_path}"
    sizes = "--model.hidden-size 32 --model.intermediate-size 32 --groups-per-step 1 --group-size 2 --run.steps 1"
    lengths = (
        "--max-turns 2 --max-action-tokens 8 --max-context-tokens 1000 --eval-problems 1 --tokens-per-microbatch 2000"
    )
    assert run(["train", "arithmetic_tiny", *keys.split(), *sizes.split(), *lengths.split()]) == 0
    [metrics] = tmp_path.glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["stop_env_error"] == 0.0


def test_what_cannot_be_played_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="python /no/python does not start"):
        VerifiersTask(SUMS, python="/no/python")
    with pytest.raises(ConfigError, match="cannot play this environment: ModuleNotFoundError: No module named"):
        VerifiersTask(SUMS, python=sys.executable)


@needs_verifiers
@pytest.mark.parametrize(
    ("env", "rows", "reason"),
    [
        ({"taskset": {"id": "not-there"}}, 1, "taskset 'not-there' not found"),
        (SUMS, 5, "has 5 tasks and num_test_rows is 5"),
        (SUMS | {"agent": AGENT | {"sampling": {"temperature": 0.5}}}, 1, "agent agent has settings of sampling"),
    ],
    ids=["taskset", "rows", "sampling"],
)
def test_environments_that_do_not_fit(env, rows, reason):
    with pytest.raises(ConfigError, match=reason):
        VerifiersTask(env, python=PYTHON, num_test_rows=rows)
