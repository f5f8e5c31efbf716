"""Arguments with which a tool is tried: its docstring's examples, the row's columns, then invented ones."""

import json
from typing import Any

import pytest

from tinyrl.tools.check.tool_arguments import calls_of_tool, examples_of

ROWS = [
    {"prompt": "How many letters?\nIn the word cat", "word": "cat", "count": 3},
    {"prompt": "?", "word": "ox", "count": 2},
]


def schema(description: str = "Do.", required: list[str] | None = None, **parameters: Any) -> dict[str, Any]:
    shape = {"type": "object", "properties": parameters, "required": [*parameters] if required is None else required}
    return {"type": "function", "function": {"name": "tool", "description": description, "parameters": shape}}


def text(description: str = "It.") -> dict[str, Any]:
    return {"type": "string", "description": description}


def tried(of: dict[str, Any]) -> list[tuple[list[dict[str, Any]], bool]]:
    """The arguments for each row of each attempt, and whether some are invented."""
    found = []
    for calls in calls_of_tool(of, ROWS, [str(row["prompt"]) for row in ROWS]):
        turns = [turn.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for turn in calls.turns]
        found.append(([json.loads(turn)["arguments"] for turn in turns], calls.is_invented))
    return found


@pytest.mark.parametrize(
    ("description", "example"),
    [
        ('An expression, such as "3 + 4".', "3 + 4"),
        ("A day, e.g. 2024-05-01, in UTC.", "2024-05-01"),
        ("A city (for example `Bern`)", "Bern"),
        ("A city. Example: Bern", "Bern"),
        ("A city.", None),
    ],
)
def test_an_example_is_read_from_the_line_of_a_parameter(description: str, example: str | None) -> None:
    assert examples_of(schema(place=text(description))["function"]).get("place") == example


def test_an_example_is_read_from_a_call_in_the_docstring() -> None:
    of = schema('Look, as in tool("Bern", days=2).', place=text(), days={"type": "integer", "description": "Days."})
    assert examples_of(of["function"]) == {"place": "Bern", "days": 2}


def test_a_call_that_holds_no_values_is_no_example() -> None:
    assert examples_of(schema("Look, as in tool(place).", place=text())["function"]) == {}


def test_an_example_of_a_number_is_a_number() -> None:
    of = schema(days={"type": "integer", "description": "Days, such as 7."})
    assert tried(of) == [([{"days": 7}, {"days": 7}], False)]


def test_the_columns_of_a_parameters_name_are_its_values_in_each_row() -> None:
    of = schema(word=text(), count={"type": "integer", "description": "It."})
    assert tried(of) == [([{"word": "cat", "count": 3}, {"word": "ox", "count": 2}], False)]


def test_a_column_of_another_type_is_no_value() -> None:
    [first, *_] = tried(schema(count=text()))
    assert first == ([{"count": "In the word cat"}, {"count": "?"}], True)


def test_an_enumeration_gives_its_first() -> None:
    assert tried(schema(unit={"enum": ["metric", "imperial"], "description": "It."}))[0][0][0] == {"unit": "metric"}


def test_a_parameter_with_a_default_is_left_out() -> None:
    assert tried(schema(required=[], place=text())) == [([{}, {}], False)]


def test_an_unknown_text_is_the_question_and_then_another_column() -> None:
    of = schema(place=text())
    assert tried(of) == [
        ([{"place": "In the word cat"}, {"place": "?"}], True),
        ([{"place": "cat"}, {"place": "ox"}], True),
    ]
