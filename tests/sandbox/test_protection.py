"""The weaker walls: what holds when the kernel refuses namespaces, and when the user is not root."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
SRC = Path(__file__).parents[2] / "src"
REFUSE = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces; "
SCRIPT = """
import asyncio, sys
from poise.sandbox import Limits, protection, run_python
print(protection())
for code in sys.argv[1:]:
    print(asyncio.run(run_python(code, limits=Limits(wall_s=2))).text.splitlines()[-1])
"""


def sandboxed(wrapper: list[str], *codes: str, tmpdir: Path) -> list[str]:
    """The protection line and the last line of each snippet's text, from a trainer started by ``wrapper``."""
    command = [*wrapper, "-c", SCRIPT, *codes]
    env = {**os.environ, "TMPDIR": str(tmpdir), "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 0, done.stderr
    assert list(tmpdir.glob("poise-*")) == []
    return done.stdout.splitlines()


@pytest.fixture
def without_namespaces():
    wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c", REFUSE + 'exec "$0" "$@"', sys.executable]
    if subprocess.run([*wrapper, "-c", ""], capture_output=True).returncode:
        pytest.skip("unshare cannot take namespaces away here")
    return wrapper


@pytest.fixture
def as_user():
    if os.geteuid() != 0:
        return [sys.executable]
    # The system's Python, since the one of the tests may live in root's home.
    wrapper = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "/usr/bin/python3"]
    check = "import sys, poise.sandbox; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([*wrapper, "-c", check], capture_output=True, env={"PYTHONPATH": str(SRC)}).returncode:
        pytest.skip("no Python 3.11 that an ordinary user can start")
    return wrapper


@pytest.fixture
def open_dir():
    """A directory that every user can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        yield path


def test_without_namespaces(without_namespaces, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the password")
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = sandboxed(
            without_namespaces,
            "12 + 345",
            "open('mine', 'w').write('abc'); open('mine').read()",
            "import os; os.kill(os.getppid(), 9)",
            f"import socket; socket.create_connection({server.getsockname()!r})",
            "import os; os.fork()",
            f"open({str(secret)!r}).read()",
            f"open({str(tmp_path / 'new')!r}, 'w')",
            "import threading; t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()",
            "while True: pass",
            "import os; os.kill(os.getpid(), 9)",
            tmpdir=tmp_path,
        )
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert lines[0].startswith("landlock, ")
    assert lines[1:5] == ["357", "'abc'", "PermissionError: [Errno 1] Operation not permitted", lines[4]]
    assert "PermissionError" in lines[4]
    assert lines[5] == "PermissionError: [Errno 1] Operation not permitted"
    assert lines[6] == f"PermissionError: [Errno 13] Permission denied: '{secret}'"
    assert lines[7] == f"PermissionError: [Errno 13] Permission denied: '{tmp_path / 'new'}'"
    assert lines[8] == ("RuntimeError: can't start new thread" if "no threads" in lines[0] else "thread")
    assert lines[8:] == [lines[8], "[timed out after 2 s]", "[killed by SIGKILL]"]


def test_as_an_ordinary_user(as_user, open_dir):
    secret = open_dir / "secret"
    secret.write_text("the password")
    lines = sandboxed(
        as_user,
        "import os; print(os.getpid(), os.getuid() == 1234)",
        "import os; os.fork()",
        f"open({str(secret)!r}).read()",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); (c.unshare(0x10000000), ctypes.get_errno())",
        tmpdir=open_dir,
    )
    assert not lines[0].startswith("landlock")
    assert lines[1] == "1 False"  # process 1 of its own namespace, not the user who trains
    assert lines[2] == "PermissionError: [Errno 1] Operation not permitted"
    assert lines[3] == f"FileNotFoundError: [Errno 2] No such file or directory: '{secret}'"
    assert lines[4] == "(-1, 1)"  # EPERM


def test_what_the_user_may_write_the_snippet_may_not(as_user, open_dir):
    packages = open_dir / "site-packages"
    packages.mkdir()
    (packages / "mine.py").write_text("x = 3")
    if os.geteuid() == 0:
        os.chown(packages, 1234, 1234)
    script = (
        "import asyncio, sys; from poise.sandbox import run_python\n"
        f"sys.path.append({str(packages)!r})\n"
        f"open({str(packages / 'by_the_trainer')!r}, 'w')\n"
        f"for code in ('import mine; mine.x', \"open({str(packages / 'by_the_snippet')!r}, 'w')\"):\n"
        "    print(asyncio.run(run_python(code, prelude='import mine')).text.splitlines()[-1])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "TMPDIR": str(open_dir)}
    done = subprocess.run([*as_user, "-c", script], capture_output=True, text=True, timeout=30, env=env)
    assert done.stdout.splitlines() == [
        "3",
        f"OSError: [Errno 30] Read-only file system: '{packages / 'by_the_snippet'}'",
    ], done.stderr
