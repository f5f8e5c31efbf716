"""Arguments for a tool that is tried without a model: examples of its docstring, values of the row's columns, and, when
those do not work, invented ones.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyrl.data.readers import Row

FIRST_WORDS = 8
LONGEST = 200  # characters of a column's text that may be an argument
INVENTED: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "object": {}, "array": [], "null": None}
PYTHON: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
}  # fmt: skip
# such as "3 + 4"; e.g. 2024-05-01; for example `Bern`
INTRODUCED = r"(?:\bsuch as|\be\.g\.|\bfor example|\bfor instance|\bexample:)[,:]?\s+"
EXAMPLE = re.compile(rf"{INTRODUCED}(?:([\"'`])(.+?)\1|([^\s,;)]+))", re.IGNORECASE)


@dataclass(frozen=True)
class ToolCalls:
    """A turn for each row that calls a tool; is_invented: an argument is neither an example nor the row's own."""

    turns: list[str]
    is_invented: bool


def calls_of_tool(schema: dict[str, Any], rows: list[Row], questions: list[str]) -> Iterator[ToolCalls]:
    """Yield calls of a tool for each row. Arguments are the examples of its docstring, else the row's columns of their
    names. Where a parameter has neither, calls with invented arguments follow: texts are the question's first words, or
    another column.
    """
    function = schema["function"]
    parameters = function.get("parameters", {})
    required = parameters.get("required", [])
    examples = examples_of(function)
    for guess in ("", *text_columns(rows[0], without=required)):
        turns = list[str]()
        is_invented = False
        for row, question in zip(rows, questions, strict=True):
            arguments: dict[str, Any] = {}
            for name in required:
                kind = parameters["properties"][name]
                named = fitting(kind, [examples.get(name), row.get(name)])
                guessed = fitting(kind, [row.get(guess)])
                is_invented = is_invented or not named
                arguments[name] = [*named, *guessed, invented(kind, question)][0]
            turns.append(call_text(function["name"], arguments))
        yield ToolCalls(turns, is_invented)
        if not is_invented:
            return


def fitting(kind: dict[str, Any], values: list[Any]) -> list[Any]:
    """Return those of the values that a parameter may have; of an enumeration its first."""
    if "enum" in kind:
        return [kind["enum"][0]]
    return [value for value in values if value is not None and fits(kind, value)]


def fits(kind: dict[str, Any], value: Any) -> bool:
    """Return whether a value has the parameter's type."""
    types = kind.get("type", "string")
    wanted = [types] if isinstance(types, str) else types
    if isinstance(value, bool):
        return "boolean" in wanted
    return any(isinstance(value, PYTHON[name]) for name in wanted if name in PYTHON)


def invented(kind: dict[str, Any], question: str) -> Any:
    """Return a value of the parameter's type: of a text the question's first words."""
    types = kind.get("type", "string")
    return INVENTED.get(types if isinstance(types, str) else types[0], first_words(question))


def first_words(question: str) -> str:
    """Return the first words of a question's last line."""
    return " ".join(question.strip().rpartition("\n")[2].split()[:FIRST_WORDS])


def text_columns(row: Row, *, without: list[str]) -> list[str]:
    """Return the columns of short texts, which a parameter of another name may mean."""
    names = [name for name in row if name != "prompt" and name not in without]
    return [name for name in names if isinstance(row[name], str) and 0 < len(row[name]) <= LONGEST]


def examples_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the example of each parameter that a tool's docstring gives: in a call such as name("3 + 4"), or behind
    "such as", "e.g.", "for example" in the parameter's line.
    """
    properties = function.get("parameters", {}).get("properties", {})
    texts = [str(function.get("description", "")), *(str(kind.get("description", "")) for kind in properties.values())]
    found = example_call(function["name"], [*properties], "\n".join(texts))
    for name, kind in properties.items():
        match = EXAMPLE.search(str(kind.get("description", "")))
        if name not in found and match is not None:
            found[name] = typed(kind, match[2] or match[3].rstrip("."))
    return found


def example_call(tool: str, names: list[str], text: str) -> dict[str, Any]:
    """Return the arguments of the first call of a tool in a text that Python can read; {} without one."""
    for match in re.finditer(rf"\b{re.escape(tool)}\([^\n]*?\)", text):
        try:
            call = ast.parse(match.group(), mode="eval").body
            assert isinstance(call, ast.Call)
            positional = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
            named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        except (SyntaxError, ValueError):  # not Python, or not values
            continue
        if positional or named:
            return {**positional, **named}
    return {}


def typed(kind: dict[str, Any], text: str) -> Any:
    """Return an example as a value of its parameter: a text as it is, others as JSON; None for what is none."""
    if kind.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return None


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Write a tool call as Hermes' form has it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=str)
    return f"<tool_call>\n{call}\n</tool_call>"
