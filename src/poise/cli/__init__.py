"""The command line: ``poise train``, ``sft``, ``eval``, ``serve``, ``mismatch``, ``plan``, ``recipes``, ``doctor``."""

import logging
import sys
from collections.abc import Sequence

from poise.cli.commands import COMMANDS, USAGE
from poise.cli.keys import KEYS_HELP
from poise.config import ConfigError, RunError
from poise.interrupt import Interrupted


def main(argv: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed while running, 2 refused before anything started, 130 interrupted and saved."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return _dispatch(list(argv))
    except (ConfigError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"poise: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"poise: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"poise: {error}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("poise: interrupted at once; the last saved checkpoint stands", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n{KEYS_HELP}")
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command}; known are {', '.join(COMMANDS)}")
    return COMMANDS[command](rest) or 0
