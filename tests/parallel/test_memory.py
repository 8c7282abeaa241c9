"""What ranks that share a sequence need falls with their number: activations, buffers of experts and log-probs."""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from ranks import on_ranks

from poise.config import ParallelConfig
from poise.parallel import ALONE, make_mesh

# One sequence; a layer's activations are large beside its parameters, and so are all logits beside a tile of them.
STEP = {"tokens": 4096, "layers": 4, "hidden": 64, "vocabulary": 4096, "recompute": "none"}


def peak_of_step(mesh):
    """Most bytes at once over forward, log-probs and backward, as benchmarks/parallel.py counts them."""
    folder = Path(__file__).parent.parent.parent / "benchmarks"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("benchmark_of_meshes", folder / "parallel.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    sys.path.remove(str(folder))
    return benchmark.peak_of_step(mesh, argparse.Namespace(**STEP))


def peak_on_mesh():
    return peak_of_step(make_mesh(ParallelConfig(sequence_degree=4), torch.device("cpu")))


def peak_alone():
    return peak_of_step(ALONE)


def test_a_quarter_of_the_sequence_needs_little_more_than_a_quarter_of_the_memory():
    # What does not fall: gathered parameters, the mask of windows, and an attention result that is kept on both sides
    # of its exchange.
    assert max(on_ranks(4, peak_on_mesh)) < 0.32 * on_ranks(1, peak_alone)[0]
