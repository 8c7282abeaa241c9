"""``python -m poise``."""

from poise.cli import main

main()
