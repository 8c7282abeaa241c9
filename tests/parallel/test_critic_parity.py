"""PPO's critic, split over a mesh: values, losses, every gradient and later weights are those of one process."""

from functools import cache
from math import prod

import pytest
import torch
from critics import CASES, train_alone, train_on_mesh
from ranks import on_ranks, shape

from poise.plan import Mesh, make_plan

MESHES = {
    "data 2": {"data": 2},
    "sequence 2": {"sequence": 2},
    "expert 2": {"expert": 2},
    "data 2 x sequence 2": {"data": 2, "sequence": 2},
}
alone = cache(train_alone)


def relative(a, b):
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def assert_equal(ours, whole, case):
    for a, b in zip(ours["values"], whole["values"], strict=True):
        assert relative(a, b) < 1e-5, f"{case}: values"
    for step, (a, b) in enumerate(zip(ours["metrics"], whole["metrics"], strict=True), start=1):
        # Some are means of terms of both signs, as large as 1, that nearly cancel.
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6), f"{case}: step {step}"
    for part in ("gradients", "parameters"):
        assert ours[part].keys() == whole[part].keys()
        for name, value in whole[part].items():
            assert relative(ours[part][name], value) < 1e-5, f"{case}: {part} of {name}"


@pytest.mark.parametrize("mesh", MESHES)
def test_a_critic_on_a_mesh_is_the_critic_of_one_process(mesh):
    results = on_ranks(prod(MESHES[mesh].values()), train_on_mesh, MESHES[mesh])
    for case in CASES:
        assert_equal(results[0][case], alone(case), case)
        assert all(abs(g).any() for name, g in results[0][case]["gradients"].items() if name.startswith("critic"))
        for result in results[1:]:  # all ranks know the same numbers
            assert result[case]["metrics"][-1]["value_loss"] == results[0][case]["metrics"][-1]["value_loss"]
        held = [result[case]["held"] for result in results]
        assert sum(held) == alone(case)["held"], "each number lives on one rank"
    held = [result["own"]["held"] for result in results]
    assert max(held) < 1.2 * sum(held) / len(held)
    # The plan of a rank: float32 weights and two moments, in whole numbers.
    plan = make_plan(shape(), CASES["own"], mesh=Mesh(**MESHES[mesh])).phases["training"]
    assert plan["critic"] == pytest.approx(3 * 4 * sum(held) / len(held), abs=3 * 4)
