"""JSON schemas of Python functions, and JSON arguments checked against them."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from poise.harmony.messages import FunctionTool
from poise.harmony.parser import ArgumentError, json_arguments, json_kind

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?)\s*:\s*$")


def declaration_of(function: Callable[..., Any]) -> FunctionTool:
    """Name, description and JSON schema of a function with type hints and a Google-style docstring.

    Raises ``ValueError`` where a hint, the docstring or the description of a parameter is missing.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, documented = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"tool {name} needs a docstring that describes it")
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        where = f"parameter {parameter.name} of tool {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where} must be an ordinary parameter: calls pass every argument by name")
        if parameter.name not in hints:
            raise ValueError(f"{where} needs a type hint")
        if parameter.name not in documented:
            raise ValueError(f"{where} needs a line in the docstring's Args section")
        schema = _schema(hints[parameter.name], where)
        properties[parameter.name] = {**schema, "description": documented[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return FunctionTool(name=name, description=description, parameters=parameters if properties else None)


def check_arguments(content: str, schema: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The arguments of a call, and what is wrong with them in words ("" when nothing is)."""
    if not content.strip() and not (schema or {}).get("required"):
        return {}, ""
    arguments = json_arguments(content)
    if isinstance(arguments, ArgumentError):
        return {}, arguments.reason
    properties = (schema or {}).get("properties", {})
    for name in arguments:
        if name not in properties:
            return {}, f"unknown argument {name!r}; arguments: {', '.join(properties) or 'none'}"
    for name in (schema or {}).get("required", ()):
        if name not in arguments:
            return {}, f"missing argument {name!r}"
    for name, value in arguments.items():
        if problem := _mismatch(value, properties[name], f"argument {name!r}"):
            return {}, problem
        if properties[name].get("type") == "integer" and isinstance(value, float):
            arguments[name] = int(value)
    return arguments, ""


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        kinds = sorted({_SIMPLE[type(value)] for value in arguments})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _schema(arguments[0], where)} if arguments else {})}
    if hint is dict or origin is dict:
        if arguments and arguments[0] is not str:
            raise ValueError(f"{where}: the keys of a JSON object are strings, got {hint}")
        extra = {"additionalProperties": _schema(arguments[1], where)} if arguments else {}
        return {"type": "object", **extra}
    if origin in (Union, types.UnionType):
        members = [_schema(member, where) for member in arguments if member is not type(None)]
        schema = members[0] if len(members) == 1 else _union(members)
        return {**schema, "nullable": True} if type(None) in arguments else schema
    raise ValueError(
        f"{where} has type {hint}; allowed: str, int, float, bool, Any, Literal, list[...], dict[str, ...], unions"
    )


def _union(members: list[dict[str, Any]]) -> dict[str, Any]:
    if all(list(member) == ["type"] for member in members):
        return {"type": sorted(member["type"] for member in members)}
    return {"anyOf": members}


def _mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """Why ``value`` does not fit, or ""."""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        problems = [_mismatch(value, member, where) for member in schema["anyOf"]]
        return "" if "" in problems else problems[0]
    wanted = schema.get("type")
    allowed = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if allowed and not any(_is_kind(value, kind) for kind in allowed):
        return f"{where} must be {' or '.join(allowed)}, got {json_kind(value)} {json.dumps(value)[:80]}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, got {json.dumps(value)[:80]}"
    if isinstance(value, list) and "items" in schema:
        return next(filter(None, (_mismatch(item, schema["items"], f"an item of {where}") for item in value)), "")
    if isinstance(value, dict) and "additionalProperties" in schema:
        items = value.items()
        member = schema["additionalProperties"]
        return next(filter(None, (_mismatch(item, member, f"{key!r} of {where}") for key, item in items)), "")
    return ""


def _is_kind(value: Any, kind: str) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    if kind == "number":
        return not isinstance(value, bool) and isinstance(value, int | float)
    return json_kind(value) == kind


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and the description of each argument."""
    description: list[str] = []
    documented: dict[str, str] = {}
    section, indent, current = "", None, ""
    for line in docstring.splitlines():
        if header := _SECTION.match(line):
            section, indent = header[1], None
            continue
        if not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if entry:
                current = entry[1]
                documented[current] = entry[2].strip()
            elif current:
                documented[current] = f"{documented[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), {name: text for name, text in documented.items() if text}
