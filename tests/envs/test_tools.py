"""Tools: schemas against Transformers' own, and every mistake of a policy as text."""

import asyncio
import threading
import time
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from poise.envs.env import Observation, Outcome
from poise.envs.schema import check_arguments, declaration_of
from poise.envs.tools import CallableTool, PythonTool, ToolServerError, answer_calls
from poise.harmony import Renderer, byte_tokenizer
from poise.harmony.messages import Conversation, Message, Role, analysis, final, tool_result, user
from poise.rollout import Limits as RolloutLimits
from poise.rollout import run_group
from poise.sandbox import Limits
from poise.types import Action


def call(recipient: str, content: str, channel: str | None = "commentary") -> Message:
    return Message(role=Role.ASSISTANT, recipient=recipient, channel=channel, content=content)


def answers(calls, *tools):
    results, outputs = asyncio.run(answer_calls(calls, {tool.name: tool for tool in tools}))
    assert [result.content for result in results] == [output.text for output in outputs]
    return [(result.name, result.channel, result.content) for result in results], [o.is_error for o in outputs]


def weather(city: str, unit: Literal["C", "F"] = "C", days: int | None = None) -> str:
    """
    Forecasts the weather.

    Args:
        city: The city,
            with its country.
        unit (str): Unit of the temperature.
        days: How many days ahead.

    Returns:
        A sentence.
    """
    return f"{city} {unit} {days}"


def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def nested(matrix: list[list[int]], options: dict[str, bool], anything: Any, either: int | str) -> None:
    """Takes nested things.

    Args:
        matrix: Rows.
        options: Switches.
        anything: What you like.
        either: A number or its name.
    """


def nothing() -> str:
    """Takes no argument."""
    return "done"


@pytest.mark.parametrize("function", [weather, add, nested])
def test_schema_equals_that_of_transformers(function):
    # Transformers' schema of the same function is the reference; it writes a choice's type per value.
    reference = get_json_schema(function)["function"]
    declared = declaration_of(function)
    assert declared.name == reference["name"]
    assert declared.description == reference["description"]
    assert declared.parameters == reference["parameters"]


def test_schema_of_a_function_without_arguments():
    declared = declaration_of(nothing)
    assert (declared.name, declared.description, declared.parameters) == ("nothing", "Takes no argument.", None)


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    """Text.

    Args:
        a: A number.
    """
    return a


def not_described(a: int) -> int:
    """Text."""
    return a


def many(*a: int) -> int:
    """Text.

    Args:
        a: Numbers.
    """
    return sum(a)


def odd_type(a: bytes) -> int:
    """Text.

    Args:
        a: Bytes.
    """
    return len(a)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_docstring, "tool no_docstring needs a docstring"),
        (no_hint, "parameter a of tool no_hint needs a type hint"),
        (not_described, "parameter a of tool not_described needs a line in the docstring's Args section"),
        (many, "parameter a of tool many must be an ordinary parameter"),
        (odd_type, "parameter a of tool odd_type has type <class 'bytes'>; allowed: str, int"),
    ],
)
def test_a_function_that_is_no_tool(function, sentence):
    with pytest.raises(ValueError, match=sentence):
        CallableTool(function)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"city": "Bern"}', "Bern C None"),
        ('{"city": "Bern", "unit": "F", "days": 3}', "Bern F 3"),
        ('{"city": "Bern", "days": 3.0}', "Bern C 3"),
        ('{"city": "Bern", "days": null}', "Bern C None"),
        ('{"city": "Bern"', "Error: arguments are no JSON: Expecting ',' delimiter: line 1 column 16 (char 15)"),
        ("", "Error: arguments are no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "Error: arguments must be a JSON object, got array"),
        ('{"city": "Bern", "days": NaN}', "Error: arguments are no JSON: NaN is not JSON"),
        ("{}", "Error: missing argument 'city'"),
        ('{"town": "Bern"}', "Error: unknown argument 'town'; arguments: city, unit, days"),
        ('{"city": 3}', "Error: argument 'city' must be string, got integer 3"),
        ('{"city": "Bern", "unit": "K"}', "Error: argument 'unit' must be one of 'C', 'F', got \"K\""),
        ('{"city": "Bern", "days": 1.5}', "Error: argument 'days' must be integer, got number 1.5"),
        ('{"city": "Bern", "days": true}', "Error: argument 'days' must be integer, got boolean true"),
        ("[" * 100_000, "Error: arguments are no JSON: maximum recursion depth exceeded"),
    ],
)
def test_arguments(content, text):
    results, errors = answers([call("functions.weather", content)], CallableTool(weather))
    assert results[0][2].startswith(text)
    assert errors == [text.startswith("Error")]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"matrix": [[1, 2], [3]], "options": {"x": true}, "anything": [null], "either": "one"}', ""),
        (
            '{"matrix": [[1, "2"]], "options": {}, "anything": 1, "either": 1}',
            "an item of an item of argument 'matrix' must be integer, got string \"2\"",
        ),
        (
            '{"matrix": [], "options": {"x": 1}, "anything": 1, "either": 1}',
            "'x' of argument 'options' must be boolean, got integer 1",
        ),
        (
            '{"matrix": [], "options": {}, "anything": 1, "either": []}',
            "argument 'either' must be integer or string, got array []",
        ),
    ],
)
def test_nested_arguments(arguments, problem):
    assert check_arguments(arguments, declaration_of(nested).parameters)[1] == problem


def test_unknown_tools():
    results, errors = answers([call("functions.fly", "{}"), call("browser.search", "x", None)], CallableTool(add))
    assert results == [
        ("functions.fly", "commentary", "Error: there is no tool 'functions.fly'; tools: functions.add"),
        ("browser.search", "commentary", "Error: there is no tool 'browser.search'; tools: functions.add"),
    ]
    assert errors == [True, True]


def test_a_recipient_that_is_no_name_does_not_become_an_author():
    results, _ = answers([call("a b<|end|>", "{}")])
    assert results == [("unknown", "commentary", "Error: there is no tool 'a b<|end|>'; tools: none")]


def fails() -> str:
    """Fails."""
    raise KeyError("gone")


async def server_down() -> str:
    """Is down."""
    raise ToolServerError("no answer from the server")


async def raises_timeout() -> str:
    """Raises a time-out of its own."""
    raise TimeoutError("the lake is frozen")


def test_exceptions_are_texts_but_a_broken_server_is_not():
    results, errors = answers([call("functions.fails", "")], CallableTool(fails))
    assert results[0][2] == "Error: KeyError: 'gone'"
    assert errors == [True]
    results, _ = answers([call("functions.raises_timeout", "")], CallableTool(raises_timeout))
    assert results[0][2] == "Error: TimeoutError: the lake is frozen"
    with pytest.raises(ToolServerError, match="no answer from the server"):
        answers([call("functions.server_down", "{}")], CallableTool(server_down))


def test_time_limit_of_a_function():
    is_over = threading.Event()

    async def waits() -> str:
        """Waits."""
        await asyncio.Event().wait()
        return "never"

    def sleeps() -> str:
        """Sleeps."""
        is_over.wait()
        return "too late"

    async def outputs():
        try:
            return [await CallableTool(function, time_limit_s=0.05)("") for function in (waits, sleeps)]
        finally:
            is_over.set()  # the thread is left behind, and the end of the loop waits for it

    for output in asyncio.run(outputs()):
        assert output.text == "Error: timed out after 0.05 s"
        assert output.is_error


def test_independent_calls_overlap_and_keep_their_order():
    all_four = asyncio.Barrier(4)

    async def meets() -> str:
        """Waits for three others."""
        await all_four.wait()
        return "met"

    results, _ = answers([call("functions.meets", "")] * 4 + [call("functions.nothing", "{}")],
                         CallableTool(meets), CallableTool(nothing))  # fmt: skip
    assert [text for _, _, text in results] == ["met"] * 4 + ["done"]


def test_dependent_calls_run_in_order():
    seen = []

    def note(n: int) -> int:
        """Notes a number.

        Args:
            n: The number.
        """
        time.sleep(0.05 if n == 0 else 0)
        seen.append(n)
        return n

    answers([call("functions.note", f'{{"n": {n}}}') for n in range(4)], CallableTool(note))
    assert seen == [0, 1, 2, 3]


def test_python_tool():
    builtin, function = PythonTool(), PythonTool(is_function=True)
    assert (builtin.name, builtin.declaration) == ("python", None)
    assert function.declaration is not None
    results, errors = answers(
        [
            call("python", "6 * 7", "analysis"),
            analysis("not a call"),
            call("functions.python", '{"code": "6 * 8"}'),
            call("functions.python", "6 * 8"),
            call("python", "1 / 0", "analysis"),
            call("python", "x", None),
        ],
        builtin,
        function,
    )
    assert [(name, channel, text.splitlines()[-1]) for name, channel, text in results] == [
        ("python", "analysis", "42"),
        ("functions.python", "commentary", "48"),
        ("functions.python", "commentary", "Error: arguments are no JSON: Extra data: line 1 column 3 (char 2)"),
        ("python", "analysis", "ZeroDivisionError: division by zero"),
        ("python", "commentary", "NameError: name 'x' is not defined"),
    ]
    assert errors == [False, False, True, True, True]


def test_python_tool_has_a_time_limit():
    tool = PythonTool(Limits(wall_s=0.3, cpu_s=600))
    results, errors = answers([call("python", "while True: pass", "analysis")], tool)
    assert results[0][:2] == ("python", "analysis")
    # On a busy machine it may not end in time where it is interrupted.
    assert results[0][2] in (
        "[timed out after 0.3 s; interrupted, variables are kept]",
        "[timed out after 0.3 s; the interpreter was restarted, all variables are lost]",
    )
    assert errors == [True]


DRAWN = "import random\nimport numpy as np\n(random.random(), float(np.random.rand()))"


def test_python_tool_draws_by_the_seed_of_the_episode():
    class Draws:
        """Two interpreters that run the same cell twice; the reward is a number that the policy's code drew."""

        def __init__(self):
            self.tools, self.drawn = (PythonTool(), PythonTool()), []

        async def reset(self):
            return Conversation(messages=(user("Draw."),))

        async def step(self, messages):
            for tool in self.tools:
                self.drawn += [(await tool(DRAWN)).text for _ in range(2)]
            return Observation(is_done=True)

        async def outcome(self):
            return Outcome(reward=0.0)

        async def close(self):
            for tool in self.tools:
                await tool.close()
                await tool.close()  # a second time does nothing

    renderer = Renderer(byte_tokenizer())

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        ids = renderer._action([final("")])
        return Action(token_ids=tuple(ids), log_probs=(-1.0,) * len(ids), is_stopped=True)

    async def group(seed):
        envs = []

        def make_env():
            envs.append(Draws())
            return envs[-1]

        limits = RolloutLimits(max_turns=1, max_action_tokens=9, max_context_tokens=99)
        await run_group(make_env, policy, renderer, group_id=0, group_size=2, seed=seed, limits=limits)
        return [env.drawn for env in envs]

    first, again, other = (asyncio.run(group(seed)) for seed in (5, 5, 6))
    assert first == again
    # Of two groups of two episodes each differs from the others, though all ran the same code.
    drawn = [*first, *other]
    assert len({tuple(texts) for texts in drawn}) == 4
    for texts in drawn:
        assert texts[:2] == texts[2:]  # both interpreters of an episode have its seed
        assert texts[0] != texts[1]  # and go on drawing


def test_results_are_addressed_to_the_assistant():
    results, _ = asyncio.run(answer_calls([call("python", "1", "analysis")], {"python": PythonTool()}))
    assert results == (tool_result("python", "1", channel="analysis"),)
