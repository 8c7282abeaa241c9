"""Task verifyif: real responses graded as published, the checkers' traps, made prompts, rewards."""

import asyncio
import json
import os
import random
import subprocess
import sys

import pytest
from playing import play

from poise.config import ConfigError, TaskConfig
from poise.envs import make_task
from poise.envs.instruction_check import CheckerError, build_checker, check, load_registry
from poise.envs.instruction_prompts import conflicts
from poise.harmony.messages import SystemContent, analysis, final
from poise.rollout import episode_metrics
from poise.types import Stop, Trajectory

MODULE = "lm_eval.tasks.ifeval.instructions_registry"
CAPITALS = {
    "key": 1,
    "prompt": "Write a title, no commas.",
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
    "kwargs": [{}, {"num_words": None}],
}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def verify(**keys):
    return make_task(TaskConfig(name="verifyif", **keys))


def outcome(task, row, *messages):
    return asyncio.run(play(task, row, [*task.conversation(row).messages, *messages]))


@pytest.fixture(scope="module")
def graded(ifeval_folder):
    """[(row, response, what follows)] of 540 real responses."""
    rows = {row["prompt"]: row for row in read(ifeval_folder / "input_data.jsonl")}
    found = []
    for line in read(ifeval_folder / "gpt4_responses.jsonl"):
        row = rows[line["prompt"]]
        found.append((row, line["response"], check(MODULE, *arguments(row), line["response"])))
    return found


def arguments(row):
    return row["prompt"], row["instruction_id_list"], row["kwargs"]


def test_540_real_responses_are_graded_as_published(graded):
    # The published checkers give 416 of 540 prompts and 696 of 832 instructions: 0.770 and 0.8365. They grade two rows
    # with a letter that is none at random; read as they are meant, one of them (ten exclamation marks where six were
    # asked for) turns from half the time to always right.
    strict = [result["strict"] for _, _, result in graded]
    assert len(strict) == 540
    assert sum(map(len, strict)) == 832
    assert sum(map(all, strict)) == 417
    assert sum(map(sum, strict)) == 697
    assert abs(round(417 / 540, 3) - 0.770) <= 0.002 + 1e-9
    assert abs(697 / 832 - 0.8365) <= 0.002
    assert sum(result["errors"] for _, _, result in graded) == 0
    loose = [result["loose"] for _, _, result in graded]
    assert all(a <= b for one, other in zip(strict, loose, strict=True) for a, b in zip(one, other, strict=True))


def test_rows_without_traps_are_graded_as_by_lm_eval_itself(graded):
    from lm_eval.tasks.ifeval import utils

    num_compared = 0
    for row, response, result in graded:
        if any(not one.get("letter", "a").isalpha() for one in row["kwargs"]):
            continue
        theirs = utils.process_results(row, [response])
        assert result["strict"] == theirs["inst_level_strict_acc"]
        assert result["loose"] == theirs["inst_level_loose_acc"]
        num_compared += 1
    assert num_compared == 538


AGAIN = """
import json, random, sys
from poise.envs.instruction_check import check
for line in open(sys.argv[1]):
    random.random()
    arguments = json.loads(line)
    print(json.dumps(check(sys.argv[2], *arguments)))
"""


def test_every_prompt_is_graded_the_same_twice(ifeval_folder, graded, tmp_path):
    """Here, and in a process with another hash seed and random state, in another order."""
    short = "Bonjour, c'est a short réponse! # no?"  # langdetect is unsure of it
    asked = [([*arguments(row), response], result) for row, response, result in graded]
    for row in read(ifeval_folder / "input_data.jsonl"):
        one = [*arguments(row), short]
        asked.append((one, check(MODULE, *one)))
    assert len({one[0] for one, _ in asked}) == 541
    random.shuffle(asked)
    (tmp_path / "asked").write_text("".join(json.dumps(one) + "\n" for one, _ in asked))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path / "asked"), MODULE],
        capture_output=True, text=True, timeout=600, env=env,
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [result for _, result in asked]


@pytest.mark.parametrize(
    ("instruction", "given", "response", "is_followed"),
    [
        # a letter that is none of a..z: the published checker would count some other one
        ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "at least"}, "a! b!", True),
        ("keywords:letter_frequency", {"letter": "!", "let_frequency": 3, "let_relation": "at least"}, "a! b!", False),
        ("keywords:letter_frequency", {"letter": "É", "let_frequency": 1, "let_relation": "at least"}, "été", True),
        ("keywords:letter_frequency", {"letter": "Q", "let_frequency": 1, "let_relation": "less than"}, "q", False),
        # 0 is a number and not a missing argument
        ("detectable_format:number_bullet_lists", {"num_bullets": 0}, "no list", True),
        ("detectable_format:number_bullet_lists", {"num_bullets": 0}, "- a list", False),
        ("length_constraints:number_words", {"num_words": 0, "relation": "at least"}, "a", True),
        # langdetect is unsure of such a text and drew lots
        ("language:response_language", {"language": "fr"}, "Bonjour", True),
        # nltk's data is there
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two.", True),
        ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at least"}, "NB c", True),
    ],
)  # fmt: skip
def test_traps_of_the_checkers(instruction, given, response, is_followed):
    for seed in range(8):
        random.seed(seed)
        state = random.getstate()
        result = check(MODULE, "a prompt", [instruction], [given], response)
        assert result == {"strict": [is_followed], "loose": [is_followed], "errors": 0}
        assert random.getstate() == state


@pytest.mark.parametrize(
    ("instruction", "given", "sentence"),
    [
        ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2}, "needs the argument 'let_relation'"),
        ("length_constraints:number_words", {"relation": "at least"}, "needs the argument 'num_words'"),
        ("keywords:frequency", {"keyword": None, "frequency": 2, "relation": "at least"}, "the argument 'keyword'"),
        ("punctuation:no_comma", {"number": 3}, "refuses {'number': 3}"),
        ("no:such", {}, "instruction 'no:such' is unknown to lm_eval"),
    ],
)  # fmt: skip
def test_an_instruction_that_chance_would_grade_is_refused(instruction, given, sentence):
    with pytest.raises(CheckerError, match=sentence):
        build_checker(load_registry(MODULE), instruction, given, "a prompt")


def test_loose_variants():
    # Judged by hand: strict sees the asterisks and the first and last line, loose does not.
    def graded(instruction, given, response):
        result = check(MODULE, "a prompt", [instruction], [given], response)
        return result["strict"] + result["loose"]

    quotation = ("startend:quotation", {})
    assert graded(*quotation, '"all of it"') == [True, True]
    assert graded(*quotation, 'Sure:\n"all of it"') == [False, True]
    assert graded(*quotation, '"all of it"\nI hope so.') == [False, True]
    assert graded(*quotation, 'Sure:\n"all of it"\nI hope so.') == [False, True]
    assert graded(*quotation, '*"all of it"*') == [False, True]
    assert graded(*quotation, 'Sure:\n*"all of it"*\nI hope so.') == [False, True]
    assert graded(*quotation, 'Sure: "all of it"') == [False, False]
    assert graded("punctuation:no_comma", {}, "") == [False, False]  # nothing follows nothing
    assert graded("punctuation:no_comma", {}, " \n") == [False, False]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rewards(tmp_path):
    data = write(tmp_path / "a.jsonl", CAPITALS)
    task = verify(test_data=data)
    (row,) = task.test_rows
    assert task.conversation(row).system == SystemContent()
    good, half = final("<<A title>> and text"), final("<<A title>>, and text")
    assert outcome(task, row, good).reward == 1.0
    assert outcome(task, row, half).reward == 0.0
    assert outcome(task, row, analysis(good.content)).reward == 0.0
    assert outcome(task, row, analysis(good.content), half).reward == 0.0
    assert outcome(task, row, analysis("one, two, three"), good).reward == 1.0
    assert outcome(verify(test_data=data, score="share"), row, half).reward == 0.5
    assert outcome(task, row, half).metrics == {
        "strict_prompt_accuracy": 0.0,
        "loose_prompt_accuracy": 0.0,
        "strict_instruction_accuracy/part": 1.0,
        "strict_instruction_accuracy/whole": 2.0,
        "loose_instruction_accuracy/part": 1.0,
        "loose_instruction_accuracy/whole": 2.0,
        "checker_errors": 0.0,
        "grader_timeouts": 0.0,
        "tool_calls": 0.0,
        "tool_errors": 0.0,
    }


def test_the_accuracy_of_instructions_is_one_ratio():
    # 1 of 1 and 1 of 3: two of four, not the mean of 1 and 1/3.
    def episode(part, whole):
        metrics = {"strict_instruction_accuracy/part": part, "strict_instruction_accuracy/whole": whole}
        return [Trajectory(group_id=0, episode_id="0", turns=(), reward=0.0, stop=Stop.DONE, metrics=metrics)]

    metrics = episode_metrics([episode(1.0, 1.0), episode(1.0, 3.0)])
    assert metrics["strict_instruction_accuracy"] == 0.5
    assert not [name for name in metrics if "/" in name]


def test_a_text_on_which_a_checker_hangs_follows_nothing(tmp_path):
    # re.findall of "[.*?]" over opening brackets alone is quadratic: half a megabyte takes minutes.
    row = {"prompt": "p", "instruction_id_list": ["detectable_content:number_placeholders"], "kwargs": [{"num_placeholders": 1}]}  # fmt: skip  # noqa: E501
    task = verify(test_data=write(tmp_path / "a.jsonl", row))
    graded = outcome(task, task.test_rows[0], final("[" * 500_000))
    assert graded.reward == 0.0
    assert graded.metrics["grader_timeouts"] == 1.0


def test_made_prompts():
    task = verify(num_train_rows=300, num_test_rows=50, max_instructions=3, seed=4)
    rows = list(task.train_rows)
    registry = load_registry(MODULE)
    assert len(rows) == 300
    assert rows == list(verify(num_train_rows=300, num_test_rows=50, max_instructions=3, seed=4).train_rows)
    random.seed(5)
    assert task.train_rows[17] == rows[17]  # whatever was asked for before, and whatever state chance is in
    assert rows != list(verify(num_train_rows=300, seed=5).train_rows)
    assert {len(row["instructions"]) for row in rows} == {1, 2, 3}
    used = {name for row in rows for name in row["instructions"]}
    assert len(used) > 20
    for row in rows:
        names = row["instructions"]
        assert not any(conflicts(registry, a, b) for i, a in enumerate(names) for b in names[:i])
        for name, given in zip(names, row["arguments"], strict=True):
            checker = registry.INSTRUCTION_DICT[name](name)
            assert checker.build_description(**given) in row["prompt"]  # what is asked for is what is checked
    requests = {row["prompt"].split("\n")[0] for row in rows}
    assert not requests & {row["prompt"].split("\n")[0] for row in task.test_rows}


def test_which_instructions_are_made():
    task = verify(num_train_rows=40, instructions=("punctuation:no_comma", "startend:quotation"), max_instructions=1)
    assert {name for row in task.train_rows for name in row["instructions"]} == set(task.config.instructions)
    with pytest.raises(ConfigError, match=r"task\.instructions: 'no:such' is unknown to lm_eval"):
        verify(instructions=("no:such",))


def test_seed_prompts_of_ones_own(tmp_path):
    held_out = write(tmp_path / "test.jsonl", CAPITALS)
    seeds = write(tmp_path / "a.jsonl", {"question": "Why?"}, {"prompt": "Who?"}, {"text": CAPITALS["prompt"]})
    task = verify(data=seeds, test_data=held_out, num_train_rows=30)
    assert {row["prompt"].split("\n")[0] for row in task.train_rows} == {"Why?", "Who?"}  # the third is held out
    assert [row["prompt"] for row in task.test_rows] == [CAPITALS["prompt"]]
    given = verify(data=write(tmp_path / "b.jsonl", CAPITALS, CAPITALS | {"prompt": "q"}), num_test_rows=1)
    assert len(given.train_rows) == len(given.test_rows) == 1


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"kwargs": [{}]}, "a.jsonl:1: instruction_id_list and kwargs must be lists of equal length"),
        ({"instruction_id_list": ["x", "y"]}, "a.jsonl:1: instruction 'x' is unknown to lm_eval"),
        ({"prompt": ""}, "a.jsonl:1 needs a text 'prompt'"),
        (
            {"instruction_id_list": ["keywords:frequency", "punctuation:no_comma"]},
            "a.jsonl:1: instruction keywords:frequency needs the argument",
        ),
    ],
)
def test_a_malformed_row(tmp_path, row, sentence):
    with pytest.raises(ConfigError, match=sentence):
        verify(test_data=write(tmp_path / "a.jsonl", CAPITALS | row))


def test_checkers_that_are_not_there():
    with pytest.raises(ConfigError, match=r"task\.checkers no\.such cannot be imported .*the extra ifeval"):
        verify(checkers="no.such")
    with pytest.raises(ConfigError, match=r"task\.checkers json has no INSTRUCTION_DICT"):
        verify(checkers="json")


def test_another_package():
    task = verify(checkers="other_checkers", num_train_rows=20, num_test_rows=2)
    words = {row["arguments"][0]["word"] for row in task.train_rows}
    assert words == {"yes", "no"}
    row = next(row for row in task.train_rows if row["arguments"][0]["word"] == "yes")
    assert row["prompt"].endswith("\n\nSay yes.")
    assert outcome(task, row, final("yes")).reward == 1.0
    crashed = outcome(task, row, final("crash"))
    assert (crashed.reward, crashed.metrics["checker_errors"]) == (0.0, 1.0)


def test_demonstrations_play_to_reward_1():
    names = ("startend:quotation", "detectable_format:title", "keywords:existence", "startend:end_checker")
    task = verify(num_train_rows=60, instructions=names, max_instructions=2)
    shown = [(row, task.demonstrate(row)) for row in task.train_rows]
    found = [(row, conversation) for row, conversation in shown if conversation is not None]
    assert len(found) > 40

    async def play_all():
        return await asyncio.gather(*[play(task, row, conversation.messages) for row, conversation in found])

    assert {graded.reward for graded in asyncio.run(play_all())} == {1.0}


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\u00a0\u2060", "\0", "\u202e\ufeff", "\ud800"])
def test_a_text_that_cannot_be_seen_follows_nothing(text):
    result = check(MODULE, "?", ["punctuation:no_comma"], [{}], text)
    # A lone surrogate becomes the question mark that it would be written as.
    assert result["strict"] == result["loose"] == [text == "\ud800"]


def test_the_checkers_do_not_log_what_the_policy_wrote():
    script = (
        "from poise.envs.instruction_check import check\n"
        f"print(check({MODULE!r}, '?', ['language:response_language'], [{{'language': 'de'}}], '[' * 300))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    # No language can be told: followed, as published.
    assert (done.stderr, "'strict': [True]" in done.stdout) == ("", True)
