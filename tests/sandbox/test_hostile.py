"""Hostile cells that take time, memory, files or trust: each stays within its limits, and no neighbour notices."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
SECOND = {"wall_s": 1.0, "cpu_s": 1.0}

# name: (cell, limits, what its output must end with); each alone would take far more than it gets.
GREEDY = {
    "memory": ("x = bytearray(3 << 30)", {"memory_mib": 256}, "MemoryError"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory_mib": 128}, "MemoryError"),
    "memory that is mapped": ("import mmap; mmap.mmap(-1, 3 << 30)", {"memory_mib": 256}, "Cannot allocate memory"),
    "one large file": ("open('f', 'wb').write(bytes(64 << 20))", {"file_mib": 4}, ""),
    "open files": (
        "import os\nn = 0\ntry:\n    while True: os.open('/dev/null', 0); n += 1\n"
        "except OSError as e: print(n < 64, e)",
        {},
        "True [Errno 24] Too many open files: '/dev/null'",
    ),
    "threads": (
        "import threading, time\nn = 0\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        # Not quite 16: where all tasks of a user count together, some may just have ended.
        "except RuntimeError as e: print(n < 40, e)",
        {},
        "True can't start new thread",
    ),
    "priority": ("import os; os.nice(-5)", {}, "Permitted"),
    "raised limits": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", {}, ""),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greed_ends_in_an_error(trainer, name):
    code, limits, ending = GREEDY[name]
    (result,) = trainer.run(code, **limits)
    assert result["exit_status"] == 1 or ending.startswith("True")
    assert ending.casefold() in result["output"].rstrip().splitlines()[-1].casefold(), result


RESISTS = {
    "sleep": "import time; time.sleep(60)",
    "signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "blocked signals": "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)",
    "exceptions": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "closed output": "import os, time\nos.close(0); os.close(1); os.close(2); time.sleep(60)",
    "deaf in C": "9 ** 9 ** 9",
    "its printing": "import signal\nclass E(BaseException):\n    def __str__(self):\n        while True: pass\nraise E",
    "busy threads": "import threading\ndef f():\n    while True: pass\n"
    "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nf()",
    "stopped": "import os, signal\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)",
    "a storm of signals": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
    "signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
    "without a main thread": "import ctypes, threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    "import os\nctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
    "its value": "class V:\n    def __repr__(self):\n        while True:\n            try: pass\n"
    "            except BaseException: pass\nV()",
    "its end": "import atexit, threading, time\natexit.register(time.sleep, 60)\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()\nthreading._shutdown()",
}


@pytest.mark.parametrize("name", RESISTS)
def test_a_cell_ends_at_its_limit_whatever_it_does(trainer, name):
    # The session goes on; but the limit is that of each cell, and a busy machine may not let every one of them run.
    cut, *after = trainer.run(RESISTS[name], "6 * 7", "6 * 7", "6 * 7", **SECOND)
    assert cut["timed_out"] or not trainer.walls["allows_threads"], cut
    shown = [result["output"] for result in after if not result["timed_out"]]
    assert shown
    assert set(shown) <= ({"", "42\n"} if name == "closed output" else {"42\n"})  # what it closed stays closed


def test_floods_of_output_end(trainer):
    for code in ("while True: print('x' * 9999)", "import os\nwhile True: os.write(2, b'y' * 65536)"):
        flood, after = trainer.run(code, "1", num_output_bytes=200, wall_s=600, cpu_s=600)
        assert flood["notice"].startswith("[stopped: too much output")
        assert len(flood["output"]) < 300
        assert after["output"] == "1\n"


FLOODS = {
    "bytes": "for i in range(200): open(str(i), 'wb').write(bytes(1 << 20))",
    "names": "import os\nfor i in range(5000): os.symlink('x', str(i))",
    "depth": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_files_end_and_are_removed(world, trainer, name):
    base = trainer.walls["base"]
    flood = FLOODS[name] + ("\nimport time; time.sleep(600)" if base else "")  # time to be looked at
    (result,) = trainer.run(flood, file_mib=4, wall_s=600.0, cpu_s=600.0)
    if base is None:
        is_bounded = "No space left" in result["output"] or name == "depth"  # 3,000 folders are fewer than 4,096
    else:
        is_bounded = result["notice"].startswith("[stopped: too many files, too deep, or more than 4 MiB of them")
    assert is_bounded, result
    if base:
        wait_for(lambda: len(list(Path(base).iterdir())) == 1)  # the neighbour's


def test_a_folder_that_is_closed_is_removed(trainer):
    base = trainer.walls["base"]
    if base is None:
        pytest.skip("the directory is in memory and goes with its namespace")
    code = "import os; os.mkdir('a'); open('a/f', 'w'); os.mkdir('a/b', 0); os.symlink('/', 'l'); os.getcwd()"
    (result,) = trainer.run(code)
    assert result["output"].startswith(f"'{base}/")
    wait_for(lambda: len(list(Path(base).iterdir())) == 1)  # the neighbour's


def wait_for(condition, seconds=300.0):
    """Until it comes true; the time is against hanging alone."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_between_cells_nothing_runs(trainer):
    if not trainer.walls["allows_threads"]:
        pytest.skip("no threads here")
    code = "import threading\nn = 0\ndef f():\n    global n\n    while True: n += 1\n"
    code += "threading.Thread(target=f, daemon=True).start()"
    # The CPU time of the interpreter grows while a cell runs, and not in the tenth of a second between two; but for
    # what passes until it is stopped, which on a busy machine may be long, though not each time.
    pauses = [0.1, "time.process_time()"] * 5
    runs = "before = n\nwhile n == before: time.sleep(0.001)"
    _, *used, _ = trainer.run(code, "import time; time.process_time()", *pauses, runs, wall_s=600.0, cpu_s=600.0)
    used = [float(result["output"]) for result in used]
    assert min(after - before for before, after in itertools.pairwise(used)) < 0.02


TRUST = {
    "claims that its cell is over": "import os, time; os.write(3, b'd\\0'); time.sleep(9)",
    "says what is not expected": "import os; os.write(3, b'd\\0' * 500)",
    "says much": "import os\nwhile True: os.write(3, bytes(65536))",
    "hangs up": "import os; os.close(3)",
    "takes the next cell": "import os, threading; threading.Thread(target=os.read, args=(3, 9), daemon=True).start()",
    "exits": "import os; os._exit(0)",
    "exits by a signal": "import ctypes; ctypes.string_at(0)",
    "ruins the interpreter": "import os, sys, builtins\nfor name in list(vars(builtins)): delattr(builtins, name)",
    "edits the loop": "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
    "frame.f_globals.clear()",
    "patches modules": "import os, json, math, ast, traceback\n"
    "math.pi = 3\nast.parse = traceback.format_exception = None\n"
    "os.read = os.write = os._exit = None\nsum = len = None",
}


@pytest.mark.parametrize("name", TRUST)
def test_whoever_breaks_an_interpreter_breaks_it_alone(trainer, name):
    trainer.run(TRUST[name], "1", **SECOND)  # the neighbour beside it is checked by the trainer
    probe = "import math; (math.pi > 3.1, sum([20, 22]), open('f', 'w').write('x'))"
    (result,) = trainer.run(probe)
    assert result["output"] == "(True, 42, 1)\n"


def test_an_interpreter_holds_nothing_of_another(trainer):
    secret = "".join(["pass", "phrase"])
    trainer.run(f"secret = {secret!r}; open('kept', 'w').write(secret); print(secret)")
    probe = (
        "import gc, os\n"
        "texts = [o for o in gc.get_objects() for o in gc.get_referents(o) if isinstance(o, (str, bytes))]\n"
        "wanted = 'pass' 'phrase'\n"
        "print(any(wanted in t if isinstance(t, str) else wanted.encode() in t for t in texts if len(t) < 9999"
        " and t is not wanted and t != code), os.listdir('.'))"
    )
    (result,) = trainer.run(f"code = ''\n{probe}")
    assert result["output"] == "False []\n"


def test_abandoned_sessions_leave_no_process(world):
    # Trainers that end without a word, in every mode: nothing of theirs is left.
    script = (
        "import asyncio, sys\nfrom poise.sandbox import Limits, Sandbox\n"
        "async def main():\n"
        "    sandbox = Sandbox(mode=sys.argv[1])\n"
        "    print(sandbox.walls()['base'], flush=True)\n"
        "    sessions = [sandbox.session(Limits(wall_s=600, cpu_s=600)) for _ in range(3)]\n"
        "    await asyncio.gather(*[s.run('import os; os.getpid()') for s in sessions])\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.gather(*[s.run('while True: pass') for s in sessions])\n"
        "asyncio.run(main())"
    )
    for mode in ("bubblewrap", "namespaces", "landlock"):
        process = subprocess.Popen(
            [*world.python, "-c", script, mode],
            env=world.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        with process:
            base = process.stdout.readline().strip()
            if process.stdout.readline().strip() != "ready":
                continue  # impossible here
            children = below(process.pid)
            process.send_signal(signal.SIGKILL)
        assert len(children) > 3
        wait_for(lambda children=children: not any(is_alive(pid) for pid in children))
        assert base == "None" or not Path(base).exists()


def below(pid):
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
