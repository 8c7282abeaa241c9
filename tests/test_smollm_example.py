"""The example that upcycles SmolLM2: its files belong together, and its recipe runs whole on a model without sense."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from poise.cli import run

pytest.importorskip("lm_eval", reason="the checkers need the extra ifeval")
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "verifyif_smollm"


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def topics(name):
    return {re.fullmatch(r"Write .*? about (.*)\.", row["prompt"])[1] for row in lines(EXAMPLE / name)}


def test_held_out_prompts_are_about_other_topics():
    train, held_out = topics("seeds.jsonl"), topics("held_out_seeds.jsonl")
    assert (len(train), len(held_out)) == (32, 8)
    assert not train & held_out


def test_what_is_imitated_are_the_answers_to_training_prompts(in_root):
    from examples.verifyif_smollm.task import instructed

    task = instructed()
    answers = {row["prompt"]: row["answer"] for row in lines(EXAMPLE / "answers.jsonl")}
    imitated = {}
    for i in range(256):  # own_answers.py asks for the last rows
        row = task.train_rows[len(task.train_rows) - 1 - i]
        conversation = task.demonstrate(row)
        if conversation is not None:
            question, answer = conversation.messages
            assert (answer.channel, question.content) == ("final", row["prompt"])
            imitated[question.content] = answer.content
    assert imitated == answers
    assert len(answers) > 100


def test_the_recipe_runs_from_upcycling_on(in_root, tmp_path, capsys):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
    LlamaForCausalLM(LlamaConfig(**shape, **tokens)).save_pretrained(tmp_path / "llama")
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(chars)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "llama")
    assert run(["upcycle", str(tmp_path / "llama"), str(tmp_path / "out"), "--experts", "2", "--active", "1"]) == 0
    # Bytes are more than SmolLM's tokens.
    sizes = "--max-context-tokens=1024 --max-action-tokens=8 --warm-start.steps=2 --run.steps=2 --eval-problems=3"
    folders = [f"--model.path={tmp_path}/out", f"--run.folder={tmp_path}/runs"]
    assert run(["train", "verifyif_smollm", *folders, *sizes.split(), "--eval-every=0"]) == 0
    assert "custom: 3 held-out problems" in capsys.readouterr().out
    steps = [line for line in lines(tmp_path / "runs/verifyif_smollm-001/metrics.jsonl") if line["step"] > 0]
    assert [step["ratio_min"] for step in steps] == [1.0, 1.0]
