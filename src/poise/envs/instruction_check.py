"""Verifiable instructions by the protocol of IFEval's published checkers (https://arxiv.org/abs/2311.07911).

A package offers a module with ``INSTRUCTION_DICT``, {id: class}; a checker is ``INSTRUCTION_DICT[id](id)``, takes its
arguments by ``build_description(**kwargs)``, which returns the sentence for the prompt, and answers
``check_following(response)``. What is checked is theirs; closed here are the ways in which the answer can depend on
chance: see ``build_checker`` and ``load_registry``.
"""

import importlib
import importlib.util
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_PUNKT = "tokenizers/punkt_tab"
_NO_PUNKT = (
    "the checkers need nltk's data punkt_tab: python -m nltk.downloader punkt_tab, or without access to its server "
    "pip install --no-deps llama-index-core, which carries a copy"
)
_NUM_DRAWS = 8  # builds compared to find out what was drawn


class CheckerError(ValueError):
    """Checkers that cannot be loaded, or an instruction that they cannot check. The message is one sentence."""


@cache
def load_registry(module: str) -> ModuleType:
    """The module with INSTRUCTION_DICT. Raises CheckerError.

    langdetect answers at random for short texts unless its seed is set; and some checkers need nltk's punkt_tab,
    which the package would try to download while it is imported. Its log repeats what the policy wrote, in full length,
    and is switched off.
    """
    _find_nltk_data()
    logging.getLogger(module.partition(".")[0]).setLevel(logging.CRITICAL)
    try:
        registry = importlib.import_module(module)
    except ImportError as error:
        raise CheckerError(
            f"task.checkers {module} cannot be imported ({error}): the default needs the extra ifeval, "
            f"pip install 'poise[ifeval]'"
        ) from error
    if not isinstance(getattr(registry, "INSTRUCTION_DICT", None), Mapping):
        raise CheckerError(f"task.checkers {module} has no INSTRUCTION_DICT")
    if importlib.util.find_spec("langdetect") is not None:
        from langdetect import DetectorFactory

        DetectorFactory.seed = 0
    return registry


def _find_nltk_data() -> None:
    """Lets nltk find punkt_tab, where nltk is installed: its own copy, or the one inside llama-index-core."""
    if importlib.util.find_spec("nltk") is None:
        return
    import nltk

    try:
        nltk.data.find(_PUNKT)
        return
    except LookupError:
        pass
    package = importlib.util.find_spec("llama_index")
    for location in (package and package.submodule_search_locations) or ():
        folder = Path(location) / "core" / "_static" / "nltk_cache"
        if (folder / _PUNKT).is_dir():
            nltk.data.path.append(str(folder))
            return
    raise CheckerError(_NO_PUNKT)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The checkers draw from ``random``: inside, from this seed; outside, as if nothing had happened."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def build_checker(registry: ModuleType, instruction: str, arguments: Mapping[str, Any], prompt: str) -> Any:
    """A checker of ``instruction`` with ``arguments``, of which None means not given (and 0 means 0).

    The published code draws an argument that is missing, and replaces at random one that it does not like, such as a
    ``letter`` that is none of a..z. The first is refused, and in the second the given argument is put back. Raises
    CheckerError for an unknown id, for arguments that the checker refuses, and where it would go by chance.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    checker, known, has_drawn = build_once(registry, instruction, given, prompt, seed=0)
    if not has_drawn:
        return checker
    others = [build_once(registry, instruction, given, prompt, seed=seed)[1] for seed in range(1, _NUM_DRAWS)]
    drawn = [name for name, value in known.items() if name not in given or any(o[name] != value for o in others)]
    for name in drawn:
        attribute = f"_{name}"
        if name not in given or not hasattr(checker, attribute):
            raise CheckerError(f"instruction {instruction} needs the argument {name!r}: it would be drawn at random")
        # As the checkers treat the letters they know: lower case, since responses are compared in lower case.
        restored = given[name].strip().lower() if isinstance(given[name], str) else given[name]
        setattr(checker, attribute, restored)
    if not drawn:
        raise CheckerError(f"instruction {instruction} draws at random with {given}")
    return checker


def build_once(
    registry: ModuleType, instruction: str, given: Mapping[str, Any], prompt: str, *, seed: int
) -> tuple[Any, Mapping[str, Any], bool]:
    """The checker, the arguments that it works with, and whether it drew any of them. Raises CheckerError."""
    if instruction not in registry.INSTRUCTION_DICT:
        raise CheckerError(
            f"instruction {instruction!r} is unknown to {registry.__name__}; it has "
            f"{', '.join(sorted(registry.INSTRUCTION_DICT))}"
        )
    checker = registry.INSTRUCTION_DICT[instruction](instruction)
    try:
        with seeded(seed):
            before = random.getstate()
            checker.build_description(**given)
            known = checker.get_instruction_args() or {}
            if "prompt" in known:
                checker.build_description(prompt=prompt)
            has_drawn = random.getstate() != before
    except Exception as error:  # the border to the package: whatever it says about the arguments
        raise CheckerError(f"instruction {instruction} refuses {given}: {error}") from error
    return checker, known, has_drawn


def check(
    module: str, prompt: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]], response: str
) -> dict[str, Any]:
    """Which instructions a response follows: ``strict`` and ``loose`` as in IFEval, section 2.2, one bool each.

    Loose: one of eight variants follows it, the response without Markdown's asterisks, without its first line, without
    its last one, and combinations. A text in which nothing can be seen follows nothing. ``errors``: checkers that
    raised, which count as not followed.
    """
    registry = load_registry(module)
    response = response.encode("utf-8", "replace").decode()
    checkers = [
        build_checker(registry, instruction, given, prompt)
        for instruction, given in zip(instructions, arguments, strict=True)
    ]
    num_errors = 0
    strict, loose = [], []
    for checker in checkers:
        followed, has_raised = [], False
        for variant in _variants(response):
            try:
                with seeded(0):
                    followed.append(_can_be_seen(variant) and bool(checker.check_following(variant)))
            except Exception:  # the border to the package: what it cannot read is not followed, and is counted
                has_raised = True
                followed.append(False)
            if followed[-1]:
                break
        num_errors += has_raised
        strict.append(followed[0])
        loose.append(any(followed))
    return {"strict": strict, "loose": loose, "errors": num_errors}


def _can_be_seen(text: str) -> bool:
    """Whether there is anything but white space and characters without a shape, such as U+200B."""
    return any(character.isprintable() and not character.isspace() for character in text)


def _variants(response: str) -> list[str]:
    """The response first, then its loose variants."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [variant for text in cut for variant in (text, text.replace("*", ""))]
