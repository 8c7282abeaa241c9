"""How harmony declares tools in the system and developer messages: as TypeScript, from JSON schemas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poise.harmony.messages import FunctionTool

# The built-in tools as the models were trained to see them: (description, functions).
BUILTIN_TOOLS: dict[str, tuple[str, tuple[FunctionTool, ...]]] = {
    "browser": (
        "Tool for browsing.\n"
        "The `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
        "Cite information from the tool using the following format:\n"
        "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
        "Do not quote more than 10 words directly from the tool output.\n"
        "sources=web (default: web)",
        (
            FunctionTool(
                name="search",
                description="Searches for information related to `query` and displays `topn` results.",
                parameters={
                    "type": "object",
                    "properties": {
                        "query": {"type": "string"},
                        "topn": {"type": "number", "default": 10},
                        "source": {"type": "string"},
                    },
                    "required": ["query"],
                },
            ),
            FunctionTool(
                name="open",
                description="Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, "
                "showing `num_lines` lines.\n"
                "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
                "If `cursor` is not provided, the most recent page is implied.\n"
                "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
                "If `loc` is not provided, the viewport will be positioned at the beginning of the document or "
                "centered on the most relevant passage, if available.\n"
                "Use this function without `id` to scroll to a new location of an opened page.",
                parameters={
                    "type": "object",
                    "properties": {
                        "id": {"type": ["number", "string"], "default": -1},
                        "cursor": {"type": "number", "default": -1},
                        "loc": {"type": "number", "default": -1},
                        "num_lines": {"type": "number", "default": -1},
                        "view_source": {"type": "boolean", "default": False},
                        "source": {"type": "string"},
                    },
                },
            ),
            FunctionTool(
                name="find",
                description="Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
                parameters={
                    "type": "object",
                    "properties": {"pattern": {"type": "string"}, "cursor": {"type": "number", "default": -1}},
                    "required": ["pattern"],
                },
            ),
        ),
    ),
    "python": (
        "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This "
        "tool should be used for internal reasoning, but not for code that is intended to be visible to the user "
        "(e.g. when creating plots, tables, or files).\n\n"
        "When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook "
        "environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive "
        "at '/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. "
        "Depends on the cluster.",
        (),
    ),
}


def builtin_section(names: Sequence[str]) -> str:
    """The tools section of a system message for built-in tools, in alphabetical order as harmony sorts them."""
    return "\n\n".join(["# Tools", *(_namespace(name, *BUILTIN_TOOLS[name]) for name in sorted(set(names)))])


def functions_section(tools: Sequence[FunctionTool]) -> str:
    """The tools section of a developer message: namespace ``functions``."""
    return "# Tools\n\n" + _namespace("functions", "", tools)


def _namespace(name: str, description: str, tools: Sequence[FunctionTool]) -> str:
    lines = [f"## {name}\n"]
    lines += [f"// {line}" if tools else line for line in _lines(description)]
    if tools:
        lines.append(f"namespace {name} {{\n")
        for tool in tools:
            lines += [f"// {line}" for line in _lines(tool.description)]
            arguments = "" if tool.parameters is None else f"_: {typescript(tool.parameters)}"
            lines.append(f"type {tool.name} = ({arguments}) => any;\n")
        lines.append(f"}} // namespace {name}")
    return "\n".join(lines)


def typescript(schema: Any, indent: str = "") -> str:
    """The TypeScript type that harmony writes for a JSON schema; what it does not know becomes ``any``.

    Harmony reads type, properties, required, items, enum (of strings), oneOf, nullable, title, description, examples
    and default; anyOf, allOf, $ref and bounds are not shown to the model.
    """
    variants = _items(schema, "oneOf")
    if variants is not None:
        return "".join(_variant(variant, indent, "\n", None, has_enum_quotes=True) for variant in variants)
    kind = _value(schema, "type")
    if isinstance(kind, list | tuple):
        names = ["number" if name == "integer" else name for name in kind if isinstance(name, str)]
        return " | ".join(names) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        items = _value(schema, "items", default=_ABSENT)
        return "Array<any>" if items is _ABSENT else f"{typescript(items, indent)}[]"
    if kind == "string":
        return " | ".join(f'"{v}"' for v in _items(schema, "enum") or () if isinstance(v, str)) or "string"
    return (
        {"number": "number", "integer": "number", "boolean": "boolean"}.get(kind, "any")
        if isinstance(kind, str)
        else "any"
    )


_ABSENT = object()


def _object(schema: Any, indent: str) -> str:
    description = _text(schema, "description")
    head = "" if description is None else f"{indent}// {description}\n"
    required = [name for name in _items(schema, "required") or () if isinstance(name, str)]
    properties = _value(schema, "properties")
    body = ""
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            body += _property(name if name in required else f"{name}?", value, indent)
    return f"{head}{{\n{body}{indent}}}"


def _property(name: str, schema: Any, indent: str) -> str:
    title, description = _text(schema, "title"), _text(schema, "description")
    has_one_of = _value(schema, "oneOf", default=_ABSENT) is not _ABSENT
    variants = _items(schema, "oneOf")
    out = "" if title is None else f"{indent}// {title}\n{indent}//\n"
    if description is not None and not has_one_of:
        out += f"{indent}// {description}\n"
    examples = _items(schema, "examples")
    if examples:
        out += f"{indent}// Examples:\n"
        out += "".join(f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str))
    if variants is None:
        default = None if has_one_of else _default(schema)
        comment = "" if default is None else f" // {default}"
        return out + f"{indent}{name}: {_nullable(schema, typescript(schema, indent + '    '))},{comment}\n"

    # The first variant may carry the description of the property: it is then told once.
    is_above = description is not None and not (variants and _text(variants[0], "description") == description)
    if is_above:
        out += f"{indent}// {description}\n"
    default = _default(schema)
    if default is not None:
        out += f"{indent}// {default}\n"
    out += f"{indent}{name}:\n"
    for i, variant in enumerate(variants):
        told = _text(variant, "description") if i == 0 and is_above else description
        out += _variant(variant, indent, "", told) + "\n"
    return out + f"{indent},\n"


def _variant(schema: Any, indent: str, before: str, told: str | None, has_enum_quotes: bool = False) -> str:
    """One alternative of a oneOf, its description (unless already ``told``) and default behind it."""
    line = f"{before}{indent} | " + _nullable(schema, typescript(schema, indent + "   "))
    description = _text(schema, "description")
    default = _default(schema, has_enum_quotes)
    comments = [text for text in (None if description == told else description, default) if text is not None]
    return f"{line} // {' '.join(comments)}" if comments else line


def _nullable(schema: Any, type_text: str) -> str:
    return f"{type_text} | null" if _value(schema, "nullable") is True and "null" not in type_text else type_text


def _default(schema: Any, has_enum_quotes: bool = False) -> str | None:
    default = _value(schema, "default", default=_ABSENT)
    if default is _ABSENT:
        return None
    if not isinstance(default, str):
        return f"default: {_json(default)}"
    if not _items(schema, "enum"):
        return f'default: "{default}"'
    return f"default: {_json(default)}" if has_enum_quotes else f"default: {default}"


def _json(value: Any) -> str:
    """Compact JSON as Rust's serde_json writes it; floats differ from Python's in their exponents."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(k))}:{_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, float) and value and 1e-5 <= abs(value) < 1e-4:
        mantissa, _, _ = repr(value).partition("e")  # serde_json begins exponents one decade later
        sign, digits = ("-" if value < 0 else ""), mantissa.lstrip("-").replace(".", "")
        return f"{sign}0.0000{digits}"
    if isinstance(value, float):
        return repr(value).replace("e+", "e").replace("e-0", "e-")
    return json.dumps(value, ensure_ascii=False)


def _lines(text: str) -> list[str]:
    """Lines end with a line feed, or a carriage return and a line feed; nothing else splits (as in Rust)."""
    *ended, last = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def _value(schema: Any, key: str, default: Any = None) -> Any:
    return schema.get(key, default) if isinstance(schema, Mapping) else default


def _text(schema: Any, key: str) -> str | None:
    value = _value(schema, key)
    return value if isinstance(value, str) else None


def _items(schema: Any, key: str) -> Sequence[Any] | None:
    value = _value(schema, key)
    return value if isinstance(value, list | tuple) else None
