"""Task ``gsm8k``: grade-school problems ``{question, answer}`` (https://arxiv.org/abs/2110.14168), solved with python.

The data set's answers end in ``#### NUMBER`` and hold calculator marks such as ``<<48/2=24>>``.
"""

import hashlib
import importlib.util
import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from poise.config import ConfigError
from poise.envs.arithmetic import evaluate
from poise.envs.env import Outcome, Row
from poise.envs.grading import is_right, number_in
from poise.envs.tool_env import ToolEnv, answer_text
from poise.envs.tools import PythonTool, python_call
from poise.harmony.messages import Channel, Conversation, Message, SystemContent, analysis, final, tool_result, user
from poise.sandbox import Limits

_MARK = re.compile(r"<<([^<>]*)>>")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+(/[\w.\-/]+)?")


class Gsm8k:
    """Questions whose answer is a number, with the python tool.

    ``data``, ``test_data``: a .jsonl path, or a Hugging Face data set id, "OWNER/NAME" or "OWNER/NAME/FOLDER". Without
    ``test_data``, ``num_test_rows`` rows chosen by ``seed`` are held out of ``data``; without ``data`` there are only
    rows to evaluate on. A question that is held out is dropped from the training rows. The reward is 1 where the number
    on the final channel is right, else 0.
    ``demonstrate``: the reference solution as thinking, each calculator mark a python call; a share ``mental_share`` of
    the questions, chosen by their hash, is answered without calls.
    """

    def __init__(
        self,
        data: str | None,
        *,
        test_data: str | None = None,
        num_train_rows: int = 100_000,
        num_test_rows: int = 200,
        seed: int = 0,
        describes_tools: bool = True,
        mental_share: float = 0.0,
        tool_time_limit_s: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("task gsm8k needs the extra math: pip install 'poise[math]'")
        rows = [] if data is None else load_rows(data, split="train")
        if test_data is None:
            if num_test_rows >= len(rows):
                raise ConfigError(f"task.num_test_rows ({num_test_rows}) must be below the {len(rows)} rows of {data}")
            held_out = sorted(random.Random(seed).sample(range(len(rows)), num_test_rows))
            test_rows = [rows[i] for i in held_out]
        else:
            test_rows = load_rows(test_data, split="test")
        test_questions = {row["question"] for row in test_rows}
        kept = [row for row in rows if row["question"] not in test_questions]
        if not kept and data is not None:
            raise ConfigError(f"every question of task.data ({data}) is held out: nothing is left to train on")
        self.train_rows: Sequence[Row] = kept[:num_train_rows]
        self.test_rows: Sequence[Row] = test_rows
        self._system = SystemContent(builtin_tools=("python",)) if describes_tools else None
        self._describes_tools = describes_tools
        self._mental_share = mental_share
        self._tool = PythonTool(Limits(wall_s=tool_time_limit_s, cpu_s=tool_time_limit_s))

    def make_env(self, row: Row) -> ToolEnv:
        reference = _reference(row["answer"])

        async def grade(transcript: Sequence[Message]) -> Outcome:
            return Outcome(reward=float(await is_right(answer_text(transcript), reference)))

        return ToolEnv(conversation=self._conversation(row), tools=(self._tool,), grade=grade)

    def demonstrate(self, row: Row) -> Conversation:
        solution, _, answer = row["answer"].rpartition("####")
        ending = final(answer.strip())
        share = int.from_bytes(hashlib.sha256(row["question"].encode()).digest()[:7], "big") / 2**56
        if share < self._mental_share:
            thought = _MARK.sub("", solution).strip()
            return self._conversation(row, *([analysis(thought)] if thought else []), ending)
        return self._conversation(row, *self._worked(solution), ending)

    def _worked(self, solution: str) -> Iterable[Message]:
        """Text becomes analysis, each mark a call with its result; a mark that Python does not confirm is dropped."""
        thought, position = "", 0
        for mark in _MARK.finditer(solution):
            thought += solution[position : mark.start()]
            position = mark.end()
            expression, _, stated = mark[1].rpartition("=")
            output = _confirmed(expression.strip(), stated)
            if output is None:
                continue
            if thought.strip():
                yield analysis(thought.strip())
            thought = ""
            yield python_call(expression.strip(), is_described=self._describes_tools)
            yield tool_result("python", output, channel=Channel.ANALYSIS)
        thought += solution[position:]
        if thought.strip():
            yield analysis(thought.strip())

    def _conversation(self, row: Row, *messages: Message) -> Conversation:
        return Conversation(system=self._system, messages=(user(row["question"]), *messages))


def load_rows(source: str, *, split: str) -> list[Row]:
    """Rows of a .jsonl path, or of ``split`` of a Hugging Face data set. Raises ``ConfigError`` in one sentence."""
    path = Path(source).expanduser()
    if path.is_file():
        return _read(path)
    if path.suffix in (".jsonl", ".json") or not _HUB_ID.fullmatch(source):
        raise ConfigError(f"task data {source!r} does not exist: give a .jsonl path or a Hugging Face id OWNER/NAME")
    return [row for file in _download(source, split) for row in _read(file)]


def _read(path: Path) -> list[Row]:
    rows = []
    if path.suffix == ".parquet":
        lines: Iterable[str] = _parquet_lines(path)
    else:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_check_row(line, f"{path}:{number}"))
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def _check_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object with question and answer")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ConfigError(f"{where} needs a text {key!r}; it has {', '.join(row) or 'no keys'}")
    if number_in(row["answer"]) is None:
        raise ConfigError(f"{where}: the answer must end in '#### NUMBER', got {row['answer'][-40:]!r}")
    return row


def _reference(answer: str) -> Fraction:
    number = number_in(answer)
    assert number is not None  # load_rows checked it
    return number


def _confirmed(expression: str, stated: str) -> str | None:
    """What python shows for ``expression`` where that is the stated result, else None."""
    value, number = evaluate(expression), number_in(stated)
    if value is None or number is None or not math.isclose(value, number, rel_tol=1e-9, abs_tol=1e-9):
        return None
    return repr(value)


def _parquet_lines(path: Path) -> list[str]:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{path.name} is a parquet file: pip install pyarrow, or give a .jsonl path") from error
    return [json.dumps(row) for row in parquet.read_table(path).to_pylist()]


def _download(source: str, split: str) -> list[Path]:
    """The files of one split, from the Hub or its local cache: .jsonl where the data set has it, else .parquet."""
    from huggingface_hub import snapshot_download

    owner, name, *folder = source.split("/", 2)
    repo, prefix = f"{owner}/{name}", f"{folder[0].rstrip('/')}/" if folder else ""
    try:
        patterns = [f"{prefix}*{split}*{suffix}" for suffix in (".jsonl", ".parquet")]
        root = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # the border to the network: each transport has errors of its own
        reason = (str(error) or type(error).__name__).strip().split("\n")[0]
        raise ConfigError(f"data set {repo} cannot be read from the Hugging Face Hub: {reason}") from error
    for suffix in (".jsonl", ".parquet"):
        chosen = sorted(file for file in (root / prefix).rglob(f"*{suffix}") if split in file.name)
        folders = sorted({str(file.parent.relative_to(root)) for file in chosen})
        if len(folders) > 1:
            choices = ", ".join(f"{repo}/{folder}" for folder in folders)
            raise ConfigError(f"data set {repo} has several {split} sets; choose one of {choices}")
        if chosen:
            return chosen
    raise ConfigError(f"data set {repo} has no .jsonl or .parquet file named after split {split!r}")
