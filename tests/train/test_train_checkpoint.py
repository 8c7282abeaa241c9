"""A run that is interrupted and resumed is, bit for bit, the run that was not."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from poise.config import Config, OptimizerConfig
from poise.train.checkpoint import (
    STATE_FILE,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from poise.train.packing import pack
from poise.train.trainer import Trainer

# The warm-up ends at step 5, after the resume: the schedule must go on where it stood.
CONFIG = Config(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.1, max_grad_norm=0.5))


def write_tokenizer(folder):
    (folder / "vocabulary.txt").write_text("a b c\n")


def train(trainer, trajectories, num_steps):
    """Steps on data that is drawn from every global random state."""
    metrics = []
    for _ in range(num_steps):
        chosen = [trajectories[random.randrange(6)], trajectories[np.random.randint(6)]]
        advantages = torch.randn(2) + np.random.standard_normal()
        result = trainer.step(pack(chosen, advantages, tokens_per_microbatch=64))
        metrics.append({name: value for name, value in result.items() if name != "tokens_per_s"})
    return metrics


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    # Normals come in pairs: python keeps the other from here on, numpy after each odd step, so also at the save.
    random.gauss(0, 1)


def save(folder, trainer, **state):
    save_checkpoint(
        folder, model=trainer.model, optimizer=trainer.optimizer, state=state, save_tokenizer=write_tokenizer
    )


def test_six_steps_equal_three_and_three(tmp_path, make_model, make_trajectories):
    trajectories = make_trajectories()
    seed_all(7)
    straight = Trainer(make_model(), CONFIG)
    expected = train(straight, trajectories, 6)
    last_draws = (random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item())

    seed_all(7)
    first = Trainer(make_model(), CONFIG)
    actual = train(first, trajectories, 3)
    save(tmp_path / "c", first, step=3)

    seed_all(99)
    second = Trainer(make_model(seed=50), CONFIG)
    assert load_checkpoint(tmp_path / "c", model=second.model, optimizer=second.optimizer) == {"step": 3}
    assert second.steps_done == 3
    actual += train(second, trajectories, 3)

    assert actual == expected
    assert (random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()) == last_draws
    for name, parameter in straight.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], parameter), name
    # Without the optimizer's moments and place the same three steps lead elsewhere: the comparison can fail.
    forgetful = Trainer(make_model(), CONFIG)
    load_checkpoint(tmp_path / "c", model=forgetful.model, optimizer=Trainer(make_model(), CONFIG).optimizer)
    train(forgetful, trajectories, 3)
    assert not torch.equal(forgetful.model.lm_head.weight, straight.model.lm_head.weight)


def test_the_folder_is_read_by_transformers(tmp_path, make_model):
    transformers = pytest.importorskip("transformers")
    trainer = Trainer(make_model(), CONFIG)
    save(tmp_path / "c", trainer)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype="auto")
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(hf_model.state_dict()[name], parameter), name
    assert (tmp_path / "c" / "vocabulary.txt").read_text() == "a b c\n"


def test_state_comes_back_as_it_was(tmp_path, make_model):
    generator = np.random.default_rng(3)
    state = {
        "place": [1, 2.5, None, True, ("epoch", 4)],
        "order": torch.tensor([3, 1, 2]),
        "generator": generator.bit_generator.state,  # holds integers of 128 bits
    }
    save(tmp_path / "c", Trainer(make_model(), CONFIG), **state)
    saved = read_state(tmp_path / "c")
    assert torch.equal(saved.pop("order"), state.pop("order"))
    assert saved == state
    expected = generator.random()
    generator.bit_generator.state = saved["generator"]
    assert generator.random() == expected


def test_a_state_that_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path, make_model):
    trainer = Trainer(make_model(), CONFIG)
    for value, complaint in [
        ({"a": [1, np.float64(2)]}, r"state\['x'\]\['a'\]\[1\] is a float64"),
        (np.arange(2), r"state\['x'\] is a ndarray"),
        ({1, 2}, r"state\['x'\] is a set"),
    ]:
        with pytest.raises(TypeError, match=complaint):
            save(tmp_path / "c", trainer, x=value)
    assert list(tmp_path.iterdir()) == []


def test_half_a_checkpoint_is_never_taken_for_a_whole_one(tmp_path, make_model):
    trainer = Trainer(make_model(), CONFIG)
    assert latest_checkpoint(tmp_path) is None
    save(checkpoint_folder(tmp_path, 3), trainer, step=3)

    class Full(OSError):
        pass

    def break_off(folder):
        write_tokenizer(folder)
        raise Full

    class Broken:
        """Fails after the model was written, as a full disk would."""

        def state_dict(self):
            raise Full

    for broken in ({"save_tokenizer": break_off}, {"optimizer": Broken()}):
        arguments = {"optimizer": trainer.optimizer, "save_tokenizer": write_tokenizer} | broken
        with pytest.raises(Full):
            save_checkpoint(checkpoint_folder(tmp_path, 4), model=trainer.model, state={"step": 4}, **arguments)
        assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 3)
        assert not checkpoint_folder(tmp_path, 4).exists()

    # What the failure left does not stand in the way, and goes.
    save(checkpoint_folder(tmp_path, 4), trainer, step=4)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 4)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000003", "step_000004"]


def test_the_latest_is_by_number_and_other_folders_are_not_seen(tmp_path, make_model):
    trainer = Trainer(make_model(), CONFIG)
    for step in (9, 1_000_000, 999_999):
        save(checkpoint_folder(tmp_path, step), trainer, step=step)
    for name in ("step_2000000", "step_3000000.old", "best"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step_3000000.old" / STATE_FILE).touch()
    latest = latest_checkpoint(tmp_path)
    assert latest.name == "step_1000000"
    assert read_state(latest) == {"step": 1_000_000}


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, make_model, make_trajectories):
    trainer = Trainer(make_model(), CONFIG)
    save(tmp_path / "c", trainer, attempt=1)
    train(trainer, make_trajectories(), 1)
    save(tmp_path / "c", trainer, attempt=2)
    other = Trainer(make_model(seed=4), CONFIG)
    assert load_checkpoint(tmp_path / "c", model=other.model, optimizer=other.optimizer) == {"attempt": 2}
    assert torch.equal(other.model.lm_head.weight, trainer.model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_cannot_be_resumed_is_refused(tmp_path, make_model):
    trainer = Trainer(make_model(), CONFIG)
    save(tmp_path / "c", trainer)
    other = type(trainer.model)(replace(trainer.model.config, sliding_window=7))
    with pytest.raises(ValueError, match="holds another model"):
        load_checkpoint(tmp_path / "c", model=other, optimizer=Trainer(other, CONFIG).optimizer)
    (tmp_path / "c" / STATE_FILE).unlink()
    for read in (read_state, lambda folder: load_checkpoint(folder, model=trainer.model, optimizer=trainer.optimizer)):
        with pytest.raises(FileNotFoundError, match="is no checkpoint to resume from"):
            read(tmp_path / "c")
