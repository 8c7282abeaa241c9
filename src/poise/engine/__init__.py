"""What samples: the embedded engine, and clients of servers."""

from poise.engine.embedded import EmbeddedEngine
from poise.engine.gathered import GatheredEngine
from poise.engine.http import EngineError, Servers
from poise.engine.sglang import SglangEngine
from poise.engine.vllm import VllmEngine

__all__ = ["EmbeddedEngine", "EngineError", "GatheredEngine", "Servers", "SglangEngine", "VllmEngine"]
