"""Runs Python that a policy wrote, behind walls: docs/sandbox.md says what they are and what they do not keep out.

``result = await Sandbox().run(code)`` runs a script in a fresh interpreter;
``async with Sandbox().session() as session: result = await session.run(code)`` remembers, as a notebook does. The
policy sees ``result.text``.
"""

from poise.sandbox.client import Sandbox, describe, protection
from poise.sandbox.limits import Limits, Result, SandboxError, Session

__all__ = ["Limits", "Result", "Sandbox", "SandboxError", "Session", "describe", "protection"]
