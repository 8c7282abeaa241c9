"""Runs Python that a policy wrote: ``result = await run_python(code, limits=Limits())``; it sees ``result.text``.

In force where the kernel allows namespaces (``protection()`` says what is in force here): the snippet is a process of
its own with a clean environment, in a private read-only root that holds the standard library, the system's shared
libraries and an empty memory-backed working directory, gone afterwards; no network device, not even a loopback that is
up; it sees no process but its own; another user id, no capabilities and no way to gain any, no system calls that mount,
trace or make namespaces; limits on CPU, memory, file size, open files, processes and output; everything it started is
killed when it ends or at the wall-clock limit. Where the kernel refuses namespaces but bubblewrap is installed and
works, bubblewrap makes the private root. Else Landlock hides the user's files, and a system-call filter forbids
sockets, new processes and signals to others, each where the kernel has it.

NOT protected: the kernel itself (a hole in it is a way out: run poise in a virtual machine where that matters); memory
in sum (the limit is per process, and there may be ``num_processes`` of them, plus ``file_mib`` of files); the time of
its neighbours (a snippet may use every core until its limits); the installed system libraries, the machine's clock,
kernel version and load, which it can read. Snippets that run at the same moment share one empty network namespace and
could talk through abstract sockets. Without namespaces: names and sizes of files can be asked for, the working
directory is not limited in sum, and without Landlock or seccomp (``protection()`` says so in capitals) a snippet is as
free as the user who trains. On macOS only the resource limits hold.
"""

from poise.sandbox.runner import Limits, Result, SandboxError, protection, run_python

__all__ = ["Limits", "Result", "SandboxError", "protection", "run_python"]
