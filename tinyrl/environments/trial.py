"""Scripted turns, with which an environment is tried without a model."""

from __future__ import annotations

import json
from typing import Any

from tinyrl.environments.environment import kind_of_ours

NONSENSE = "qzx vvk # ~~ jjq"
UNKNOWN_TOOL = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'
NOT_JSON = '<tool_call>\n{"name": "no_such_tool", "arguments": {\n</tool_call>'
FIRST_WORDS = 8
SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "object": {}, "null": None}

Schema = dict[str, Any]


def asking_turn(built_in: str | None, schemas: list[Schema] | None, question: str) -> str | None:
    """Return a turn that an environment should answer: a search for the first words of the question, a cell of Python,
    or a call of the first tool. None where nothing is known of what it takes.
    """
    if built_in is not None:
        return kind_of_ours(built_in).asking_turn(first_words(question))
    return tool_call(schemas[0], question) if schemas else None


def tool_call(schema: Schema, question: str) -> str:
    """Call a tool with an argument for each parameter that it requires; texts are the question's first words."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    known = parameters.get("properties", {})
    arguments = {name: _sample(known.get(name, {}), question) for name in parameters.get("required", [])}
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def first_words(question: str) -> str:
    """Return the first words of a question, as a query; of several lines those of the last that has any."""
    lines = [line for line in question.splitlines() if line.strip()]
    return " ".join((lines[-1] if lines else "").split()[:FIRST_WORDS])


def _sample(schema: Schema, question: str) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "array":
        return [_sample(schema.get("items", {}), question)]
    return SAMPLES[kind] if kind in SAMPLES else first_words(question)
