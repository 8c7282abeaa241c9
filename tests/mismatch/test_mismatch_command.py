"""``poise mismatch`` from outside: tables, JSON, a damaged engine, a file of tokens, what is refused."""

import json

import pytest
import torch

from poise.cli import run
from poise.harmony import HarmonyTokenizer
from poise.model import load_model, save_model

TINY = [
    "--hidden-size=16", "--intermediate-size=12", "--num-layers=2", "--num-heads=2", "--num-kv-heads=1", "--head-dim=8",
    "--num-experts=4", "--sliding-window=8", "--max-turns=2", "--max-action-tokens=24", "--max-context-tokens=256",
    "--num-slots=4", "--tokens-per-microbatch=300", "--warm-start.steps=2", "--demonstrations-per-step=4",
    "--eval-problems=2", "--num-train-rows=5", "--num-test-rows=4", "--run.name=t", "--device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    assert run(["sft", "arithmetic_tiny", *TINY, f"--folder={path}"]) == 0
    return path / "t-001"


@pytest.fixture(scope="module")
def damaged(folder, tmp_path_factory):
    checkpoint = folder / "checkpoints/step_000000"
    model = load_model(checkpoint)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.sinks.fill_(4.0)
    path = tmp_path_factory.mktemp("engine") / "sinks"
    save_model(model, path, format="fp32", tokenizer=HarmonyTokenizer.load(checkpoint).save)
    return path


def report_of(tmp_path, *args: str):
    assert run(["mismatch", *args, f"--json={tmp_path / 'report.json'}"]) == 0
    return json.loads((tmp_path / "report.json").read_text())


def test_the_embedded_engine_differs_by_rounding(folder, tmp_path, capsys):
    report = report_of(tmp_path, str(folder), "--engine", "embedded", "--episodes", "3")
    printed = capsys.readouterr().out
    assert report["num_streams"] == 3
    assert report["kinds"]["all"]["max"] < 1e-4
    assert report["kinds"]["all"]["num_tokens"] == sum(
        value["num_tokens"] for name, value in report["kinds"].items() if name != "all"
    )
    assert sum(band["num_tokens"] for band in report["bands"].values()) == report["kinds"]["all"]["num_tokens"]
    assert report["routes"]["differing"] == [0.0, 0.0]
    assert report["diagnosis"]["cause"] == []
    for text in ("by kind of message", "worst tokens", "no mismatch beyond rounding", "layer 1"):
        assert text in printed
    assert "…" not in printed  # nothing is cut where there is no terminal


def test_a_damaged_engine_is_diagnosed_from_a_checkpoint_before_it(folder, damaged, tmp_path, capsys):
    # The engine has other sinks. As the previous checkpoint they explain everything.
    args = [str(folder), "--engine=embedded", f"--engine-checkpoint={damaged}", "--episodes=3"]
    report = report_of(tmp_path, *args, f"--previous={damaged}")
    assert report["diagnosis"]["cause"] == ["old sinks"]
    assert "diagnosis: old sinks explains 100.00%" in capsys.readouterr().out
    assert report["kinds"]["all"]["max"] > 1e-3
    # The worst token comes first, and its log-probs are those of the whole report.
    worst = [abs(token["trainer"] - token["engine"]) for token in report["worst"]]
    assert worst == sorted(worst, reverse=True)
    assert worst[0] == pytest.approx(report["kinds"]["all"]["max"])


def test_a_file_of_tokens_is_replayed(folder, damaged, tmp_path, capsys):
    text = "<|start|>user<|message|>1 + 1<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    tokenizer = HarmonyTokenizer.load(folder / "checkpoints/step_000000")
    specials = {tokenizer.decode([i]): i for i in tokenizer.special_ids}
    ids = []
    for piece in text.replace("<|", "\0<|").replace("|>", "|>\0").split("\0"):
        ids += [specials[piece]] if piece in specials else tokenizer.encode(piece)
    path = tmp_path / "tokens.jsonl"
    mask = [False] * (len(ids) - 3) + [True] * 3
    path.write_text(json.dumps(ids) + "\n" + json.dumps({"token_ids": ids, "response_mask": mask}))
    report = report_of(tmp_path, str(folder), "--engine=embedded", f"--tokens={path}", "--temperature=0.5")
    assert report["num_streams"] == 2
    assert report["temperature"] == 0.5
    # All tokens but the first of one stream, three of the other; of the first, those after <|end|> are final.
    assert report["kinds"]["all"]["num_tokens"] == len(ids) - 1 + 3
    assert report["kinds"]["final"]["num_tokens"] == len(ids) - 1 - ids.index(tokenizer.end) + 3
    assert report["diagnosis"]["cause"] == []
    # Another engine says something else of the same tokens.
    report = report_of(tmp_path, str(folder), "--engine=embedded", f"--engine-checkpoint={damaged}", f"--tokens={path}")
    assert report["kinds"]["all"]["max"] > 1e-3


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "needs --engine embedded or --engine URL"),
        (["--engine=vllm"], '--engine must be "embedded" or the URL of a server'),
        (["--engine=embedded", "--episodes=0"], "--episodes must be a whole number of at least 1"),
        (["--engine=embedded", "--episodes=1", "--tokens=x"], "exclude each other"),
        (["--engine=embedded", "--tokens=/nowhere"], "--tokens /nowhere does not exist"),
        (["--engine=embedded", "--previous=/nowhere"], "--previous /nowhere has no config.json"),
        (["--engine=http://127.0.0.1:9", "--engine-checkpoint=x"], "--engine-checkpoint belongs to --engine embedded"),
        (["--engine=embedded", "--engine.kind=vllm", "--engine.urls=http://a:1"], "--engine.* does nothing in"),
        (["--engine=embedded", "--entropy-weight=0.1"], "--algorithm.* does nothing in poise mismatch"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(folder, args, sentence, capsys):
    assert run(["mismatch", str(folder), *args]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error
