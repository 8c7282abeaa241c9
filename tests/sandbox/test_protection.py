"""What is in force is the strongest that works, is said, is recorded; and where nothing works no code runs."""

import asyncio
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from world import SRC, USER, python_of

from poise.cli import run
from poise.config import ConfigError, SandboxConfig
from poise.sandbox import Limits, Sandbox, filters, syscalls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces; "
_SCRIPT = """
import asyncio, json, sys
from poise.sandbox import Sandbox, SandboxError
sandbox = Sandbox(**json.loads(sys.argv[1]))
try:
    print(sandbox.walls()["mode"])
    print(sandbox.protection())
    print(asyncio.run(sandbox.run("12 + 345")).text)
except SandboxError as error:
    print(error)
"""
# Answers Landlock's version with "not implemented", as an older kernel does; passed on to children.
_NO_LANDLOCK = """
import ctypes, os, struct, sys
program = b"".join(struct.pack("HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)])
text = ctypes.create_string_buffer(program, len(program))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("HP", 4, ctypes.addressof(text)), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def outcome(*wrapper, **settings):
    """Lines that a process started by ``wrapper`` prints about ``Sandbox(**settings)``."""
    command = [*wrapper, sys.executable, "-c", _SCRIPT, json.dumps(settings)]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def without_namespaces():
    wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES + 'exec "$0" "$@"']
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("unshare cannot take namespaces away here")
    return wrapper


def test_where_namespaces_are_refused_landlock_protects(without_namespaces):
    mode, line, text = outcome(*without_namespaces)
    assert (mode, text) == ("landlock", "357")
    assert line.startswith("landlock, Landlock ")


def test_without_bubblewrap_its_namespaces_are_made(tmp_path):
    (tmp_path / "sh").symlink_to("/bin/sh")
    mode, _, text = outcome("env", f"PATH={tmp_path}")
    if mode == "landlock":
        pytest.skip("no namespaces here")
    assert (mode, text) == ("namespaces", "357")


def test_where_nothing_protects_no_code_runs_unless_allowed(without_namespaces):
    without_landlock = [*without_namespaces, sys.executable, "-c", _NO_LANDLOCK]
    (refusal,) = outcome(*without_landlock)
    assert refusal.startswith("nothing here keeps model-written code from the rest of the machine (bubblewrap: ")
    assert "landlock: OSError: the kernel has no Landlock" in refusal
    assert "sandbox.allow_unsandboxed=True" in refusal
    mode, line, text = outcome(*without_landlock, allow_unsandboxed=True)
    assert (mode, text) == ("none", "357")
    assert line.startswith("NONE: ")


def test_a_mode_that_is_asked_for_is_not_replaced(without_namespaces):
    (refusal,) = outcome(*without_namespaces, mode="namespaces")
    assert refusal.startswith("nothing here keeps model-written code")
    assert "landlock" not in refusal
    with pytest.raises(ValueError, match=r"Sandbox\.mode must be one of auto, bubblewrap, namespaces, landlock"):
        Sandbox(mode="gvisor")


def test_a_run_that_cannot_be_protected_does_not_start(without_namespaces, tmp_path):
    command = [sys.executable, "-m", "poise", "train", "arithmetic_tiny", "--sandbox.mode=namespaces"]
    command.append(f"--run.folder={tmp_path}")
    done = subprocess.run(
        [*without_namespaces, *command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 2
    assert "nothing here keeps model-written code from the rest of the machine" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_run_prints_and_records_what_is_in_force(tmp_path, capsys):
    keys = "--run.steps=1 --warm-start.steps=1 --eval-problems=1 --groups-per-step=1 --group-size=2"
    assert run(["train", "arithmetic_tiny", *keys.split(), f"--run.folder={tmp_path}"]) == 0
    (line,) = (tmp_path / "arithmetic_tiny-001" / "sandbox.jsonl").read_text().splitlines()
    walls = json.loads(line)
    assert walls["mode"] in ("bubblewrap", "namespaces", "landlock")
    printed = "".join(capsys.readouterr().out.split())
    assert "sandbox:" + "".join(walls["protection"].split()) in printed


def test_keys_that_do_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"sandbox\.mode does nothing beside sandbox\.url"):
        SandboxConfig(url="http://x", mode="landlock")
    with pytest.raises(ConfigError, match=r"sandbox\.url must start with http"):
        SandboxConfig(url="x")
    assert run(["train", "arithmetic_tiny", "--task.tool=none", "--sandbox.memory-mib=64"]) == 2


def test_neither_environment_nor_arguments_of_the_server_tell_anything(tmp_path, monkeypatch):
    # Whoever can read /proc of the host reads nothing of the trainer in the sandbox's processes.
    monkeypatch.setenv("POISE_TEST_SECRET", "the-password")
    script = "import sys; from poise.sandbox import Sandbox; Sandbox(mode=sys.argv[1]).walls(); print(); input()"
    for mode in ("bubblewrap", "namespaces", "landlock"):
        with subprocess.Popen(
            [sys.executable, "-c", script, mode], text=True, env={**os.environ, "PYTHONPATH": str(SRC)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as trainer:  # fmt: skip
            if not trainer.stdout.readline():
                continue  # impossible here: test_attacks.py says why
            children = [path for path in Path("/proc").glob("[0-9]*") if _has_ancestor(path, trainer.pid)]
            assert len(children) >= 2
            for child in children:
                assert b"the-password" not in (child / "environ").read_bytes()
            trainer.communicate("\n")


def _has_ancestor(path: Path, pid: int) -> bool:
    while path.name not in ("0", "1"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
        if int(parent) == pid:
            return True
        path = Path("/proc") / parent
    return False


def test_a_package_that_is_not_named_cannot_be_imported():
    def text(code, *packages):
        return asyncio.run(Sandbox(packages=packages).run(code, limits=Limits(wall_s=600))).text

    assert text("import numpy; numpy.arange(2)").endswith("ModuleNotFoundError: No module named 'numpy'")
    assert text("import numpy; numpy.arange(2)", "numpy") == "array([0, 1])"
    assert text("import sympy", "numpy").endswith("ModuleNotFoundError: No module named 'sympy'")
    assert text("import mpmath; mpmath.mpf(2)", "sympy") == "mpf('2.0')"  # what sympy requires
    assert text("1", "no-such-package") == "1"


_BESIDE_THE_STANDARD_LIBRARY = """
import asyncio, sys
from poise.sandbox import Sandbox
code = '''
import os, sys
folder = os.path.dirname(os.__file__) + "/site-packages"
sys.path.append(folder)
try:
    import pip
    print(open(pip.__file__).read().count("def main"))
except (ImportError, OSError) as error:
    print(type(error).__name__)
for name in ("setuptools/__init__.py", "pip.py", "written"):
    try:
        open(f"{folder}/{name}", "a" if name == "written" else "r")
    except OSError:
        print("no")
'''
for packages in ((), ("pip",)):
    result = asyncio.run(Sandbox(mode=sys.argv[1], packages=packages).run(code))
    print(result.output.split())
"""


@pytest.mark.parametrize("mode", ["bubblewrap", "namespaces", "landlock"])
def test_packages_beside_the_standard_library_must_be_named_as_well(mode):
    # Outside of virtual environments, all of them lie inside the folder of the standard library.
    python = Path(sys.base_prefix, "bin", "python3")
    packages = Path(os.__file__).parent / "site-packages"
    if not (python.exists() and (packages / "pip/__init__.py").exists() and (packages / "setuptools").exists()):
        pytest.skip("this Python has no packages inside its standard library")
    if "nothing here keeps" in outcome(mode=mode)[0]:
        pytest.skip(f"no {mode} here")
    command = [str(python), "-c", _BESIDE_THE_STANDARD_LIBRARY, mode]
    env = {"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    unnamed, named = done.stdout.splitlines()
    assert unnamed in ("['ModuleNotFoundError', 'no', 'no', 'no']", "['PermissionError', 'no', 'no', 'no']")
    assert named == "['1', 'no', 'no', 'no']"


# The filter itself, by an interpreter of classic BPF: for both machines, over all numbers.

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine, number, *arguments, arch=None, pid=7, **settings):
    """What the kernel would do with a system call, by its rules for filters on struct seccomp_data."""
    settings = {"is_jailed": True, "allows_threads": True} | settings
    program = list(struct.iter_unpack("HBBI", filters.filter_program(machine, pid=pid, **settings)))
    data = struct.pack("<IIQ6Q", number, arch or ARCH[machine], 0, *(*arguments, *[0] * (6 - len(arguments))))
    assert len(program) < 4096  # the kernel's BPF_MAXINSNS
    position = accumulator = 0
    while True:
        code, if_true, if_false, k = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:
            accumulator &= k
        elif code in (0x15, 0x35):
            holds = accumulator == k if code == 0x15 else accumulator >= k
            position += if_true if holds else if_false
        else:
            assert code == 0x06
            return k


def header_numbers(machine):
    """System calls of the kernel's own headers."""
    if machine == "x86_64" and platform.machine() == "x86_64":
        paths = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]
    else:
        paths = [Path("/usr/include/asm-generic/unistd.h")]
    text = next((path.read_text() for path in paths if path.exists()), None)
    if text is None:
        pytest.skip("no kernel headers here")
    words = [line.split() for line in text.splitlines() if line.startswith("#define __NR")]
    return {name.removeprefix("__NR_").removeprefix("__NR3264_"): int(n) for _, name, n, *_ in words if n.isdigit()}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    headers = header_numbers(machine)
    column = list(ARCH).index(machine)
    named = syscalls.ALLOWED | syscalls.ALLOWED_IN_JAIL | syscalls.SIGNALS | {"clone": syscalls.CLONE}
    named |= {name: numbers for name, (numbers, _) in syscalls.CONDITIONAL.items()}
    for name, numbers in named.items():
        known = headers.get(name, headers.get("fstatat") if name == "newfstatat" and machine == "aarch64" else None)
        assert numbers[column] == known, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_nothing_but_the_list(machine):
    column = list(ARCH).index(machine)
    listed = {numbers[column] for numbers in (syscalls.ALLOWED | syscalls.ALLOWED_IN_JAIL).values()}
    conditional = {numbers[column] for numbers, _ in syscalls.CONDITIONAL.values()}
    conditional |= {numbers[column] for numbers in [syscalls.CLONE, *syscalls.SIGNALS.values()]}
    for number in range(1024):
        if number not in conditional:
            expected = ALLOW if number in listed else ENOSYS if number >= 403 else EPERM
            assert verdict(machine, number) == expected, number
        assert verdict(machine, number | 0x40000000) == EPERM  # x32
        other = 0x40000003 if machine == "x86_64" else 0x40000028  # i386, 32-bit ARM
        assert verdict(machine, number, arch=other) == EPERM


@pytest.mark.parametrize(("machine", "clone", "kill", "tgkill"), [("x86_64", 56, 62, 234), ("aarch64", 220, 129, 131)])
def test_threads_and_signals_to_oneself_and_nothing_more(machine, clone, kill, tgkill):
    thread = 0x3D0F00  # what the C library's pthread_create asks for
    assert verdict(machine, clone, thread) == ALLOW
    assert verdict(machine, clone, thread, allows_threads=False) == EPERM
    assert verdict(machine, clone, 17) == EPERM  # fork
    assert verdict(machine, clone, 0x4111) == EPERM  # vfork, posix_spawn
    assert verdict(machine, clone, thread | 0x10000000) == EPERM  # a user namespace
    assert verdict(machine, 435) == ENOSYS  # clone3
    for call in (kill, tgkill):
        assert verdict(machine, call, 7) == ALLOW
        for pid in (0, 1, 8, 0xFFFFFFFF):
            assert verdict(machine, call, pid, 7) == EPERM


@pytest.mark.parametrize(("machine", "openat", "chmod"), [("x86_64", 257, 91), ("aarch64", 56, 52)])
def test_without_a_read_only_root_files_keep_their_modes(machine, openat, chmod):
    assert verdict(machine, chmod) == ALLOW
    assert verdict(machine, chmod, is_jailed=False) == EPERM
    assert verdict(machine, openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    assert verdict(machine, openat, 0, 0, os.O_RDONLY | os.O_TRUNC) == EPERM
    assert verdict(machine, openat, 0, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == ALLOW


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_ordinary_user_is_protected_as_well():
    wrapper = python_of(USER)
    command = [*wrapper, "-c", _SCRIPT, "{}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={"PYTHONPATH": str(SRC)}, cwd="/")
    assert done.stdout.splitlines()[0] in ("bubblewrap", "namespaces", "landlock"), done.stderr
    assert done.stdout.splitlines()[2] == "357"
