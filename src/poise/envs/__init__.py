"""Environments: what the policy acts in. ``make_task`` turns a configuration into rows and environments."""

import importlib
import os
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from poise.config import ConfigError, SandboxConfig, TaskConfig
from poise.envs.env import Task


def make_task(config: TaskConfig, sandbox: SandboxConfig | None = None) -> Task:
    """A task whose python tool runs where ``sandbox`` says; of a custom one, if its factory takes it.

    Raises ``ConfigError`` in one sentence where data or an optional package is missing.
    """
    if config.name == "reasoning_gym":
        from poise.envs.reasoning_gym import ReasoningGym

        return ReasoningGym(config, sandbox)
    if config.name == "gsm8k":
        from poise.envs.gsm8k import Gsm8k

        return Gsm8k(config, sandbox)
    if config.name == "retool":
        from poise.envs.retool import Retool

        return Retool(config, sandbox)
    if config.name == "verifyif":
        from poise.envs.verifyif import VerifyIf

        return VerifyIf(config)
    if config.name == "custom":
        return _custom_task(config.factory or "", sandbox or SandboxConfig())
    raise ConfigError(f"task.name must be reasoning_gym, gsm8k, retool, verifyif or custom, got {config.name!r}")


def takes_sandbox(config: TaskConfig) -> bool:
    """Whether the task runs the policy's code in the sandbox: a custom one does if its factory has that parameter."""
    return config.runs_code or (
        config.name == "custom" and "sandbox" in signature(_factory(config.factory or "")).parameters
    )


def _custom_task(factory: str, sandbox: SandboxConfig) -> Task:
    """What ``MODULE:FUNCTION`` returns; a parameter ``sandbox`` is given the keys of the sandbox."""
    make = _factory(factory)
    if "sandbox" in signature(make).parameters:
        task: Task = make(sandbox=sandbox)
    elif sandbox == SandboxConfig():
        task = make()
    else:
        raise ConfigError(f"sandbox keys do nothing here: task.factory {factory} has no parameter sandbox")
    if missing := [name for name in ("train_rows", "test_rows", "make_env", "demonstrate") if not hasattr(task, name)]:
        raise ConfigError(f"task.factory {factory} returned a {type(task).__name__} without {', '.join(missing)}")
    return task


def _factory(factory: str) -> Callable[..., Any]:
    """The function ``MODULE:FUNCTION``; the module may lie in the folder that the command was started in."""
    module_name, _, function_name = factory.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ConfigError(f"task.factory must be MODULE:FUNCTION, got {factory!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0]:
            raise  # the module is there, what it imports is not
        raise ConfigError(f"task.factory {factory}: there is no module {module_name} in {os.getcwd()}") from error
    make = getattr(module, function_name, None)
    if not callable(make):
        raise ConfigError(f"task.factory {factory}: {module_name} has no function {function_name}")
    return make
