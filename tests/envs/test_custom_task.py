"""A user's own task, named as MODULE:FUNCTION."""

import pytest

from poise.assembly import sandbox_walls
from poise.cli import run
from poise.config import Config, ConfigError, SandboxConfig, TaskConfig
from poise.envs import make_task
from poise.sandbox import Sandbox, describe

MODULE = """
from poise.envs.env import Outcome
from poise.envs.tool_env import ToolEnv, answer_text
from poise.harmony import Conversation, final, user

class Squares:
    train_rows = [{"n": n} for n in range(10, 20)]
    test_rows = [{"n": n} for n in range(10)]

    def make_env(self, row):
        prompt = Conversation(messages=(user(f"{row['n']} squared?"),))
        grade = lambda said: Outcome(reward=float(answer_text(said) == str(row["n"] ** 2)))
        return ToolEnv(conversation=prompt, tools=(), grade=grade)

    def demonstrate(self, row):
        return Conversation(messages=(user(f"{row['n']} squared?"), final(str(row["n"] ** 2))))

def make_task():
    return Squares()

def nothing():
    return object()

def make_boxed(sandbox):
    task = Squares()
    task.sandbox = sandbox
    return task
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name):
        (tmp_path / f"{name}.py").write_text(MODULE)
        return tmp_path

    return write


def test_the_function_makes_the_task(in_folder):
    in_folder("my_squares")
    task = make_task(TaskConfig(name="custom", factory="my_squares:make_task"))
    assert len(task.train_rows) == 10
    assert task.demonstrate({"n": 12}).messages[-1].content == "144"


def test_it_is_trained_on(in_folder, capsys):
    folder = in_folder("my_other_squares")
    keys = (
        "--task custom --task.factory my_other_squares:make_task --warm-start.steps 1 --run.steps 1 --run.folder runs"
    )
    sizes = "--model.hidden-size 32 --model.intermediate-size 32 --groups-per-step 2 --group-size 2 --max-turns 1"
    lengths = "--max-action-tokens 8 --max-context-tokens 64 --eval-problems 2 --demonstrations-per-step 2"
    assert run(["train", "arithmetic_tiny", *keys.split(), *sizes.split(), *lengths.split()]) == 0
    assert (folder / "runs" / "arithmetic_tiny-1" / "metrics.jsonl").exists() or list(
        folder.glob("runs/*/metrics.jsonl")
    )


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("my_third", "must be MODULE:FUNCTION, got 'my_third'"),
        ("not_there:make_task", "there is no module not_there"),
        ("my_third:makes_task", "my_third has no function makes_task"),
        ("my_third:nothing", "returned a object without train_rows, test_rows, make_env, demonstrate"),
    ],
    ids=["no-function", "no-module", "no-such-function", "no-task"],
)
def test_what_makes_no_task_is_refused_by_name(in_folder, factory, sentence):
    in_folder("my_third")
    with pytest.raises(ConfigError, match=sentence):
        make_task(TaskConfig(name="custom", factory=factory))


def test_factory_and_custom_belong_together():
    for keys in ({"name": "custom"}, {"factory": "a:b"}):
        with pytest.raises(ConfigError, match=r"task\.factory must be given with task.name"):
            TaskConfig(**keys)


def test_keys_of_the_built_in_tasks_are_refused(in_folder, capsys):
    in_folder("my_fourth")
    keys = "--task custom --task.factory my_fourth:make_task --task.num-test-rows 3"
    assert run(["train", "arithmetic_tiny", *keys.split()]) == 2
    assert "task.num-test-rows does nothing for task custom" in capsys.readouterr().err


def test_a_factory_with_the_parameter_is_given_the_sandbox(in_folder):
    in_folder("my_fifth")
    keys = SandboxConfig(memory_mib=100)
    task = make_task(TaskConfig(name="custom", factory="my_fifth:make_boxed"), keys)
    assert task.sandbox == keys
    # What keeps code in is said and recorded for a task that takes the sandbox, and only for such a one.
    boxed, plain = (
        sandbox_walls(Config(task=TaskConfig(name="custom", factory=f"my_fifth:{name}")))
        for name in ("make_boxed", "make_task")
    )
    assert boxed == {"protection": describe(Sandbox().walls()), **Sandbox().walls()}
    assert plain == {"protection": "as task.factory decides"}


def test_keys_of_the_sandbox_are_refused_where_nothing_takes_them(in_folder, capsys):
    in_folder("my_sixth")
    keys = "--task custom --task.factory my_sixth:make_task --sandbox.memory-mib 100"
    assert run(["train", "arithmetic_tiny", *keys.split()]) == 2
    assert "sandbox keys do nothing here: task.factory my_sixth:make_task has no parameter" in capsys.readouterr().err


def test_its_checkpoint_is_evaluated_on_another_task(in_folder, capsys):
    folder = in_folder("my_seventh")
    keys = "--task custom --task.factory my_seventh:make_task --warm-start.steps 1 --run.folder runs --run.name t"
    sizes = "--model.hidden-size 32 --model.intermediate-size 32 --max-turns 1 --num-layers 1"
    lengths = "--max-action-tokens 8 --max-context-tokens 512 --demonstrations-per-step 2"
    assert run(["sft", "arithmetic_tiny", *keys.split(), *sizes.split(), *lengths.split()]) == 0
    (folder / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    # The run's factory makes no rows of GSM8K, and nobody asks for it.
    assert (
        run(["eval", "runs/t-001", "--task", "gsm8k", "--mental-share=0", "--tool=none", "--test-data=rows.jsonl"]) == 0
    )
    assert "gsm8k: 1 held-out problems" in capsys.readouterr().out
    assert run(["eval", "runs/t-001", "--task", "gsm8k"]) == 2
    assert "task.data is required by task gsm8k" in capsys.readouterr().err
