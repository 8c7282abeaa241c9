"""The command line: ``poise train``, ``sft``, ``eval``, ``serve``, ``mismatch``, ``plan``, ``recipes``, ``doctor``."""

import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from poise.cli.commands import COMMANDS, USAGE
from poise.cli.keys import KEYS_HELP
from poise.config import ConfigError, RunError
from poise.interrupt import Interrupted


def main(argv: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed while running, 2 refused before anything started, 130 interrupted and saved, 141
    nobody reads what it prints any more (``poise plan RECIPE | head -3``), as of a program that SIGPIPE ends."""
    code: int | str | None
    try:
        try:
            code = run(sys.argv[1:] if argv is None else argv)
        except SystemExit as end:  # --help has been printed
            code = end.code
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _has_no_reader(stream)]
        if not gone:
            raise  # another pipe than these: a failure like any other
        for stream in gone:  # what is left in its buffer goes nowhere, without a complaint at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are told of without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


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
