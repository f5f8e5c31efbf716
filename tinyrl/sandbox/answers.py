"""Extraction of a completion's program, and comparison of what one answered. Runs no code."""

import math
from typing import Any

TOLERANCE = 1e-9  # between numbers of which one is a float, relative to the larger
NEAR_ZERO = 1e-12  # where exactly 0 is expected, to which nothing is relatively close


def python_block(text: str) -> str | None:
    """The contents of the last complete ```python block of a text (```py will do), or None if there is none."""
    found, lines = None, None
    for line in text.split("\n"):
        fence = line.strip().lower()
        if lines is None:
            lines = [] if fence in ("```python", "```py", "```python3") else None
        elif fence == "```":
            found, lines = "\n".join(lines), None
        else:
            lines.append(line.rstrip("\r"))
    return found


def same_output(printed: str, expected: str) -> bool:
    """Whether two texts are equal line by line; a run of blanks counts as one, and those at the ends do not count."""
    return _words(printed) == _words(expected)


def same_value(returned: Any, expected: Any) -> bool:
    """Whether two JSON values are the same. True is not 1; 1 is 1.0; floats may differ by TOLERANCE."""
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[key], expected[key]) for key in returned)
    kinds = {type(returned), type(expected)}
    if kinds <= {int, float}:
        return returned == expected or (float in kinds and _close(returned, expected))
    return len(kinds) == 1 and returned == expected


def _close(returned: Any, expected: Any) -> bool:
    try:
        return math.isclose(returned, expected, rel_tol=TOLERANCE, abs_tol=0.0 if expected else NEAR_ZERO)
    except OverflowError:  # an int that no float can be near
        return False


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]
