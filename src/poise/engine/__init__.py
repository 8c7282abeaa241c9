"""What samples: the embedded engine."""

from poise.engine.embedded import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
