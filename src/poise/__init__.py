"""Agentic reinforcement learning for GPT-OSS."""

__version__ = "0.1.0"
