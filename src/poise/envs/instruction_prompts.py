"""Training prompts for verifiable instructions: a seed prompt and instructions that do not contradict each other."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from poise.envs.env import Row
from poise.envs.instruction_check import CheckerError, build_once, seeded
from poise.envs.rows import MadeRows

_MAX_DRAWS = 32


class MadePrompts(MadeRows):
    """``size`` rows, made when asked for: row i is the same for the same seed, whatever else was asked for before.

    A row takes a seed prompt, draws 1 to ``max_instructions`` of ``instructions`` that do not conflict by the package's
    own INSTRUCTION_CONFLICTS, lets each checker draw its arguments, and appends the checkers' own descriptions.
    ``split`` keeps the numbers of training and held-out rows apart.
    """

    def __init__(
        self,
        registry: ModuleType,
        seed_prompts: Sequence[str],
        *,
        size: int,
        instructions: Sequence[str],
        max_instructions: int,
        seed: int,
        split: str,
    ) -> None:
        self._registry = registry
        self._seed_prompts = seed_prompts
        self._size = size
        self._instructions = instructions
        self._max_instructions = max_instructions
        self._name = f"{seed}/{split}"

    def __len__(self) -> int:
        return self._size

    def make(self, index: int) -> Row:
        digest = hashlib.sha256(f"{self._name}/{index}".encode()).digest()
        generator = random.Random(int.from_bytes(digest, "big"))
        return self._make(generator)

    def _make(self, generator: random.Random) -> Row:
        seed_prompt = generator.choice(self._seed_prompts)
        number = generator.randint(1, self._max_instructions)
        chosen: list[str] = []
        for candidate in generator.sample(self._instructions, len(self._instructions)):
            if len(chosen) < number and not any(conflicts(self._registry, candidate, other) for other in chosen):
                chosen.append(candidate)
        made = [make_instruction(self._registry, name, seed_prompt, seed=generator.getrandbits(32)) for name in chosen]
        return {
            "prompt": "\n\n".join([seed_prompt, "\n".join(description for description, _ in made)]),
            "instructions": chosen,
            "arguments": [arguments for _, arguments in made],
        }


def make_instruction(
    registry: ModuleType, instruction: str, seed_prompt: str, *, seed: int
) -> tuple[str, Mapping[str, Any]]:
    """The checker's description with arguments that it draws from ``seed``, and those arguments.

    What a checker draws need not be what it accepts (the fourth of three paragraphs): it draws again then. Raises
    CheckerError where nothing that it draws comes back the same.
    """
    checker = registry.INSTRUCTION_DICT[instruction](instruction)
    given = {"prompt_to_repeat": seed_prompt} if "prompt_to_repeat" in checker.get_instruction_args_keys() else {}
    for draw in range(seed, seed + _MAX_DRAWS):
        try:
            with seeded(draw):
                description: str = checker.build_description(**given)
                arguments = dict(checker.get_instruction_args() or {})
        except Exception as error:  # the border to the package
            raise CheckerError(f"instruction {instruction} makes no description by itself: {error}") from error
        _, again, has_drawn = build_once(registry, instruction, arguments, seed_prompt, seed=0)
        if not has_drawn and again == arguments:
            return description, arguments
    raise CheckerError(f"instruction {instruction} does not accept the arguments that it draws, such as {arguments}")


def conflicts(registry: ModuleType, first: str, second: str) -> bool:
    """Whether two instructions should not be given together: the package says so of either, or they are the same."""
    table = getattr(registry, "INSTRUCTION_CONFLICTS", {})
    return first == second or second in table.get(first, ()) or first in table.get(second, ())
