"""Checkpoints with a critic: of one mesh on another, of a mesh on one process and the other way, and on from there."""

import pytest
import torch
from critics import CASES, contents, mesh_of, steps, trainer_on
from ranks import on_ranks

from poise.harmony import byte_tokenizer
from poise.parallel import ALONE
from poise.train.checkpoint import load_checkpoint, save_checkpoint

STATE = {"phase": "train", "step": 2}
MESH = {"sequence": 2, "expert": 2}


def save(folder, trainer, mesh):
    return save_checkpoint(
        folder,
        model=trainer.model,
        optimizer=trainer.optimizer,
        state=STATE,
        save_tokenizer=byte_tokenizer().save,
        mesh=mesh,
        critic=trainer.critic,
    )


def begin(folder, case, mesh):
    """What is saved after two steps, and the numbers of the one that follows."""
    trainer = trainer_on(mesh, CASES[case])
    steps(trainer, 1, 2)
    saving = save(folder / case, trainer, mesh)
    saved = contents(trainer, mesh)
    numbers = steps(trainer, 3, 3)  # goes on while the parts are written, and must not be in them
    saving.wait()
    return saved, numbers


def go_on(folder, case, mesh):
    trainer = trainer_on(mesh, CASES[case])
    arguments = {"model": trainer.model, "optimizer": trainer.optimizer, "mesh": mesh, "critic": trainer.critic}
    assert load_checkpoint(folder / case, **arguments) == STATE
    loaded = contents(trainer, mesh)
    return loaded, steps(trainer, 3, 3)


def on_mesh(function, folder, case, degrees):
    return function(folder, case, mesh_of(**degrees))


def assert_goes_on(found, before):
    (loaded, later), (saved, numbers) = found, before
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(torch.as_tensor(loaded[name]), torch.as_tensor(value)), name
    for ours, theirs in zip(later, numbers, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, on_ranks(4, on_mesh, begin, folder, "own", MESH)[0]


def test_four_ranks_then_one_process(saved):
    folder, before = saved
    assert_goes_on(go_on(folder, "own", ALONE), before)
    # A critic that forgot: the comparison can fail.
    trainer = trainer_on(ALONE, CASES["own"])
    load_checkpoint(folder / "own", model=trainer.model, optimizer=trainer.optimizer)
    assert steps(trainer, 3, 3)[-1]["value_loss"] != pytest.approx(before[1][-1]["value_loss"], rel=1e-3)


@pytest.mark.parametrize("degrees", [{"data": 2}, {"sequence": 2}], ids=["data", "sequence"])
def test_four_ranks_then_two(saved, degrees):
    folder, before = saved
    for found in on_ranks(2, on_mesh, go_on, folder, "own", degrees):
        assert_goes_on(found, before)


def test_one_process_then_three_ranks(tmp_path):
    before = begin(tmp_path, "shared", ALONE)
    for found in on_ranks(3, on_mesh, go_on, tmp_path, "shared", {}):
        assert_goes_on(found, before)


def without_critic(folder):
    mesh = mesh_of(data=2)
    trainer = trainer_on(mesh, CASES["own"])
    arguments = {"model": trainer.model, "optimizer": trainer.optimizer, "mesh": mesh}
    save_checkpoint(folder, state=STATE, save_tokenizer=byte_tokenizer().save, **arguments).wait()
    mesh.gather_from_all(None)  # the first rank has given it its name
    with pytest.raises(ValueError, match="holds no critic to go on with"):
        load_checkpoint(folder, critic=trainer.critic, **arguments)


def test_a_checkpoint_of_a_mesh_without_a_critic_is_refused(tmp_path):
    on_ranks(2, without_critic, tmp_path / "step_000002")
