"""What a run leaves in its folder, also when it is cut off while it writes."""

import resource

import pytest

from poise.config import Config, RunConfig
from poise.runfolder import CONFIG_FILE, read_config, write_config


def test_a_write_that_is_cut_off_leaves_the_file_as_it_was(tmp_path):
    path, config = tmp_path / CONFIG_FILE, Config(run=RunConfig(steps=3))
    write_config(path, config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_config(path, Config(run=RunConfig(steps=4)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_config(path) == config
    write_config(path, Config(run=RunConfig(steps=5)))
    assert read_config(path).run.steps == 5
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]
