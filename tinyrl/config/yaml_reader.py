"""YAML as plain settings: names, text, numbers, booleans, null and lists, with the place of every key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from tinyrl.text import shortened

MAX_DIGITS = 18  # of a whole number
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 5e-5 is a number (YAML 1.1 wants 5.0e-5), and dates are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in ("int", "float", "bool", "null")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of them would fill the memory
            event = self.peek_event()
            what = f"*{event.anchor}: a recipe has no aliases, write the value itself"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
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

    def note(node: yaml.Node, path: str) -> None:
        """Note the place of each key below a node."""
        if isinstance(node, yaml.SequenceNode):
            for index, inner in enumerate(node.value):
                places[f"{path}{index}"] = where(inner.start_mark.line + 1)
                note(inner, f"{path}{index}.")
        elif isinstance(node, yaml.MappingNode):
            for key_node, inner in node.value:
                key = f"{path}{key_node.value}"
                if key in places:
                    what = f"duplicate key `{shortened(key)}` (first defined at {places[key]})"
                    raise yaml.MarkedYAMLError(problem=what, problem_mark=key_node.start_mark)
                places[key] = where(key_node.start_mark.line + 1)
                note(inner, f"{key}.")
        elif node.tag == f"{_TAG}int" and len(node.value.lstrip("+-")) > MAX_DIGITS:
            what = f"the number {shortened(node.value)} has more than {MAX_DIGITS} digits"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)

    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, places
        note(node, "")
        return loader.construct_document(node), places
    except RecursionError:
        raise ValueError(f"{where(None)}: broken YAML: nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # no number, such as 0b_
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem, lines = getattr(error, "problem", None) or str(error).splitlines()[0], text.splitlines()
        near = f", near '{shortened(lines[mark.line].strip())}'" if mark and mark.line < len(lines) else ""
        raise ValueError(f"{where(mark.line + 1 if mark else None)}: broken YAML: {problem}{near}") from error


def dump_plain(values: dict[str, Any]) -> str:
    """YAML that `parse_plain` reads back as the same values, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
