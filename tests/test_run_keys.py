"""Every key of a run changes what it leaves behind, or raises; the few that only cost time or memory are named.

The keys of the algorithm, the critic and the optimizer have finer tests of their own, in train/test_every_key.py.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from poise.cli import run
from poise.config import Config
from poise.train.checkpoint import latest_checkpoint

TINY = {
    "hidden-size": 16, "intermediate-size": 12, "num-layers": 2, "num-heads": 2, "num-kv-heads": 1, "head-dim": 8,
    "num-experts": 4, "sliding-window": 16, "groups-per-step": 2, "group-size": 2, "max-turns": 1,
    "max-action-tokens": 12, "max-context-tokens": 256, "num-slots": 4, "tokens-per-microbatch": 300,
    "warm-start.steps": 2, "demonstrations-per-step": 4, "eval-problems": 3, "num-train-rows": 5, "num-test-rows": 4,
    "log-trajectories-every": 1, "run.name": "t", "model.device": "cpu", "entropy-weight": 0.1, "run.steps": 2,
    "warm-start.warmup-steps": 1, "save-every": 50,
}  # fmt: skip
# A value that differs from both the default and the one above.
CHANGED = {
    "model.hidden_size": 24, "model.intermediate_size": 16, "model.num_layers": 3, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.head_dim": 16, "model.num_experts": 6, "model.experts_per_token": 3,
    "model.sliding_window": 8, "model.rope": "yarn", "model.rope_theta": 50.0, "model.dtype": "bfloat16",
    "task.dataset": "basic_arithmetic", "task.num_train_rows": 7, "task.num_test_rows": 2, "task.seed": 5,
    "task.mental_share": 0.9, "task.tool": "function",
    "rollout.groups_per_step": 3, "rollout.group_size": 3, "rollout.max_action_tokens": 9,
    "rollout.temperature": 0.5,
    "warm_start.steps": 1, "warm_start.demonstrations_per_step": 3, "warm_start.learning_rate": 0.01,
    "warm_start.warmup_steps": 2,
    "run.steps": 1, "run.seed": 3, "run.name": "other", "run.save_every": 1, "run.eval_every": 1,
    "run.eval_problems": 2, "run.log_trajectories_every": 0, "run.trackers": "tensorboard",
}  # fmt: skip
RAISES = {
    "sandbox.url": "http://127.0.0.1:9",  # nobody answers
    "task.describes_tools": True,  # the description alone is longer than these contexts
    "task.factory": "x:y", "model.path": "/nowhere", "model.device": "cuda:99", "task.name": "gsm8k",
    "task.data": "x.jsonl",
    # Of servers, which the embedded engine has none of; with servers: engine/test_engine_run.py and test_vllm.py.
    "engine.kind": "vllm", "engine.urls": "http://127.0.0.1:1", "engine.command": "x", "engine.weights": "transfer",
    "engine.timeout_s": 1.0, "engine.retries": 1, "engine.max_wait_s": 1.0,
    "task.test_data": "x.jsonl", "task.format_penalty": 0.1, "task.no_code_penalty": 0.1, "task.length_penalty": 0.1,
    "task.length_characters": 9, "task.checkers": "x", "task.instructions": "x", "task.max_instructions": 2,
    "task.score": "share", "rollout.top_p": 0.9, "rollout.max_context_tokens": 12,
    "parallel.data_degree": 2, "parallel.sequence_degree": 2, "parallel.expert_degree": 2, "parallel.offload": True,
}  # fmt: skip
# Time and memory only, or what a policy this small never reaches; each has its own tests elsewhere.
ELSEWHERE = {
    "rollout.max_staleness": "test_ahead.py: what runs ahead, and by how much",
    "sandbox.mode": "sandbox/test_protection.py: what is in force",
    "sandbox.allow_unsandboxed": "sandbox/test_protection.py: refused without it",
    "sandbox.memory_mib": "sandbox/test_sandbox.py: what an interpreter may take",
    "sandbox.packages": "sandbox/test_sandbox.py: what can be imported",
    "rollout.lockstep": "test_rollout.py: who waits for whom",
    "rollout.num_slots": "engine/test_embedded.py: the same log-probs with any number",
    "rollout.max_prefill_tokens": "engine/test_embedded.py: the same log-probs in smaller pieces",
    "rollout.max_turns": "test_rollout.py: the stop it leads to",
    "task.tool_output_bytes": "envs/test_retool.py: the cut is said",
    "task.tool_time_limit_s": "envs/test_tools.py: a call that takes too long",
    "run.tokens_per_microbatch": "train/test_trainer.py: the gradient is the same for every cut",
    "run.folder": "where, not what",
    "run.recompute": "model/test_recompute.py: the same gradient with less memory",
}


def left_behind(folder: Path, **changes):
    """Names of files, metrics without times, evaluations, and the last weights."""
    keys = dict(TINY)
    for name, value in changes.items():
        section, _, field = name.replace("_", "-").partition(".")
        keys = {k: v for k, v in keys.items() if k not in (field, f"{section}.{field}")} | {f"{section}.{field}": value}
    code = run(["train", "arithmetic_tiny", *(f"--{k}={v}" for k, v in keys.items()), f"--run.folder={folder}"])
    if code:
        return code
    (inside,) = folder.iterdir()
    files = sorted(str(path.relative_to(folder)) for path in inside.rglob("*") if "tfevents" not in path.name)
    lines = [json.loads(line) for line in (inside / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.endswith(("_s", "per_s"))} for line in lines]
    evaluations = (inside / "evaluations.jsonl").read_text()
    checkpoint = latest_checkpoint(inside)
    weights = {k: v.float().sum().item() for k, v in load_file(checkpoint / "model.safetensors").items()}
    return files, any(inside.rglob("*tfevents*")), metrics, evaluations, weights


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    first = left_behind(tmp_path_factory.mktemp("first"))
    assert left_behind(tmp_path_factory.mktemp("second")) == first, "the run itself must repeat"
    return first


@pytest.mark.parametrize("key", CHANGED)
def test_a_key_changes_what_a_run_leaves_behind(tmp_path, before, key):
    after = left_behind(tmp_path, **{key: CHANGED[key]})
    assert not isinstance(after, int), "the run was refused"
    assert after != before


@pytest.mark.parametrize("key", RAISES)
def test_a_key_raises(tmp_path, key):
    assert left_behind(tmp_path, **{key: RAISES[key]}) == 2


def test_no_key_is_forgotten():
    known = {*CHANGED, *RAISES, *ELSEWHERE}
    keys = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        if section.name not in ("algorithm", "critic", "optimizer")
        for field in dataclasses.fields(getattr(Config(), section.name))
    }
    assert keys == known
