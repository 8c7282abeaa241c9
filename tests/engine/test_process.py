"""Servers that poise starts: when, and when not."""

import signal

import pytest

from poise.engine import EngineError
from poise.engine.process import ServerProcesses

URL = "http://127.0.0.1:1"


@pytest.fixture
def processes(tmp_path):
    processes = ServerProcesses("sleep 600", checkpoint=lambda: tmp_path, log_folder=tmp_path)
    yield processes
    processes.stop()


def ended(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_server_that_was_about_to_end_when_it_was_missed_is_replaced(processes):
    processes.start(URL, True)
    first = processes._running[URL]
    # An outage: it refuses connections already, and ends later, as one does that is killed or shuts down in order.
    processes.start(URL, True)
    assert processes._running[URL] is first
    ended(first)
    processes.start(URL, False)
    second = processes._running[URL]
    assert second is not first
    assert second.poll() is None
    # What was started in this outage and ended without an answer is not tried for ever.
    ended(second)
    with pytest.raises(EngineError, match="ended with exit code -9 before"):
        processes.start(URL, False)
    # The next outage is another matter.
    processes.start(URL, True)
    assert processes._running[URL].poll() is None
