"""Task reasoning_gym: lazy rows, held-out problems, the package's scorers, demonstrations that really run."""

import asyncio

import pytest
import reasoning_gym
from playing import play

from poise.config import ConfigError, TaskConfig
from poise.envs import make_task
from poise.envs.arithmetic import evaluate
from poise.envs.reasoning_gym import ReasoningGym
from poise.harmony.messages import SystemContent, analysis, final, user


def reasoning(dataset, **keys):
    return ReasoningGym(TaskConfig(dataset=dataset, **keys))


def test_rows_are_those_of_the_package():
    task = reasoning("chain_sum", num_train_rows=50, num_test_rows=20, seed=5)
    package = reasoning_gym.create_dataset("chain_sum", seed=5, size=50)
    assert [row["question"] for row in task.train_rows] == [package[i]["question"] for i in range(50)]
    assert len(task.train_rows) == 50
    assert task.train_rows[-1] == package[49]
    assert list(task.train_rows[3:9:2]) == [package[3], package[5], package[7]]
    with pytest.raises(IndexError, match="row 50 of 50"):
        task.train_rows[50]


def test_rows_are_lazy():
    # Some 20 ms each: made beforehand they would take two days.
    task = reasoning("zebra_puzzles", num_train_rows=10_000_000, num_test_rows=2)
    assert task.train_rows[9_999_999]["question"] != task.train_rows[0]["question"]


def test_held_out_problems_are_not_trained_on():
    # Sums of two single digits: 200 possible questions or so, hence many collisions by chance.
    task = reasoning("chain_sum", num_train_rows=400, num_test_rows=20)
    assert not {row["question"] for row in task.test_rows} & {row["question"] for row in task.train_rows}
    small = reasoning("leg_counting", num_train_rows=300, num_test_rows=50)
    assert not {row["question"] for row in small.test_rows} & {row["question"] for row in small.train_rows}


def test_a_problem_that_is_held_out_by_chance_is_replaced():
    # coin_flip-like small sets: count_bits of small numbers repeats questions between any two seeds.
    task = reasoning("calendar_arithmetic", num_train_rows=500, num_test_rows=200)
    package = reasoning_gym.create_dataset("calendar_arithmetic", seed=0, size=500)
    held_out = {row["question"] for row in task.test_rows}
    collisions = [i for i in range(500) if package[i]["question"] in held_out]
    assert not held_out & {row["question"] for row in task.train_rows}
    assert all(task.train_rows[i] == package[i] for i in range(500) if i not in collisions)


def test_other_seeds_give_other_problems():
    questions = [
        {row["question"] for row in reasoning("chain_sum", num_train_rows=30, seed=seed).train_rows}
        for seed in (0, 1000)
    ]
    assert len(questions[0] & questions[1]) <= 1


@pytest.mark.parametrize(
    ("dataset", "expression", "shown", "answer"),
    [
        ("chain_sum", "1663 - 5242 - 9376 - 8961 + 7634", "-14282", "-14282"),
        ("products", "1663 * 5242", "8717446", "8717446"),
        ("basic_arithmetic", None, None, None),
        ("decimal_chain_sum", None, None, None),
        ("decimal_arithmetic", None, None, None),
    ],
)
def test_demonstrations_run_to_reward_1(dataset, expression, shown, answer):
    task = reasoning(dataset, num_train_rows=1000, num_test_rows=20, describes_tools=False)
    rows = task.train_rows[:40]
    conversations = [task.demonstrate(row) for row in rows]
    assert all(c is not None and c.system is None and c.developer is None for c in conversations)
    if expression is not None:
        contents = [message.content for message in conversations[0].messages]
        assert contents == [rows[0]["question"], expression, shown, answer]

    async def play_all():
        return await asyncio.gather(*[play(task, row, c.messages) for row, c in zip(rows, conversations, strict=True)])

    for outcome in asyncio.run(play_all()):
        assert outcome.reward == 1.0
        assert outcome.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


@pytest.mark.parametrize("dataset", ["gcd", "manipulate_matrix", "calendar_arithmetic", "gsm_symbolic"])
def test_other_data_sets_have_no_demonstrations(dataset):
    task = reasoning(dataset, num_train_rows=100, num_test_rows=5)
    assert [task.demonstrate(row) for row in task.train_rows[:20]] == [None] * 20


def test_mental_share():
    def mental(share, seed=0):
        task = reasoning("chain_sum", num_train_rows=400, num_test_rows=5, seed=seed, mental_share=share)
        found = {}
        for row in task.train_rows:
            messages = task.demonstrate(row).messages
            found[row["question"]] = len(messages) == 2
            if len(messages) == 2:
                assert messages[1] == final(row["answer"])
        return found

    assert not any(mental(0.0).values())
    assert all(mental(1.0).values())
    some = mental(0.3)
    assert 83 <= sum(some.values()) <= 157  # of 400, 120 expected, 4 standard deviations of 9.2
    assert mental(0.3) == some


def test_scores_are_the_packages():
    task = reasoning("chain_sum", num_train_rows=10, num_test_rows=5)
    row = task.train_rows[0]  # the answer is -14282

    def reward(*messages):
        return asyncio.run(play(task, row, [user(row["question"]), *messages])).reward

    assert reward(final("-14282")) == 1.0
    assert reward(final("= -14282")) == 6 / 8  # reasoning-gym's share of a longer text
    assert reward(final("14282")) == 0.0
    assert reward(analysis("-14282")) == 0.0
    assert reward(analysis("-14282"), final("")) == 0.0


def test_data_sets_with_a_scorer_of_their_own():
    # Any valid colouring, permutation or sentence counts, not only the one that the generator had in mind.
    task = reasoning("word_sorting", num_train_rows=10, num_test_rows=5)
    row = task.train_rows[0]
    outcome = asyncio.run(play(task, row, [user(row["question"]), final(row["answer"])]))
    assert outcome.reward == 1.0
    # word_sorting's own scorer gives a tenth of a point to the right words in the wrong order.
    shuffled = ", ".join(reversed(row["answer"].split(", ")))
    outcome = asyncio.run(play(task, row, [user(row["question"]), final(shuffled)]))
    package = reasoning_gym.create_dataset("word_sorting", seed=0, size=10)
    assert outcome.reward == package.score_answer(shuffled, package[0])
    assert 0.0 < outcome.reward < 1.0


def test_configuration():
    task = make_task(TaskConfig(dataset="products", num_train_rows=7, num_test_rows=3, seed=2))
    assert (len(task.train_rows), len(task.test_rows)) == (7, 3)
    conversation = asyncio.run(task.make_env(task.train_rows[0]).reset())
    assert conversation.system == SystemContent(builtin_tools=("python",))
    assert conversation.messages == (user(task.train_rows[0]["question"]),)
    with pytest.raises(
        ConfigError, match=r"task\.dataset 'chain_sums' is no data set of reasoning-gym; it has .*chain_sum,"
    ):
        make_task(TaskConfig(dataset="chain_sums"))
    with pytest.raises(ConfigError, match=r"task\.dataset 'composite' cannot be created"):
        make_task(TaskConfig(dataset="composite"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 + 345 - 6", 351), ("-( 2 * 3 ) / 4", -1.5), (" 7 // 2 % 2", 1), ("2 ** 3", None), ("1 / 0", None),
     ("a + 1", None), ("007 + 1", None), ("1,000 + 1", None), ("", None), ("True + 1", None), ("+" * 5000 + "1", None)],
)  # fmt: skip
def test_evaluate(expression, value):
    assert evaluate(expression) == value
