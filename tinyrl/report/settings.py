"""Nested settings as rows of a table, and what differs between those of several runs."""

import reprlib
from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import Any

from tinyrl.report.markup import text_html
from tinyrl.text import excerpt, one_line

MOST_SETTINGS = 1000


def flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested settings as ("section.key", value) pairs."""
    if isinstance(value, dict) and value and depth < 6:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        plain = {None: "null", True: "true", False: "false"}
        shown = plain[value] if value is None or isinstance(value, bool) else value
        yield prefix, shown if isinstance(shown, str) else _literal(shown)


def _literal(value: Any) -> str:
    short = reprlib.Repr()  # bounded, also for a list that holds itself
    short.maxlist = short.maxdict = 40
    short.maxstring = short.maxother = 400
    return short.repr(value)


def differing(configs: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """The settings that are not the same in all of them, with the value in each, None where one has no such setting."""
    each = [dict(islice(flat(config), MOST_SETTINGS)) for config in configs]
    keys = dict.fromkeys(key for known in each for key in known)  # in the order of the files
    found = {key: [known.get(key) for known in each] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def settings_html(title: str, values: dict[str, Any]) -> str:
    """All of them, folded away."""
    pairs = list(islice(flat(values), MOST_SETTINGS))
    if not pairs:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one_line(key, 80))}</td><td>{text_html(excerpt(value, 400, lines=8))}</td></tr>\n"
        for key, value in pairs
    )
    table = f'<table class="settings"><tbody>\n{rows}</tbody></table>'
    return f"<details><summary>{title}</summary><div>{table}</div></details>"
