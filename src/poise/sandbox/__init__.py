"""Runs Python that a policy wrote: ``result = await run_python(code, limits=Limits())``; it sees ``result.text``.

In force where the kernel allows namespaces (``protection()`` says what is in force here): the snippet is a process of
its own with a clean environment, in a private read-only root that holds the standard library, the system's shared
libraries and an empty memory-backed working directory, gone afterwards; no network device, not even a loopback that is
up; it sees no process but its own; another user id, no capabilities and no way to gain any; limits on CPU, memory,
file size, open files, processes and output; everything it started is killed when it ends or at the wall-clock limit.

NOT protected: the kernel itself (a snippet can make any system call, so a kernel bug is a way out: run
poise in a virtual machine where that matters); memory in sum (the limit is per process, and there may be
``num_processes`` of them, plus ``file_mib`` of files); the time of its neighbours (a snippet may use every core until
its limits); the installed system libraries, the machine's clock, kernel version and load, which it can read.
Snippets that run at the same moment share one empty network namespace and could talk through abstract sockets.
Without namespaces the snippet runs as the user who trains, and can read that user's files and use the network.
"""

from poise.sandbox.runner import Limits, Result, SandboxError, protection, run_python

__all__ = ["Limits", "Result", "SandboxError", "protection", "run_python"]
