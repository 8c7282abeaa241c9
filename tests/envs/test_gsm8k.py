"""Task gsm8k: rows, demonstrations that really run, rewards."""

import asyncio
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from playing import play

from poise.config import ConfigError, TaskConfig
from poise.envs import make_task
from poise.envs.gsm8k import Gsm8k
from poise.harmony.messages import Channel, SystemContent, analysis, final

NATALIA = {
    "question": "Natalia sold 48 clips in April, and half as many in May. How many altogether?",
    "answer": "In May 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}


def gsm8k(data, **keys):
    return Gsm8k(TaskConfig(name="gsm8k", data=data, **keys))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count, start=0):
    return [
        {"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(start, start + count)
    ]


def test_a_demonstration(tmp_path):
    task = gsm8k(write(tmp_path / "a.jsonl", NATALIA, *rows(2)), num_test_rows=1, describes_tools=False)
    conversation = task.demonstrate(NATALIA)
    assert conversation.system is None
    assert conversation.developer is None
    assert [(m.role.value, m.channel, m.recipient, m.content) for m in conversation.messages[1:]] == [
        ("assistant", "analysis", None, "In May 48/2 ="),
        ("assistant", "analysis", "python", "48/2"),
        ("tool", "analysis", "assistant", "24.0"),
        ("assistant", "analysis", None, "24 clips.\nAltogether 48+24 ="),
        ("assistant", "analysis", "python", "48+24"),
        ("tool", "analysis", "assistant", "72"),
        ("assistant", "analysis", None, "72."),
        ("assistant", "final", None, "72"),
    ]
    assert asyncio.run(play(task, NATALIA, conversation.messages)).metrics == {"tool_calls": 2.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    "mark", ["<<2+2=5>>", "<<two+2=4>>", "<<2+2>>", "<<10/3=3.33>>", "<<1/0=1>>", "<<>>", "<<2*=4>>"]
)
def test_a_mark_that_python_does_not_confirm_is_left_out(tmp_path, mark):
    row = {"question": "q", "answer": f"First {mark}4, then <<4+1=5>>5.\n#### 5"}
    task = gsm8k(write(tmp_path / "a.jsonl", row, *rows(2)), num_test_rows=1)
    messages = task.demonstrate(row).messages[1:]
    assert [m.content for m in messages] == ["First 4, then", "4+1", "5", "5.", "5"]


def test_an_answer_without_thought(tmp_path):
    row = {"question": "q", "answer": "#### 1,200"}
    task = gsm8k(write(tmp_path / "a.jsonl", row, *rows(2)), num_test_rows=1)
    assert task.demonstrate(row).messages[1:] == (final("1,200"),)
    assert asyncio.run(play(task, row, task.demonstrate(row).messages)).reward == 1.0


def test_rewards(tmp_path):
    task = gsm8k(write(tmp_path / "a.jsonl", NATALIA, *rows(2)), num_test_rows=1)
    prompt = task.demonstrate(NATALIA).messages[:1]

    def reward(*messages):
        return asyncio.run(play(task, NATALIA, [*prompt, *messages])).reward

    assert reward(final("The answer is 72.")) == 1.0
    assert reward(analysis("It is 70."), final("2 \\cdot 36")) == 1.0
    assert reward(final("71")) == 0.0
    assert reward(analysis("72")) == 0.0
    assert reward(analysis("72"), final("I don't know")) == 0.0
    assert reward(final("72"), final("71")) == 0.0


def test_mental_share_is_of_the_question(tmp_path):
    data = write(tmp_path / "a.jsonl", *rows(400))
    task = gsm8k(data, num_test_rows=100, mental_share=0.25)
    mental = {
        row["question"]
        for row in task.train_rows
        if not any(message.is_tool_call for message in task.demonstrate(row).messages)
    }
    assert 45 <= len(mental) <= 105  # of 300, 75 expected, 4 standard deviations of 7.5
    again = gsm8k(data, num_test_rows=100, seed=1, mental_share=0.25)
    assert all(
        (row["question"] in mental) != any(m.is_tool_call for m in again.demonstrate(row).messages)
        for row in again.train_rows
        if row in task.train_rows
    )


def test_splits(tmp_path):
    train, test = write(tmp_path / "train.jsonl", *rows(10)), write(tmp_path / "test.jsonl", *rows(5, start=8))
    task = gsm8k(train, test_data=test)
    assert [row["question"] for row in task.train_rows] == [f"{i} + 1?" for i in range(8)]  # 8 and 9 are held out
    assert len(task.test_rows) == 5
    assert len(gsm8k(train, test_data=test, num_train_rows=3).train_rows) == 3
    split = gsm8k(train, num_test_rows=4, seed=3)
    questions = [row["question"] for row in (*split.train_rows, *split.test_rows)]
    assert sorted(questions) == sorted(f"{i} + 1?" for i in range(10))
    assert len(split.test_rows) == 4
    assert split.test_rows == gsm8k(train, num_test_rows=4, seed=3).test_rows
    assert split.test_rows != gsm8k(train, num_test_rows=4, seed=4).test_rows


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a.jsonl holds no rows"),
        ('{"question": "q", "answer": "#### 1"}\n{"question": ', r"a.jsonl:2 is no JSON: Expecting value"),
        ('{"question": "q", "answer": "#### 1"}\n\n[1]', r"a.jsonl:3 must be an object, got"),
        ('{"question": "q"}', r"a.jsonl:1 needs a text 'answer'; it has question"),
        ('{"question": "", "answer": "#### 1"}', r"a.jsonl:1 needs a text 'question'"),
        ('{"question": "q", "answer": [7]}', r"a.jsonl:1 needs a text 'answer'"),
        ('{"question": "q", "answer": "nothing"}', r"a.jsonl:1: the answer must end in '#### NUMBER', got 'nothing'"),
    ],
)
def test_a_malformed_file(tmp_path, text, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        gsm8k(str(path), num_test_rows=1)


def test_configuration(tmp_path):
    data = write(tmp_path / "a.jsonl", NATALIA, *rows(3))
    task = make_task(TaskConfig(name="gsm8k", data=data, num_test_rows=2))
    assert len(task.train_rows) == len(task.test_rows) == 2
    assert task.demonstrate(NATALIA).system == SystemContent(builtin_tools=("python",))
    with pytest.raises(ConfigError, match=r"task\.data is required by task gsm8k"):
        make_task(TaskConfig(name="gsm8k"))
    with pytest.raises(ConfigError, match=r"'nowhere\.jsonl' does not exist: give a \.jsonl, \.json, \.parquet path"):
        make_task(TaskConfig(name="gsm8k", data="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"task\.num_test_rows \(4\) must be below the 4 rows"):
        make_task(TaskConfig(name="gsm8k", data=data, num_test_rows=4))
    with pytest.raises(ConfigError, match="is held out: nothing is left to train on"):
        make_task(TaskConfig(name="gsm8k", data=data, test_data=data))


def test_a_missing_extra_is_one_sentence(tmp_path):
    data = write(tmp_path / "a.jsonl", NATALIA, *rows(3))
    script = (
        "import sys; sys.modules['math_verify'] = sys.modules['reasoning_gym'] = None\n"
        "from poise.config import *\nfrom poise.envs import make_task\n"
        "for config in (TaskConfig(), TaskConfig(name='gsm8k', data=sys.argv[1], num_test_rows=1)):\n"
        "    try: make_task(config)\n"
        "    except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, data], capture_output=True, text=True, timeout=6000)
    assert done.stdout.splitlines() == [
        "task reasoning_gym needs the extra gym: pip install 'poise[gym]'",
        "task gsm8k needs the extra math: pip install 'poise[math]'",
    ]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face Hub's interface as listing and fetching files of one data set takes."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_HEAD(self):
        self.do_GET(has_body=False)

    def do_GET(self, has_body=True):
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/me/sums"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "me/sums", "sha": "a" * 40, "siblings": siblings}).encode()
            if "/tree/" in path:
                body = json.dumps(
                    [{"type": "file", "path": name, "size": len(b), "oid": "b" * 40} for name, b in self.files.items()]
                ).encode()
        elif path.startswith("/datasets/me/sums/resolve/") and path.split("/", 6)[6] in self.files:
            body = self.files[path.split("/", 6)[6]]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


LOAD = """
import sys
from poise.config import ConfigError
from poise.envs.gsm8k import check_row
from poise.envs.rows import load_rows
try:
    print([row["question"] for row in load_rows(sys.argv[1], split=sys.argv[2], check=check_row)])
except ConfigError as error:
    print(error)
"""


def load(source, split, endpoint, home):
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_XET": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LOAD, source, split]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env).stdout.strip()


def test_rows_from_the_hub(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in rows(2)).encode()
    Hub.files = {
        "main/train.jsonl": lines,
        "main/test.jsonl": lines[: lines.index(b"\n")],
        "socratic/train.jsonl": lines,
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        assert load("me/sums/main", "train", endpoint, tmp_path) == "['0 + 1?', '1 + 1?']"
        assert load("me/sums", "test", endpoint, tmp_path) == "['0 + 1?']"
        assert load("me/sums", "train", endpoint, tmp_path) == (
            "data set me/sums has several train sets; choose one of me/sums/main, me/sums/socratic"
        )
        assert load("me/sums", "dev", endpoint, tmp_path) == (
            "data set me/sums has no .jsonl or .parquet file named after split 'dev'"
        )
        assert load("me/none", "dev", endpoint, tmp_path).startswith(
            "data set me/none cannot be read from the Hugging Face Hub: "
        )
        server.shutdown()


def test_the_hub_is_not_reachable(tmp_path):
    sentence = load("openai/gsm8k", "train", "http://127.0.0.1:9", tmp_path)
    assert sentence.startswith("data set openai/gsm8k cannot be read from the Hugging Face Hub: ")
    assert "\n" not in sentence


def test_500_real_demonstrations_play_to_reward_1(gsm8k_folder):
    task = gsm8k(str(gsm8k_folder / "train.jsonl"), test_data=str(gsm8k_folder / "test.jsonl"), describes_tools=False)
    assert (len(task.train_rows), len(task.test_rows)) == (7473, 1319)

    async def play_all():
        return await asyncio.gather(*[play(task, row, task.demonstrate(row).messages) for row in task.train_rows[:500]])

    outcomes = asyncio.run(play_all())
    num_marks = sum(row["answer"].count("<<") for row in task.train_rows[:500])
    assert [outcome.reward for outcome in outcomes] == [1.0] * 500
    assert sum(outcome.metrics["tool_calls"] for outcome in outcomes) == num_marks
    assert sum(outcome.metrics["tool_errors"] for outcome in outcomes) == 0


def test_calls_are_on_the_analysis_channel(tmp_path):
    # GPT-OSS calls its built-in tools there; content type "code" as in its training, left out for a tiny policy.
    data = write(tmp_path / "a.jsonl", NATALIA, *rows(2))
    for describes_tools, content_type in ((True, "code"), (False, None)):
        task = gsm8k(data, num_test_rows=1, describes_tools=describes_tools)
        call = next(m for m in task.demonstrate(NATALIA).messages if m.is_tool_call)
        assert (call.channel, call.content_type) == (Channel.ANALYSIS, content_type)
