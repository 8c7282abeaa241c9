"""What a user is told: one sentence, without a traceback."""

import math


class ConfigError(Exception):
    """A value or a combination that cannot work. The message is one sentence that names the key."""


class RunError(Exception):
    """A run that cannot go on. The message is one sentence that says what was found and what it means."""


def require_finite(section: object, name: str, *fields: str) -> None:
    for field_name in fields:
        value = getattr(section, field_name)
        require(math.isfinite(value), f"{name}.{field_name} must be a finite number, got {value}")


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
