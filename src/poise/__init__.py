"""Agentic reinforcement learning for GPT-OSS."""

import os

__version__ = "0.1.0"

# OpenMP threads that wait for each other burn their time slice unless told otherwise. Where anything else wants a core,
# and tools and graders do all the time, small operations then take ten times as long. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Large tensors in huge pages where the kernel leaves that to programs: half of the time of a small step on the CPU goes
# into making pages otherwise. Read once, when torch first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
