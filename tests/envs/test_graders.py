"""Grader processes: what they answer, and that they die when they must and are replaced."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poise.envs.graders import GraderError, GraderPool, GraderTimeout


@pytest.fixture
def pool():
    pool = GraderPool("grader_functions:all_of", cpu_s=0.5, num_workers=2)
    yield pool
    pool.close()


def ask(pool, *arguments):
    async def main():
        return await pool(*arguments)

    return asyncio.run(main())


def test_results_and_errors(pool):
    assert ask(pool, "add", "a\ud800", "\n<|end|>") == "a\ud800\n<|end|>"
    with pytest.raises(GraderError, match="KeyError: 'no such rule'"):
        ask(pool, "fail")
    assert ask(pool, "add", [1], [2]) == [1, 2]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("burn", "0.5 s of CPU time used up"), ("leave", "ended with status 0|status 3"), ("eat", "MemoryError")],
)
def test_what_takes_too_much_is_stopped_and_the_next_call_works(pool, name, reason):
    with pytest.raises(GraderTimeout, match=reason):
        ask(pool, name)
    assert ask(pool, "add", 1, 2) == 3


def test_a_long_call_does_not_hold_up_the_others(pool, tmp_path):
    async def main():
        held_up = asyncio.ensure_future(pool("wait_for", str(tmp_path / "all are answered")))
        answers = [await pool("add", i, 1) for i in range(20)]
        assert not held_up.done()
        (tmp_path / "all are answered").touch()
        return answers, await held_up

    assert asyncio.run(main()) == (list(range(1, 21)), "it was there")


def test_a_server_or_child_that_was_killed_from_outside_is_replaced(pool):
    child, server = ask(pool, "process")
    os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":  # a zombie until its server looks
        time.sleep(0.01)
    assert ask(pool, "add", 1, 2) == 3
    os.kill(server, signal.SIGKILL)
    assert ask(pool, "add", 1, 2) == 3
    assert ask(pool, "process")[1] != server


def test_an_import_that_fails_is_told():
    broken = GraderPool("no_such_module:f")
    with pytest.raises(GraderError, match="no_such_module:f cannot be loaded: ModuleNotFoundError"):
        ask(broken)
    broken.close()


def test_a_server_is_warm_before_it_answers():
    # What the function loads on first use is loaded once, outside of the limits of any call.
    cold = GraderPool("grader_functions:loads_first", cpu_s=0.3, num_workers=1)
    with pytest.raises(GraderTimeout):
        ask(cold)
    cold.close()
    warm = GraderPool("grader_functions:loads_first", warm_up="[]", cpu_s=0.3, num_workers=1)
    assert ask(warm) == 1
    warm.close()
    broken = GraderPool("grader_functions:add", warm_up="[1]", num_workers=1)
    with pytest.raises(GraderError, match="grader_functions:add cannot be loaded: TypeError"):
        ask(broken)
    broken.close()


ABANDON = """
import asyncio, os, signal, sys
from poise.envs.graders import GraderPool
async def main():
    pool = GraderPool("grader_functions:all_of", cpu_s=1)
    child, server = await pool("process")
    print(child, server, flush=True)
    burning = asyncio.ensure_future(pool("burn"))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_nothing_outlives_a_trainer_that_was_killed():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=600, env=env)
    child, server = map(int, done.stdout.split())
    deadline = time.monotonic() + 600
    while any(os.path.exists(f"/proc/{pid}") for pid in (child, server)):
        assert time.monotonic() < deadline, "a grader is still there"
        time.sleep(0.05)
