"""The description of a tool that chat templates read: a JSON schema from a function's type hints and its docstring.

    def weather(city: str, unit: str = "C") -> str:
        \"\"\"What the weather is like.

        Args:
            city: Where.
            unit: Of the temperature (choices: ["C", "F"])
        \"\"\"

The result is that of transformers.utils.get_json_schema (5.x), which takes seconds to import and torch with it; a
worker imports this. One deviation: choices must be a JSON list (tests/environments/test_tool_schema.py).
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union

Schema = dict[str, Any]

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
CONTAINERS = {list: "array", tuple: "array", dict: "object"}
OF_LIBRARIES = {"PIL.Image.Image": "image", "torch.Tensor": "audio"}  # by name, so that they need no import

SECTION = re.compile(r"Args:|Returns:|Raises:")
ARGS = re.compile(r"\n\s*Args:\n(.*?)(?:Returns:|Raises:|\Z)", re.DOTALL)
ARGUMENT = re.compile(r"([ \t]*)(\w+):(.*)", re.DOTALL)
RETURNS = re.compile(r"\n\s*Returns:\n(.*?)(?:Raises:|\Z)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def schema_of(function: Callable[..., Any]) -> Schema:
    """Return {"type": "function", "function": {"name", "description", "parameters", "return"}}; `return` only with a
    hint that JSON schema can express.

    Raises ValueError that says what is missing: a docstring, a line of it for a parameter, a type hint; or what cannot
    be written as JSON schema. Raises what evaluating the hints raises.
    """
    docstring = _parsed(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    for each in parameters:
        if each.annotation is each.empty:
            raise ValueError(f"the parameter '{each.name}' has no type hint")
    properties = {name: _property(name, hint, docstring) for name, hint in hints.items() if name != "return"}
    described: Schema = {"type": "object", "properties": properties}
    required = [each.name for each in parameters if each.default is each.empty]
    if required:
        described["required"] = required
    found: Schema = {"name": function.__name__, "description": docstring.description, "parameters": described}
    returned = _returned(hints, docstring)
    if returned is not None:
        found["return"] = returned
    return {"type": "function", "function": found}


def _property(name: str, hint: Any, docstring: _Docstring) -> Schema:
    """Return the schema of a parameter: its type, the choices of its text, and that text."""
    try:
        found = type_schema(hint)
    except ValueError as error:
        raise ValueError(f"the parameter '{name}' {error}") from None
    text = docstring.arguments.get(name)
    if text is None:
        raise ValueError(f"the docstring has no line `{name}: ...` under `Args:`")
    choices = CHOICES.search(text)
    if choices is not None:
        found["enum"] = _choices(name, choices[1])
        text = text[: choices.start()].strip()
    found["description"] = text
    return found


def _choices(name: str, written: str) -> list[Any]:
    """Parse what stands after `choices:` in the text of a parameter."""
    try:
        values = json.loads(written)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise ValueError(f'the choices of \'{name}\' must be a list in JSON, such as (choices: ["a", "b"])')
    return [value.strip() if isinstance(value, str) else value for value in values]


def _returned(hints: dict[str, Any], docstring: _Docstring) -> Schema | None:
    """Return the schema of the result, which no call gives: a hint that has none is left out."""
    if "return" not in hints:
        return None
    try:
        found = type_schema(hints["return"])
    except ValueError:
        return None
    if docstring.returns is not None:
        found["description"] = docstring.returns
    return found


# ---- docstrings ----


@dataclass(frozen=True)
class _Docstring:
    description: str
    arguments: dict[str, str]
    returns: str | None


def _parsed(text: str) -> _Docstring:
    """Parse a docstring in Google's style. A section ends where the next one begins; an empty docstring is refused."""
    text = text.strip()
    if not text:
        raise ValueError("it has no docstring")
    arguments = ARGS.search(text)
    returns = RETURNS.search(text)
    return _Docstring(
        description=SECTION.split(text, maxsplit=1)[0].strip(),
        arguments={} if arguments is None else dict(_arguments_in(arguments[1])),
        returns=None if returns is None else returns[1].strip(),
    )


def _arguments_in(section: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each `name: text`. Its text goes on until a `name:` that is not indented deeper."""
    lines = [line for line in section.split("\n") if line.strip()]
    while lines:
        entry = ARGUMENT.match(lines.pop(0))
        if entry is None:
            continue
        indent, name, start = entry.groups()
        texts = [start.strip()] if start.strip() else []
        while lines and (not texts or _goes_on(lines[0], indent)):
            texts.append(lines.pop(0).strip())
        yield name, " ".join(texts)


def _goes_on(line: str, indent: str) -> bool:
    """Return whether a line belongs to the text of an argument with this indentation."""
    deeper = line.startswith((f"{indent} ", f"{indent}\t"))
    return deeper or ARGUMENT.match(line) is None


# ---- type hints ----


def type_schema(hint: Any) -> Schema:
    """Return the JSON schema of a type hint. Raises ValueError, about "the parameter", for one that has none."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is None:
        return _enum(hint) if isinstance(hint, type) and issubclass(hint, Enum) else _plain(hint)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _one_of(list(arguments), of="its Literal")
    if origin is tuple:
        return _tuple(arguments)
    if origin is list:
        return {"type": "array"} if not arguments else {"type": "array", "items": type_schema(arguments[0])}
    if origin is dict:
        values = {"additionalProperties": type_schema(arguments[1])} if arguments else {}
        return {"type": "object", **values}
    raise ValueError(f"has the type {_shown(hint)}, which JSON schema cannot express")


def _plain(hint: Any) -> Schema:
    """Return the schema of a type without arguments."""
    if hint is Any:
        return {}
    known: dict[Any, str] = SCALARS | CONTAINERS
    name = known.get(hint) or OF_LIBRARIES.get(_shown(hint))
    if name is None:
        raise ValueError(
            f"has the type {_shown(hint)}; a call can give str, int, float, bool, None, an Enum, a Literal, and list, "
            "tuple, dict and Union of these"
        )
    return {"type": name}


def _enum(found: type[Enum]) -> Schema:
    values = [member.value for member in found]
    if not values:
        raise ValueError(f"has the type {_shown(found)}, an Enum without members")
    return _one_of(values, of=_shown(found))


def _one_of(values: list[Any], *, of: str) -> Schema:
    """Return the schema of these values; its type lists the type of each once."""
    for value in values:
        if type(value) not in SCALARS:
            raise ValueError(f"may be {value!r} ({of}), which is not a str, int, float, bool or None")
    names = [*dict.fromkeys(SCALARS[type(value)] for value in values)]
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(members: tuple[Any, ...]) -> Schema:
    """Return the schema of a union. None among its members makes it nullable; plain types become a list of names, and
    others, which say more than a name, `anyOf`.
    """
    schemas = [type_schema(member) for member in members if member is not type(None)]
    are_names = all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas)
    if len(schemas) == 1:
        [found] = schemas
    elif are_names:
        names = sorted({schema["type"] for schema in schemas})
        found: Schema = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": schemas}
    if type(None) in members:
        found["nullable"] = True
    return found


def _tuple(members: tuple[Any, ...]) -> Schema:
    """Return the schema of a tuple of known length; others are lists."""
    if not members:
        return {"type": "array"}
    if len(members) == 1 or ... in members:
        raise ValueError("is a tuple of one member or of any length; write list[...]")
    return {"type": "array", "prefixItems": [type_schema(member) for member in members]}


def _shown(hint: Any) -> str:
    """Return a type's name with its module, or the text of another hint."""
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else str(hint)
