"""Task retool: rows in the field's formats, prompts, rewards and their parts, the tool in both of its forms."""

import asyncio
import json

import pyarrow
import pytest
from playing import play
from pyarrow import parquet

from poise.config import ConfigError, TaskConfig
from poise.envs import make_task
from poise.envs.retool import REQUEST, check_row
from poise.harmony.messages import Channel, DeveloperContent, Message, Role, SystemContent, analysis, final, user

ROWS = {
    "math500": {"problem": "1+1?", "solution": "It is \\boxed{2}.", "answer": "2", "subject": "Algebra", "level": 1},
    "aime 2024": {"ID": "2024-I-1", "Problem": "1+1?", "Solution": "So 2.", "Answer": 2},
    "retool evaluation": {"input": "1+1?", "output": "2"},
    "gsm8k": {"question": "1+1?", "answer": "It is 1+1=<<1+1=2>>2.\n#### 2"},
}
VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve 1+1. The last line is Answer: $Answer"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
DAPO = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}], "label": "2"}
SUM = {"problem": "What is 20 + 22?", "answer": "42"}


@pytest.mark.parametrize("name", ROWS)
def test_problems_get_a_request(name):
    row = check_row(ROWS[name], "here")
    assert row["question"] == "1+1?" + REQUEST
    assert row["answer"] == "2"
    assert row["instructions"] is None


def test_prompts_are_left_as_they_are():
    row = check_row(VERL, "here")
    assert (row["question"], row["answer"]) == ("Solve 1+1. The last line is Answer: $Answer", "2")
    row = check_row(VERL | {"reward_model": json.dumps(VERL["reward_model"])}, "here")
    assert row["answer"] == "2"
    row = check_row(DAPO, "here")
    assert (row["question"], row["answer"], row["instructions"]) == ("1+1?", "2", "Be brief.")
    assert check_row({"prompt": "1+1?", "label": 2}, "here")["answer"] == "2"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"problem": "1+1?"}, "here has problem: a row needs problem and answer, question and answer"),
        ({}, "here has no keys"),
        ({"prompt": "1+1?"}, "here needs a text 'label'; it has prompt"),
        ({"prompt": [], "label": "2"}, "here: prompt must be a text, or system messages and then one user message"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "label": "2"}, "here: prompt must be a text, or system"),
        ({"prompt": "1+1?", "reward_model": "{"}, "here: reward_model is no JSON"),
        ({"problem": " ", "answer": "2"}, "here needs a text 'problem'"),
    ],
)
def test_a_malformed_row(row, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_row(row, "here")


def make(tmp_path, *rows, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, {"problem": "held out", "answer": "1"})))
    keys = {"test_data": str(path), "name": "retool", **keys}
    return make_task(TaskConfig(**keys))


def test_a_parquet_file(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([VERL, VERL | {"prompt": DAPO["prompt"]}]), tmp_path / "a.parquet")
    task = make_task(TaskConfig(name="retool", data=str(tmp_path / "a.parquet"), num_test_rows=1))
    rows = [*task.train_rows, *task.test_rows]
    assert sorted(row["question"] for row in rows) == ["1+1?", VERL["prompt"][0]["content"]]
    assert {row["answer"] for row in rows} == {"2"}


def call(code, *, function=False):
    if function:
        return Message(
            role=Role.ASSISTANT,
            recipient="functions.python",
            channel=Channel.COMMENTARY,
            content=json.dumps({"code": code}),
        )
    return Message(role=Role.ASSISTANT, recipient="python", channel=Channel.ANALYSIS, content=code)


def episode(task, *actions):
    """Tool results, and the outcome."""

    async def run():
        env = task.make_env(task.test_rows[0])
        await env.reset()
        shown = []
        try:
            for action in actions:
                observation = await env.step(action)
                shown += [message.content for message in observation.messages]
            return shown, await env.outcome()
        finally:
            await env.close()

    return asyncio.run(run())


def test_the_prompt_declares_the_tool_as_the_model_was_trained(tmp_path):
    question = user(SUM["problem"] + REQUEST)
    builtin = make(tmp_path, SUM)
    conversation = builtin.conversation(builtin.test_rows[0])
    assert conversation.system == SystemContent(builtin_tools=("python",))
    assert conversation.developer is None
    assert conversation.messages == (question,)

    function = make(tmp_path, SUM, tool="function")
    conversation = function.conversation(function.test_rows[0])
    assert conversation.system == SystemContent()
    assert [tool.name for tool in conversation.developer.tools] == ["python"]

    instructed = make(tmp_path, DAPO, tool="none")
    conversation = instructed.conversation(instructed.test_rows[0])
    assert conversation.developer == DeveloperContent(instructions="Be brief.")
    assert make(tmp_path, DAPO, describes_tools=False).conversation(instructed.test_rows[0]).system is None


@pytest.mark.parametrize("function", [False, True])
def test_variables_live_as_long_as_the_episode(tmp_path, function):
    task = make(tmp_path, SUM, tool="function" if function else "python")
    shown, outcome = episode(
        task,
        [analysis("Let me see."), call("x = 20", function=function)],
        [call("def f(y):\n    return x + y", function=function)],
        [call("f(22)", function=function)],
        [final("It is \\boxed{42}.")],
    )
    assert shown == ["[no output]", "[no output]", "42"]
    assert outcome.reward == 1.0
    shown, _ = episode(task, [call("x", function=function)])
    assert "NameError" in shown[0]


def test_long_output_is_cut_in_the_middle_and_the_cut_is_said(tmp_path):
    task = make(tmp_path, SUM, tool_output_bytes=200)
    shown, _ = episode(task, [call("print('a' * 5000 + 'b' * 5000)")])
    assert shown[0].startswith("aaa")
    assert shown[0].endswith("bbb")
    assert "bytes cut" in shown[0]
    assert len(shown[0]) < 300


PENALTIES = {"format_penalty": 0.25, "no_code_penalty": 0.5, "length_penalty": 0.125, "length_characters": 10}


@pytest.mark.parametrize(
    ("actions", "parts"),
    [
        # 9 characters of code and text at most: no penalty for length up to 10, half of it at 15, all of it from 20 on.
        ([[call("1")], [final("\\boxed{42}")]], {"correct": 1.0, "format": 0.0, "no_code": 0.0, "length": -0.0125}),
        ([[final("Answer: 42")]], {"correct": 1.0, "format": -0.25, "no_code": -0.5, "length": 0.0}),
        ([[final("\\boxed{41} ....")]], {"correct": 0.0, "format": 0.0, "no_code": -0.5, "length": -0.0625}),
        (
            [[call("1"), final("x" * 99)]],  # a call that nobody waits for is not made
            {"correct": 0.0, "format": -0.25, "no_code": -0.5, "length": -0.125},
        ),
    ],
)
def test_the_parts_of_a_reward(tmp_path, actions, parts):
    _, outcome = episode(make(tmp_path, SUM, **PENALTIES), *actions)
    assert {name: outcome.metrics[f"reward/{name}"] for name in parts} == pytest.approx(parts)
    assert outcome.reward == pytest.approx(sum(parts.values()))


def test_penalties_that_are_off_leave_no_trace(tmp_path):
    _, outcome = episode(make(tmp_path, SUM), [final("Answer: 42")])
    assert outcome.reward == 1.0
    assert sorted(outcome.metrics) == ["grader_timeouts", "reward/correct", "tool_calls", "tool_errors"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"length_characters": 10}, "task.length_characters does nothing without task.length_penalty"),
        ({"tool": "none", "no_code_penalty": 1.0}, 'task.no_code_penalty does nothing with task.tool "none"'),
        ({"tool": "none", "tool_output_bytes": 100}, 'task.tool_output_bytes does nothing with task.tool "none"'),
        ({"format_penalty": -1.0}, "task.format_penalty must be at least 0"),
        ({"format_penalty": float("nan")}, "task.format_penalty must be a finite number"),
        ({"tool_output_bytes": 1}, "task.tool_output_bytes must be at least 64"),
    ],
)
def test_keys_that_cannot_work(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TaskConfig(name="retool", data="x", **keys)


def test_demonstrations_play_to_reward_1(tmp_path):
    told = {"problem": "1+1?", "solution": "Two.", "answer": "2"}
    worked = ROWS["gsm8k"]
    for tool, is_called in (("python", True), ("function", True), ("none", False)):
        task = make(tmp_path, told, worked, tool=tool)
        for row, has_marks in zip(task.test_rows[:2], (False, True), strict=True):
            messages = task.demonstrate(row).messages
            assert any(message.is_tool_call for message in messages) == (has_marks and is_called)
            assert asyncio.run(play(task, row, messages)).reward == 1.0
    assert task.demonstrate(task.test_rows[2]) is None


def test_real_rows(math_folder):
    task = make_task(
        TaskConfig(
            name="retool",
            data=str(math_folder / "aime_1983_2023.json"),
            test_data=str(math_folder / "math500.jsonl"),
        )
    )
    assert (len(task.train_rows), len(task.test_rows)) == (974, 500)  # of 975: one is in MATH-500 as well
    for name in ("retool_AIME24.jsonl", "retool_AIME25.jsonl"):
        rows = make_task(TaskConfig(name="retool", test_data=str(math_folder / name))).test_rows
        assert len(rows) == 30
        assert all(row["answer"].isdecimal() for row in rows)
