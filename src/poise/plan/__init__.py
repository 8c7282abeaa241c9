"""The memory of a run before it starts."""

from poise.plan.fits import advice, advice_with_gpus, free_bytes, largest_context, largest_microbatch, require_memory
from poise.plan.sizes import make_plan
from poise.plan.tables import GIB, Mesh, Plan

__all__ = [
    "GIB",
    "Mesh",
    "Plan",
    "advice",
    "advice_with_gpus",
    "free_bytes",
    "largest_context",
    "largest_microbatch",
    "make_plan",
    "require_memory",
]
