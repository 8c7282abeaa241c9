"""Every way to split the work gives what one process gives: numbers, log-probs, gradients, five steps later weights."""

import numpy as np
import pytest
import torch
from ranks import CASES, LENGTHS, batches_of, on_ranks, train_on_mesh, trained, whole_model

# (data, sequence, expert) and what is special about the policy: on four sequence ranks two key/value heads are too few,
# and two experts fewer than the ranks that share them, so each rank holds slices of both.
MESHES = {
    "data 2": ((2, 1, 1), {}),
    "sequence 2": ((1, 2, 1), {}),
    "sequence 4": ((1, 4, 1), {"num_experts": 2}),
    "expert 2": ((1, 1, 2), {}),
    "expert 4": ((1, 1, 4), {}),
    "data 2 x sequence 2": ((2, 2, 1), {}),
    "data 2 x expert 2": ((2, 1, 2), {}),
}
_done = {}


def alone(case, changes):
    key = (case, tuple(changes.items()))
    if key not in _done:
        settings, kernel = CASES[case]
        _done[key] = trained(whole_model(**changes), None, settings, kernel, batches_of(LENGTHS))
    return _done[key]


def relative(a, b):
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def assert_equal(ours, whole, case):
    assert ours["metrics"] == pytest.approx(whole["metrics"], rel=1e-5, abs=1e-7), case
    for a, b in zip(ours["log_probs"], whole["log_probs"], strict=True):
        assert relative(a, b) < 1e-5, case
    for part in ("gradients", "parameters"):
        assert ours[part].keys() == whole[part].keys()
        for name, value in whole[part].items():
            assert relative(ours[part][name], value) < 1e-5, f"{case}: {part} of {name}"


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_computes_what_one_process_does(mesh):
    # One start of the processes for all cases: it is what takes the time.
    degrees, changes = MESHES[mesh]
    results = on_ranks(int(np.prod(degrees)), train_on_mesh, degrees, CASES, changes, LENGTHS)[0]
    for case in CASES:
        assert_equal(results[case], alone(case, changes), case)
