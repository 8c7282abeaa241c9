"""Rollouts that run ahead of the trainer: what may run when, how old tokens are, and that 0 is the plain loop."""

import asyncio
import gc
import json
import os
import signal
import threading
import weakref
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from poise.ahead import ahead
from poise.assembly import assemble
from poise.config import AlgorithmConfig, Config, ConfigError, ModelConfig, RolloutConfig, RunConfig, TaskConfig
from poise.console import Console
from poise.engine import prepared as engine_prepared
from poise.interrupt import Interrupt, Interrupted
from poise.jobs import train_job
from poise.loop import Rollout, roll_out, staleness, train
from poise.ops import prepared
from poise.parallel import ALONE
from poise.sampling import rollouts
from poise.train.checkpoint import latest_checkpoint
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_a_rollout_begins_when_the_step_so_many_before_it_is_trained(lead):
    trained, begun_after = [], {}
    lock = threading.Lock()

    def roll_out(step):
        with lock:
            begun_after[step] = len(trained)
        return step

    seen = []
    for step in ahead(roll_out, range(1, 9), lead=lead, cancel=pytest.fail):
        seen.append(step)
        trained.append(step)
    assert seen == list(range(1, 9))
    # It begins no earlier than the lead allows; and cannot begin later than it is asked for.
    assert all(max(0, step - 1 - lead) <= begun_after[step] <= step - 1 for step in seen)


def test_rollouts_run_while_a_step_is_trained():
    both = threading.Barrier(3)

    def roll_out(step):
        both.wait(timeout=30)  # only all three together get past: two rollouts, and the trainer
        return step

    iterator = ahead(lambda step: roll_out(step) if step > 1 else step, range(1, 4), lead=2, cancel=pytest.fail)
    assert next(iterator) == 1
    both.wait(timeout=30)
    assert list(iterator) == [2, 3]


def test_what_fails_or_ends_early_cancels_the_rest():
    stop, cancelled = threading.Event(), []

    def cancel():
        cancelled.append(True)
        stop.set()

    def roll_out(step):
        if step == 2:
            raise OSError("no server")
        if step > 2:
            assert stop.wait(timeout=30)
        return step

    iterator = ahead(roll_out, range(1, 6), lead=2, cancel=cancel)
    assert next(iterator) == 1
    with pytest.raises(OSError, match="no server"):
        next(iterator)
    assert cancelled == [True]
    stop.clear()
    iterator = ahead(lambda step: step if step == 1 else stop.wait(timeout=30), range(1, 6), lead=1, cancel=cancel)
    next(iterator)
    iterator.close()
    assert cancelled == [True, True]


def test_a_rollout_whose_thread_only_begins_when_all_are_cancelled_is_cancelled_too():
    """Or the run, which has failed, would wait for the whole of it."""
    with Interrupt(in_background=True) as interrupt:
        assert interrupt.run(asyncio.sleep(0, "before")) == "before"
        interrupt.cancel()
        with pytest.raises(CancelledError):
            interrupt.run(asyncio.sleep(0, "after"))
        assert interrupt.finish(asyncio.sleep(0, "cleaned up")) == "cleaned up"


def test_staleness_by_hand():
    def episode(versions, policy_version=0):
        turn = Turn(
            observation_ids=(1,), action_ids=(2, 3), rollout_log_probs=(-1.0, -1.0), policy_version=policy_version,
            policy_versions=versions,
        )  # fmt: skip
        return [Trajectory(group_id=0, episode_id="e", turns=(turn,), reward=0.0, stop=Stop.DONE)]

    # Step 6 begins with version 5: tokens of 3, 4 and twice 5 are 2, 1, 0, 0 updates old.
    rollout = Rollout(groups=[[episode((3, 4)), episode((), policy_version=5)]], seconds=1.0)
    assert staleness(rollout, 5) == {"staleness_mean": 0.75, "staleness_max": 2.0}


def config_of(folder, *, lead, steps=3, **run):
    return Config(
        model=ModelConfig(
            hidden_size=32, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4,
            sliding_window=16, device="cpu",
        ),
        task=TaskConfig(num_train_rows=6, num_test_rows=2, describes_tools=False),
        rollout=RolloutConfig(
            groups_per_step=3, group_size=2, max_turns=2, max_action_tokens=40, max_context_tokens=300, num_slots=8,
            lockstep=True, max_staleness=lead,
        ),
        algorithm=AlgorithmConfig(entropy_weight=0.1),
        run=RunConfig(steps=steps, folder=str(folder), name="t", eval_problems=2, log_trajectories_every=1,
                      tokens_per_microbatch=600, **run),
    )  # fmt: skip


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_lead_of_0_is_bit_equal_to_the_plain_loop(tmp_path):
    config = config_of(tmp_path, lead=0)
    weights = load_file(latest_checkpoint(train_job(config, Console())) / "model.safetensors")
    parts = assemble(config, Console())
    trainer = Trainer(parts.model, config)

    def rollouts():
        for step in range(1, 4):
            yield roll_out(
                parts.engine, parts.renderer, parts.task, config, step=step, interrupt=Interrupt(),
                on_group=lambda group: None,
            )  # fmt: skip

    train(trainer, None, parts.engine, rollouts(), config, first_step=1, on_step=lambda *_: None)
    own = dict(parts.model.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in weights.items() if name in own)
    assert own.keys() & weights.keys()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_what_only_sampling_needs_is_gone_when_the_trainer_has_the_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "is_exact", lambda: True)
    monkeypatch.setattr(prepared, "MIN_WORK", 1)
    monkeypatch.setattr(prepared, "MIN_ELEMENTS", 1)
    config = config_of(tmp_path, lead=0)
    parts, made = assemble(config, Console()), []
    make = engine_prepared.prepared_model

    def noted(*args):
        model = make(*args)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(engine_prepared, "prepared_model", noted)
    source = rollouts(
        parts.engine, parts.renderer, parts.task, config, [1, 2], interrupt=Interrupt(), console=Console(), mesh=ALONE
    )  # fmt: skip
    for number, _ in enumerate(source, start=1):
        gc.collect()
        assert len(made) == number
        assert all(ref() is None for ref in made)


def test_a_run_ahead_logs_its_staleness_and_corrects_for_it(tmp_path):
    folder = train_job(config_of(tmp_path, lead=1, steps=4, eval_every=2), Console())
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["staleness_max"] for line in metrics] == [0, 1, 1, 1]
    assert all(0 < line["staleness_mean"] <= 1 for line in metrics[1:])
    assert json.loads((folder / "config.json").read_text())["algorithm"]["correction"] == "truncate"
    for step in range(1, 5):
        lines = (folder / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
        versions = [json.loads(line)["policy_versions"] for line in lines]
        assert all(len(v) == sum(json.loads(line)["response_mask"]) for v, line in zip(versions, lines, strict=True))
        assert {v for one in versions for v in one} <= {step - 2, step - 1}


def test_an_interrupted_run_ahead_has_saved_what_it_trained(tmp_path):
    class Interrupting(Console):
        def line(self, text):
            if text.startswith("step 2/"):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="the state was saved"):
        train_job(config_of(tmp_path, lead=1, steps=5), Interrupting())
    (folder,) = tmp_path.iterdir()
    assert latest_checkpoint(folder).name == "step_000002"
    resumed = train_job(config_of(tmp_path, lead=1, steps=3), Console(), resume=folder)
    assert [line["step"] for line in metrics_of(resumed)] == [1, 2, 3]


def test_correction_is_on_by_default_when_rollouts_run_ahead():
    stale = RolloutConfig(max_staleness=2)
    assert Config(rollout=stale).algorithm.correction == "truncate"
    assert Config(rollout=stale, algorithm=AlgorithmConfig(correction="mask")).algorithm.correction == "mask"
    assert Config().algorithm.correction == "none"
    assert replace(Config(), rollout=stale).algorithm.correction == "truncate"
    with pytest.raises(ConfigError, match="max_staleness"):
        RolloutConfig(max_staleness=-1)
