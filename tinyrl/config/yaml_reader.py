"""YAML as plain settings: one document of names, text, numbers, booleans, null and lists, with the place of every key.

What YAML can do besides (aliases, dates, tags) is refused with its line number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError

from tinyrl.text import shortened

MAX_DEPTH = 8
MAX_DIGITS, MAX_HEX = 18, len("0x") + 14  # of a whole number: 14 hex digits have fewer than 18 when written in decimal

_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null", "seq", "map"}
_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 5e-5 is a number (YAML 1.1 wants 5.0e-5)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ComposerError(
                None, None, f"*{event.anchor}: a recipe has no aliases, write the value itself", event.start_mark
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text that looks like 5e-5 is quoted, and nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quoted with escapes where YAML would take a character (U+0085, U+2028) for a line break or drop it."""
    style = None if text.replace("\n", "").isprintable() else '"'
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


KeyPath = tuple[str | int, ...]  # of a setting: ("reward", "functions", 0, "use")


@dataclass
class Source:
    """Settings as the user wrote them: nested values, and the place of each dotted key (`reward.functions.0.use`)."""

    name: str
    values: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """The place of the deepest part of `path` that somebody wrote."""
        for length in range(len(path), 0, -1):
            key = ".".join(map(str, path[:length]))
            inside = (place for name, place in self.places.items() if name.startswith(f"{key}."))
            found = self.places.get(key) or next(inside, None)
            if found:
                return found
        return self.name

    def value(self, path: KeyPath) -> Any:
        found: Any = self.values
        for part in path:
            inside: Any = dict(enumerate(found)) if isinstance(found, list) else found
            found = inside.get(part) if isinstance(inside, dict) else None
        return found


Where = Callable[[int | None], str]  # names a line of the text, counted from 1; None: all of it


def parse_plain(text: str, where: Where) -> tuple[Any, dict[str, str]]:
    """The value of one YAML document, and the place of every key in it."""
    places: dict[str, str] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ValueError(_broken(error, text, where)) from error
    except RecursionError:
        raise ValueError(f"{where(None)}: broken YAML: nested too deep") from None
    if node is None:
        return None, places
    _check(node, (), where, places, loader)
    try:
        return loader.construct_document(node), places
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(_broken(error, text, where)) from error


def _broken(error: Exception, text: str, where: Where) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = getattr(error, "position", None)  # of a character that no YAML file may hold
    line = mark.line if mark else None if position is None else text.count("\n", 0, position)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    lines = text.splitlines()
    near = f", near '{shortened(lines[line].strip())}'" if line is not None and line < len(lines) else ""
    hints = {"'\\t'": "; indent with spaces, not with tabs", "mapping values": "; put text with a colon in quotes"}
    hint = next((hint for part, hint in hints.items() if part in problem), "")
    return f"{where(None if line is None else line + 1)}: broken YAML: {problem}{hint}{near}"


def _check(node: yaml.Node, path: KeyPath, where: Where, places: dict[str, str], loader: _Loader) -> None:
    """Refuse what is not a plain setting, and note the place of each key."""
    place = where(node.start_mark.line + 1)
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{place}: nested too deep")
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    tag = node.tag.removeprefix(_TAG)
    if tag not in _PLAIN or node.tag != loader.resolve(type(node), node.value, (plain, not plain)):
        what = {"timestamp": "a date", "value": "a YAML sign", "merge": "a YAML sign"}.get(tag)
        shown = shortened(repr(node.value)) if isinstance(node, yaml.ScalarNode) else f"the tag {shortened(tag)}"
        what = what or f"marked as '{shortened(tag)}'"
        raise ValueError(f"{place}: {shown} is {what}; put text in quotes")
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            places[".".join(map(str, (*path, index)))] = where(inner.start_mark.line + 1)
            _check(inner, (*path, index), where, places, loader)
    elif isinstance(node, yaml.MappingNode):
        for key_node, inner in node.value:
            _check_key(key_node, path, where, places)
            _check(inner, (*path, key_node.value), where, places, loader)
    elif tag == "int" and len(node.value.lstrip("+-")) > (MAX_HEX if "x" in node.value else MAX_DIGITS):
        raise ValueError(f"{place}: the number {shortened(node.value)} has more than {MAX_DIGITS} digits")
    elif any("\ud800" <= character <= "\udfff" for character in node.value):
        raise ValueError(f"{place}: invalid Unicode (lone surrogate) in {shortened(repr(node.value))}")


def _check_key(node: yaml.Node, path: KeyPath, where: Where, places: dict[str, str]) -> None:
    place, tag = where(node.start_mark.line + 1), node.tag.removeprefix(_TAG)
    if not isinstance(node, yaml.ScalarNode) or tag != "str":
        shown = shortened(repr(node.value)) if isinstance(node, yaml.ScalarNode) else "this one"
        raise ValueError(f"{place}: a key is a name, and {shown} is read as {tag}; put it in quotes")
    key = ".".join(map(str, (*path, node.value)))
    if key in places:
        raise ValueError(f"{place}: `{shortened(key)}` stands twice (first at {places[key]})")
    places[key] = place


def dump_plain(values: dict[str, Any]) -> str:
    """YAML that `parse_plain` reads back as the same values, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
