"""Recipes: functions that return a ``Config``. The first line of the docstring is what ``poise recipes`` prints."""

from collections.abc import Callable

from poise.config import Config
from poise.recipes.tiny import arithmetic_tiny, gsm8k_tiny, ppo_tiny, retool_tiny, verifyif_tiny
from poise.recipes.upcycled import verifyif_smollm

RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (arithmetic_tiny, gsm8k_tiny, ppo_tiny, retool_tiny, verifyif_tiny, verifyif_smollm)
}
