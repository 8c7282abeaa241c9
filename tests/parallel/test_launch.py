"""How the ranks of a run end: whoever ends first says why, whatever torchrun does meanwhile."""

import os
import subprocess
import sys

REPORTS = """
import os, signal
import torch
from poise.config import ConfigError, ParallelConfig
from poise.parallel import launch

is_first_to_report = launch._is_first_to_report

def asked_to_end(*arguments):
    is_first = is_first_to_report(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)  # the other rank has ended: it was not the first, and had nothing to say
    return is_first

launch._is_first_to_report = asked_to_end
with launch.joined(ParallelConfig(), torch.device("cpu"), torch.float32):
    raise ConfigError("the reason")
"""


def test_the_reason_is_said_also_when_torchrun_asks_to_end_before():
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", REPORTS], stderr=subprocess.PIPE, text=True, timeout=600,
        env=os.environ | rank | {"TORCHELASTIC_RUN_ID": "test"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "poise.config.errors.ConfigError: the reason" in done.stderr
