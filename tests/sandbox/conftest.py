"""A trainer of each user in each mode."""

import os

import pytest
from world import MODES, USER, Trainer, World

USERS = [pytest.param(0, id="root", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
         pytest.param(USER if os.geteuid() == 0 else os.geteuid(), id="user")]  # fmt: skip


@pytest.fixture(scope="module", params=USERS)
def world(request):
    world = World(request.param)
    yield world
    world.close()


@pytest.fixture(scope="module", params=MODES)
def trainer(request, world):
    trainer = Trainer(world, request.param)
    yield trainer
    trainer.close()
