"""Commands of poise under torchrun, for tests: none of their processes outlives the test."""

import contextlib
import subprocess
import sys
import threading

PATIENCE_S = 1800.0  # against hanging alone


@contextlib.contextmanager
def launched(num_ranks, *arguments, **options):
    """``poise`` with ``arguments`` on so many ranks, a Popen; ended with its ranks where it still runs afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    with subprocess.Popen([*command, "-m", "poise", *arguments], **settings) as launcher:
        # Asked to end, it ends its ranks first, if need be by force; killed, it would leave them behind.
        watchdog = threading.Timer(PATIENCE_S, launcher.terminate)
        watchdog.start()
        try:
            yield launcher
        finally:
            watchdog.cancel()
            if launcher.poll() is None:
                launcher.terminate()


def finished(num_ranks, *arguments, **options):
    """(exit code, standard output) of such a command."""
    with launched(num_ranks, *arguments, **options) as launcher:
        printed, _ = launcher.communicate()
        return launcher.returncode, printed
