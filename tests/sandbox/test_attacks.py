"""Hostile cells, as root and as an ordinary user, in every mode: none reads, writes, connects, signals or survives."""

import sys

import pytest
from attacks import ATTACKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_without_a_sandbox_the_attack_does_harm(world, attack):
    if attack.needs_root and world.user != 0:
        pytest.skip("only root can do it")
    world.reset()
    text = world.run_without_sandbox(world.code(attack))
    is_harmed = attack.harm(world, text)
    for _ in range(0 if attack.may_lack else 1000):  # a signal may take a while to end somebody
        is_harmed = is_harmed or attack.harm(world, text)
    if attack.may_lack and not is_harmed:
        pytest.skip(f"this kernel lacks it: {text.strip().splitlines()[-1:]}")
    assert is_harmed, text


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_in_the_sandbox_it_does_none(world, trainer, attack):
    world.reset()
    (result,) = trainer.run(world.code(attack))
    assert not attack.harm(world, result["output"]), result["output"]
