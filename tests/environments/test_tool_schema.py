"""Descriptions of tools: those of transformers for all that it describes, and what is refused."""

# ruff: noqa: UP006, UP007, UP035, UP045  hints as people write them

import enum
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Dict, List, Literal, Optional, Union

import pytest
import torch
from PIL.Image import Image
from transformers.utils.chat_template_utils import get_json_schema

from tinyrl.environments.tool_schema import schema_of


class Color(enum.Enum):
    RED = "red"
    NONE = None


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Nothing(enum.Enum):
    pass


class Place(enum.Enum):
    HERE = (1, 2)


class Own:
    pass


TEXT = "Look.\n\nArgs:\n    it: What.\n"


def with_hint(hint: Any, returned: Any = None) -> Callable[..., Any]:
    def look(it, also: int = 1):
        pass

    look.__annotations__ = {"it": hint, "also": int, "return": returned}
    look.__doc__ = f"{TEXT}    also: Another.\n\nReturns:\n    What is there."
    return look


def with_text(text: str) -> Callable[..., Any]:
    def look(it: int) -> None:
        pass

    look.__doc__ = text
    return look


HINTS = [
    int, float, str, bool, None, Any, list, tuple, dict, List, Dict, "int | None", Image, torch.Tensor,
    list[int], List["str"], list[list[bool]], dict[str, int], Dict[str, Any], dict[int, list[str]],
    tuple[int, str], tuple[list[int], str | None], tuple[()],
    Optional[int], int | None, Union[int, str], str | int | bool, list | tuple, int | list[str], Any | None,
    int | None | list[int], Literal["a"], Literal["a", 1, None, True], Literal["a", "b"] | None, int | Literal["a"],
    Color, Level, Color | None, list[Level], Annotated[int, "seconds"], list[Annotated[str, 1]],
]  # fmt: skip
REFUSED_HINTS = [
    Own, bytes, set[int], Sequence[int], object, Nothing, Place, tuple[int], tuple[int, ...], Literal[b"x"],
    Literal[Level.LOW], list[Own], dict[str, Own], int | Own, Union, Callable[[int], int],
]  # fmt: skip
TEXTS = [
    TEXT,
    "Args: are not a section here.\n\nArgs:\n    it: What.",
    "Look.\n\n  And more.\n\nArgs:\n    it: What,\n        and more of it.\n\n        Still.\n\nReturns:\n    That.",
    "Look.\n\nArgs:\n    it:\n        What.\n    other: Of no parameter.",
    "Look.\n\nArgs:\n    it: What,\n      deeper: it goes on\n    it goes on here too\nReturns: in the line",
    "Look.\n\nArgs:\n    no argument (int)\n    it: What.\n    it: Again.\nRaises:\n    ValueError: never",
    "Look.\n\nArgs:\n\tit: What.\nReturns:\n\tThat.\n\nRaises:\n\tNothing: at all",
    'Look.\n\nArgs:\n    it: What (choices: ["a", " b ", 1, null])',
    'Look.\n\nArgs:\n    it: What\n        of these (Choices:\n        ["a"] )\n',
    "Look.\n\nArgs:\n    it: What (choices: [1]) of these",
    "Look.\n\nArgs:\n    it: ü\u00a0\u2028ß",
    "Look.\n\nReturns:\n\nArgs:\n    it: What.",
]
REFUSED_TEXTS = [
    "", "   \n", "Look.", "Args:\n    it: What.", "Look.\n\nArgs:\n    its: What.",
    "Look.\n\nArgs:\n    it (int): What.",
    "Look.\n\nArgs: \n    it: What.", "Look.\n\nArgs:\n    it: What (choices: a, b)",
]  # fmt: skip


def transformers_schema(tool: Callable[..., Any]) -> str | None:
    """Return what the library makes of a tool, with the order of its keys; None if it refuses the tool."""
    try:
        return json.dumps(get_json_schema(tool))
    except Exception:  # noqa: BLE001  of several kinds
        return None


def test_a_tool_is_described_as_by_transformers() -> None:
    for tool in [*map(with_hint, HINTS), *map(with_text, TEXTS)]:
        assert json.dumps(schema_of(tool)) == transformers_schema(tool), (tool.__annotations__, tool.__doc__)


def test_a_result_is_described_as_by_transformers() -> None:
    """A hint that a parameter may not have is left out there."""
    for hint in HINTS + REFUSED_HINTS:
        tool = with_hint(int, returned=hint)
        assert json.dumps(schema_of(tool)) == transformers_schema(tool), hint


def test_what_transformers_refuses_is_refused() -> None:
    for tool in [*map(with_hint, REFUSED_HINTS), *map(with_text, REFUSED_TEXTS)]:
        assert transformers_schema(tool) is None
        with pytest.raises(ValueError, match=r"docstring|'it'"):
            schema_of(tool)


def test_a_description_is_that_of_the_docstring_and_the_hints() -> None:
    def weather(city: str, unit: str | None = None, days: list[int] | None = None) -> dict[str, float]:
        """What the weather is like.

        Args:
            city: Where, and
                when.
            unit: Of the temperature (choices: ["C", "F"])
            days: From today.

        Returns:
            Numbers by name.
        """
        raise NotImplementedError

    assert schema_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the weather is like.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, and when."},
                    "unit": {
                        "type": "string",
                        "nullable": True,
                        "enum": ["C", "F"],
                        "description": "Of the temperature",
                    },
                    "days": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "nullable": True,
                        "description": "From today.",
                    },
                },
                "required": ["city"],
            },
            "return": {
                "type": "object",
                "additionalProperties": {"type": "number"},
                "description": "Numbers by name.",
            },
        },
    }


def test_a_parameter_without_a_hint_is_refused_with_its_name() -> None:
    def look(place: str, time) -> None:
        """Look.

        Args:
            place: Where.
            time: When.
        """

    with pytest.raises(ValueError, match="'time'"):
        schema_of(look)


@pytest.mark.parametrize("written", ['"ab"', '{"a": 1}', "1"])
def test_choices_that_are_no_list_are_refused_unlike_in_transformers(written: str) -> None:
    with pytest.raises(ValueError, match="choices of 'it'"):
        schema_of(with_text(f"Look.\n\nArgs:\n    it: What (choices: {written})"))
