"""The module that verl loads, with a stand-in for the one function of verl that it asks."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from tiny import twins

from poise.integrations.transformers import register


@pytest.fixture
def num_ranks(monkeypatch):
    """A list whose last entry is the number of ranks of verl's Ulysses group; poise.integrations.verl is loaded."""
    ranks = [1]
    for name in ("verl", "verl.utils", "verl.utils.ulysses"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.utils.ulysses"].get_ulysses_sequence_parallel_world_size = lambda group=None: ranks[-1]
    monkeypatch.delitem(sys.modules, "poise.integrations.verl", raising=False)
    importlib.import_module("poise.integrations.verl")  # as verl's external_lib does
    yield ranks
    register()
    del sys.modules["poise.integrations.verl"]


def test_loading_the_module_registers_the_attention(num_ranks):
    eager, poise = twins()
    ids = torch.randint(1, 40, (1, 9))
    # verl's remove_padding: one row of all tokens, no mask, positions that restart.
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1]])
    actual = poise(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits
    expected = torch.cat([eager(input_ids=ids[:, :7]).logits, eager(input_ids=ids[:, 7:]).logits], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_split_sequence_is_refused(num_ranks):
    _, poise = twins()
    num_ranks.append(2)
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size must be 1 .* got 2"):
        poise(input_ids=torch.randint(1, 40, (1, 9)))
