"""The memory of a run before it starts."""

from poise.plan.fits import advice, free_bytes, largest_context, largest_microbatch, require_memory
from poise.plan.sizes import GIB, Mesh, Plan, make_plan

__all__ = [
    "GIB",
    "Mesh",
    "Plan",
    "advice",
    "free_bytes",
    "largest_context",
    "largest_microbatch",
    "make_plan",
    "require_memory",
]
