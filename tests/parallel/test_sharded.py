"""Checkpoints of one mesh on another: the same bits, on fewer ranks, on other axes, on one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import batches_of, config_of, on_ranks, shape, split_model, whole_model

from poise.cli import run
from poise.config import ParallelConfig
from poise.harmony import byte_tokenizer
from poise.model import GptOss, load_model
from poise.parallel import ALONE, full_tensor, make_mesh
from poise.train.checkpoint import load_checkpoint, load_weights, save_checkpoint
from poise.train.sharded import start_saving
from poise.train.trainer import Trainer

STATE = {"phase": "train", "step": 2}


def mesh_of(**degrees):
    return make_mesh(ParallelConfig(**{f"{k}_degree": v for k, v in degrees.items()}), torch.device("cpu"))


def contents(trainer, mesh):
    """Parameters and moments, whole."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        found[name] = full_tensor(name, parameter.detach(), mesh, torch.float32).clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            state = trainer.optimizer.state[parameter]
            found[f"{moment} {name}"] = full_tensor(name, state[moment], mesh, torch.float32).clone()
            assert float(state["step"]) == trainer.steps_done == 2
    return found


def train_and_save(folder, degrees):
    mesh = mesh_of(**degrees)
    trainer = Trainer(split_model(mesh), config_of(), mesh=mesh)
    for _ in range(2):
        trainer.step(batches_of((23, 9, 25)))
    saving = save_checkpoint(
        folder,
        model=trainer.model,
        optimizer=trainer.optimizer,
        state=STATE,
        save_tokenizer=byte_tokenizer().save,
        mesh=mesh,
    )
    saved = contents(trainer, mesh)
    trainer.step(batches_of((23, 9, 25)))  # goes on while the parts are written, and must not be in them
    saving.wait()
    return saved


def load_on_mesh(folder, degrees):
    mesh = mesh_of(**degrees)
    trainer = Trainer(split_model(mesh), config_of(), mesh=mesh)
    assert load_checkpoint(folder, model=trainer.model, optimizer=trainer.optimizer, mesh=mesh) == STATE
    return contents(trainer, mesh)


def load_alone(folder):
    trainer = Trainer(GptOss(shape()), config_of())
    assert load_checkpoint(folder, model=trainer.model, optimizer=trainer.optimizer) == STATE
    return contents(trainer, ALONE)


def assert_same_bits(found, saved):
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "step_000002"
    return folder, on_ranks(4, train_and_save, folder, {"sequence": 2, "expert": 2})[0]


def test_four_ranks_one_process(saved):
    folder, contents_of_four = saved
    assert_same_bits(load_alone(folder), contents_of_four)
    assert not list(folder.parent.glob(".*")), "what was put aside is gone"


@pytest.mark.parametrize("degrees", [{"data": 2}, {"expert": 2}], ids=["data", "expert"])
def test_four_ranks_then_two(saved, degrees):
    folder, contents_of_four = saved
    for found in on_ranks(2, load_on_mesh, folder, degrees):
        assert_same_bits(found, contents_of_four)


def test_one_process_then_three_ranks(tmp_path):
    trainer = Trainer(whole_model(), config_of())
    for _ in range(2):
        trainer.step(batches_of((23, 9, 25)))
    folder = tmp_path / "step_000002"
    arguments = {"state": STATE, "save_tokenizer": lambda path: None}
    save_checkpoint(folder, model=trainer.model, optimizer=trainer.optimizer, **arguments)
    for found in on_ranks(3, load_on_mesh, folder, {}):
        assert_same_bits(found, contents(trainer, ALONE))
    assert load_model(folder).config.num_experts == 4


def test_a_checkpoint_of_a_mesh_becomes_a_hugging_face_folder(saved, tmp_path, capsys):
    folder, contents_of_four = saved
    assert run(["export", str(folder), str(tmp_path / "out"), "--format=fp32"]) == 0
    for name, value in load_model(tmp_path / "out").named_parameters():
        assert torch.equal(value, torch.as_tensor(contents_of_four[name])), name
    assert run(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "a checkpoint never overwrites another" in capsys.readouterr().err
    assert run(["export", str(folder), str(tmp_path / "other"), "--format=int4"]) == 2
    assert "--format must be bf16, fp32, mxfp4, got int4" in capsys.readouterr().err


def test_another_model_is_refused(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="holds another model"):
        load_weights(folder, model=GptOss(shape(num_layers=3)))


def publishing(folder):
    """What is on the disk when the folder is about to get its name."""
    mesh = mesh_of(expert=2)
    trainer = Trainer(split_model(mesh), config_of(), mesh=mesh)
    seen = []

    def publish(written, name):
        seen.extend([sorted(path.name for path in (written / "shards").iterdir()), name.exists()])

    start = partial(start_saving, folder, model=trainer.model, optimizer=trainer.optimizer, mesh=mesh)
    start(rest={}, save_tokenizer=lambda path: None, publish=publish).wait()
    return seen


def test_a_checkpoint_appears_when_the_parts_of_all_ranks_are_there(tmp_path):
    first, second = on_ranks(2, publishing, Path(tmp_path) / "step_000000")
    assert first == [[".metadata", "__0_0.distcp", "__1_0.distcp"], False]
    assert second == []
