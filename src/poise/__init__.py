"""Agentic reinforcement learning for GPT-OSS."""

import os

__version__ = "0.1.0"

# OpenMP threads that wait for each other burn their time slice unless told otherwise. Where anything else wants a core,
# and tools and graders do all the time, small operations then take ten times as long. Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
