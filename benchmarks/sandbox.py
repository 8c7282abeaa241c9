"""What a session and a cell cost, beside a fresh Python process for each snippet and a Jupyter kernel for each episode.

    python benchmarks/sandbox.py [--mode bubblewrap] [--sessions 1000]

Medians of ``--repeats``; memory is the sum over all processes of the sandbox of their proportional set size (shared
pages counted once), so it can be compared with what the machine has.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

from poise.sandbox import Limits, Sandbox

CELL = "sum(i * i for i in range(100))"
SYMBOLIC = "import sympy; sympy.expand((sympy.Symbol('x') + 1) ** 5)"


def descendants(pid: int) -> list[int]:
    """``pid`` and all below it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, frontier = {pid}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return sorted(found)


def memory_mib(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def timed(make, repeats: int) -> float:
    """Median milliseconds."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        await make()
        taken.append((time.perf_counter() - start) * 1000)
    return statistics.median(taken)


async def sessions_and_cells(sandbox: Sandbox, repeats: int) -> None:
    opened = []

    async def open_one():
        session = sandbox.session()
        await session.open()
        opened.append(session)

    await open_one()
    print(f"open a session        {await timed(open_one, repeats):8.2f} ms")
    for session in opened[1:]:
        await session.close()
    session = opened[0]
    await session.run("x = 0")
    print(f"a small cell          {await timed(lambda: session.run(CELL), repeats):8.2f} ms")
    print(f"a cell with sympy     {await timed(lambda: session.run(SYMBOLIC), repeats):8.2f} ms")
    await session.close()
    print(f"a snippet of its own  {await timed(lambda: sandbox.run(CELL), repeats):8.2f} ms")


async def snippets_per_s(sandbox: Sandbox, count: int) -> None:
    start = time.perf_counter()
    results = await asyncio.gather(*[sandbox.run(f"{i} * {i}") for i in range(count)])
    assert [result.text for result in results] == [str(i * i) for i in range(count)]
    print(f"{count} snippets at once  {count / (time.perf_counter() - start):8.1f} per s")


async def live_sessions(sandbox: Sandbox, count: int, pid: int) -> None:
    before = memory_mib(descendants(pid))
    sessions = [sandbox.session(Limits(wall_s=60), seed=i) for i in range(count)]
    start = time.perf_counter()
    await asyncio.gather(*[session.open() for session in sessions])
    opened_s = time.perf_counter() - start
    results = await asyncio.gather(
        *[session.run(f"x = list(range({i})); len(x)") for i, session in enumerate(sessions)]
    )
    assert [result.text for result in results] == [str(i) for i in range(count)]
    total = memory_mib(descendants(pid))
    print(f"{count} live sessions     {total - before:8.0f} MiB beyond the {before:.0f} of the fork server, "
          f"opened in {opened_s:.1f} s")  # fmt: skip
    for session in sessions:
        await session.close()


def processes(repeats: int) -> None:
    """What runs a snippet where there is no sandbox: a fresh interpreter, without and with sympy."""
    for name, code in (("python -c", CELL), ("python -c with sympy", SYMBOLIC)):
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
            taken.append((time.perf_counter() - start) * 1000)
        print(f"{name:<21} {statistics.median(taken):8.2f} ms")


def jupyter(repeats: int) -> None:
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        print("jupyter kernel        not installed (pip install ipykernel)")
        return
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        manager, client = start_new_kernel()
        taken.append((time.perf_counter() - start) * 1000)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(f"open a jupyter kernel {statistics.median(taken):8.2f} ms")
    manager, client = start_new_kernel()
    cells = []
    for _ in range(repeats):
        start = time.perf_counter()
        client.execute_interactive(CELL, output_hook=lambda message: None)
        cells.append((time.perf_counter() - start) * 1000)
    print(f"a small jupyter cell  {statistics.median(cells):8.2f} ms")
    print(f"a jupyter kernel      {memory_mib(descendants(manager.provisioner.pid)):8.0f} MiB")
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="auto", help="auto, bubblewrap, namespaces or landlock")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=1000)
    options = parser.parse_args()
    sandbox = Sandbox(mode=options.mode)
    print(sandbox.protection())
    asyncio.run(sessions_and_cells(sandbox, options.repeats))
    asyncio.run(snippets_per_s(sandbox, 5 * options.repeats))
    from poise.sandbox.client import _one_server

    asyncio.run(live_sessions(sandbox, options.sessions, _one_server(sandbox).get().process.pid))
    processes(max(3, options.repeats // 10))
    jupyter(3)


if __name__ == "__main__":
    main()
