"""Mistakes that a mesh invites, made on purpose: the comparison with one process must see each of them."""

from dataclasses import replace

import pytest
import torch
from ranks import batches_of, on_ranks, split_model, trained, whole_model

from poise.config import ParallelConfig
from poise.model import packed_attend
from poise.parallel import make_mesh

LENGTHS = (23, 9, 25)  # 57 rows on four ranks: 15 a rank, three of them filled up


def with_first_sinks(model):
    """Every rank takes the sinks of the first heads instead of those of its own."""

    def attend_of(cu_seqlens):
        attend = packed_attend(cu_seqlens)

        def attend_wrongly(layer, q, k, v, sinks, window):
            return attend(layer, q, k, v, model.model.layers[layer].self_attn.sinks[: len(sinks)], window)

        return attend_wrongly

    return attend_of


def without_remainder(batch):
    """The rows that four ranks can share evenly; the last one is dropped."""
    kept = len(batch.input_ids) // 4 * 4
    rows = {name: value[:kept] for name, value in vars(batch).items() if value is not None and name != "cu_seqlens"}
    return replace(batch, **rows, cu_seqlens=batch.cu_seqlens.clamp(max=kept))


def with_positions_of_ranks(batch):
    """Each rank counts its own rows from 0."""
    return replace(batch, position_ids=torch.arange(len(batch.input_ids)) % 15)


def on_mesh(names):
    mesh = make_mesh(ParallelConfig(sequence_degree=4), torch.device("cpu"))
    (batch,) = batches_of(LENGTHS)
    ways = {
        "right": ("cpu", batch),
        "unsliced sinks": (with_first_sinks, batch),
        "dropped remainder": ("cpu", without_remainder(batch)),
        "wrong positions": ("cpu", with_positions_of_ranks(batch)),
    }
    return {name: trained(split_model(mesh), mesh, {}, ways[name][0], [ways[name][1]], num_steps=1) for name in names}


def test_the_comparison_sees_each_mistake():
    whole = trained(whole_model(), None, {}, "cpu", batches_of(LENGTHS), num_steps=1)
    results = on_ranks(4, on_mesh, ["right", "unsliced sinks", "dropped remainder", "wrong positions"])[0]

    def distance(name):
        pairs = [(torch.as_tensor(results[name]["gradients"][key]), value) for key, value in whole["gradients"].items()]
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    assert results["right"]["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)
    assert distance("right") < 1e-5
    for name in ("unsliced sinks", "dropped remainder", "wrong positions"):
        assert results[name]["metrics"]["loss"] != pytest.approx(whole["metrics"]["loss"], rel=1e-3), name
        assert distance(name) > 1e-2, name
