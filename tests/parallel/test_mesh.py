"""Degrees that cannot be, and who gets what."""

import pytest
import torch
from ranks import on_ranks, shape

from poise.config import ConfigError, ParallelConfig
from poise.parallel import ALONE, Mesh, degrees_of, empty_model, make_mesh, padded_borders, rows_of_rank


def test_degrees_multiply_to_the_processes():
    assert degrees_of(ParallelConfig(), 6) == (6, 1, 1)
    assert degrees_of(ParallelConfig(sequence_degree=2, expert_degree=4), 16) == (2, 2, 4)
    assert degrees_of(ParallelConfig(data_degree=2, sequence_degree=2), 4) == (2, 2, 1)


@pytest.mark.parametrize(
    ("config", "num_ranks", "sentence"),
    [
        (
            ParallelConfig(sequence_degree=4),
            6,
            "parallel: 6 processes cannot be shared by sequence_degree 4 x expert_degree 1 = 4",
        ),
        (
            ParallelConfig(data_degree=2, sequence_degree=2, expert_degree=2),
            4,
            "parallel: data_degree 2 x sequence_degree 2 x expert_degree 2 = 8 does not make 4 processes",
        ),
    ],
)
def test_impossible_degrees_are_refused_with_the_numbers(config, num_ranks, sentence):
    with pytest.raises(ConfigError) as refusal:
        degrees_of(config, num_ranks)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("name", ["data_degree", "sequence_degree", "expert_degree"])
def test_degrees_below_their_least_are_refused(name):
    with pytest.raises(ConfigError, match=f"parallel.{name} must be at least"):
        ParallelConfig(**{name: -1 if name == "data_degree" else 0})


def test_ranks_of_a_mesh_by_hand():
    # Twelve ranks, data 2 x sequence 2 x expert 3: rank 8 = (1 * 2 + 0) * 3 + 2.
    mesh = Mesh(data=2, sequence=2, expert=3, rank=8)
    assert (mesh.num_ranks, mesh.num_places) == (12, 6)
    assert (mesh.sequence_rank, mesh.expert_rank, mesh.place) == (0, 2, 5)
    # Rank 5 = (0 * 2 + 1) * 3 + 2 shares the micro-batches of place (0, 2) with rank 2.
    other = Mesh(data=2, sequence=2, expert=3, rank=5)
    assert (other.sequence_rank, other.expert_rank, other.place) == (1, 2, 2)
    assert Mesh(data=2, sequence=2, expert=3, rank=2).place == 2


def test_micro_batches_are_dealt_and_filled_up():
    items = ["a", "b", "c", "d", "e"]
    dealt = [Mesh(data=3, rank=rank).share(items, "-") for rank in range(3)]
    assert dealt == [["a", "d"], ["b", "e"], ["c", "-"]]
    assert ALONE.share(items, "-") == items
    assert ALONE.map(str.upper, items, "-") == ["A", "B", "C", "D", "E"]


def test_rows_are_cut_and_filled_up():
    x = torch.arange(1, 8)
    assert [rows_of_rank(x, Mesh(sequence=3, rank=rank)).tolist() for rank in range(3)] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 0, 0],
    ]
    assert rows_of_rank(x[:1], Mesh(sequence=3, rank=2)).tolist() == [0]
    borders = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert padded_borders(borders, 7, Mesh(sequence=3)).tolist() == [0, 3, 7, 9]
    assert padded_borders(borders, 7, Mesh(sequence=7)).tolist() == [0, 3, 7]


def refusals():
    sentences = []
    for config, changes in (
        (ParallelConfig(sequence_degree=3), {}),
        (ParallelConfig(expert_degree=3), {}),
        (ParallelConfig(data_degree=2), {}),
        (ParallelConfig(offload=True), {}),
    ):
        try:
            empty_model(shape(**changes), make_mesh(config, torch.device("cpu")))
        except ConfigError as error:
            sentences.append(str(error))
    gathered = make_mesh(ParallelConfig(), torch.device("cpu"))
    return sentences, gathered.gather(gathered.rank * 10), gathered.map(lambda x: x + 1, [1, 2, 3, 4], 0)


def test_what_the_model_cannot_be_split_into_is_refused():
    for sentences, numbers, mapped in on_ranks(3, refusals):
        assert sentences == [
            "the sequence degree (3) must divide the 4 query heads",
            "the expert degree (3) must divide the 4 experts",
            "parallel: data_degree 2 x sequence_degree 1 x expert_degree 1 = 2 does not make 3 processes",
            "parallel.offload does nothing on the CPU, where parameters are in host memory already",
        ]
        assert numbers == [0, 10, 20]
        assert mapped == [2, 3, 4, 5]
