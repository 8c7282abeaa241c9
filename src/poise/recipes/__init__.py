"""Recipes: functions that return a ``Config``. The first line of the docstring is what ``poise recipes`` prints."""

from collections.abc import Callable

from poise.config import Config
from poise.recipes.released import RELEASED
from poise.recipes.tiny import arithmetic_tiny, gsm8k_tiny, ppo_tiny, retool_tiny, verifyif_tiny
from poise.recipes.upcycled import verifyif_smollm

TINY = (arithmetic_tiny, gsm8k_tiny, ppo_tiny, retool_tiny, verifyif_tiny)
RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__: recipe for recipe in (*TINY, verifyif_smollm, *RELEASED)}
