"""YAML as plain settings: names, text, numbers, booleans, null and lists.

Numbers and truth values are those of YAML 1.2 (its core schema): 010 is 10, 1:30 and yes are text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tinyrl.text import truncate

_TAG = "tag:yaml.org,2002:"
_CORE = (  # (type, pattern, first characters); of a text that fits two patterns the first counts
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)
_BREAKS = {0x85: r"\N", 0x2028: r"\L", 0x2029: r"\P"}  # line breaks of YAML that a plain text must not hold


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 5e-5 is a number (YAML 1.1 wants 5.0e-5), dates are text, a key is there once."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  those of _CORE, below

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of them would fill the memory
            raise yaml.MarkedYAMLError(problem="a recipe has no aliases", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                problem = f"duplicate key `{truncate(name)}` (first on line {seen[name]})"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[name] = key.start_mark.line + 1
        return node

    def construct_core_int(self, node: Any) -> int:
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader` reads, and no aliases: text that another value is written as (5e-5, yes) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        has_break = any(chr(code) in text for code in _BREAKS)
        return self.represent_scalar(f"{_TAG}str", text, style='"' if has_break else None)


for _kind in (_Loader, _Dumper):
    for _name, _pattern, _first in _CORE:
        _kind.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_core_int)
_Dumper.add_representer(str, _Dumper.represent_text)


def parse_plain(text: str, source: str) -> Any:
    """Parse one YAML document. Raises ValueError with the source and the line."""
    return parse_with_lines(text, source)[0]


def parse_inline(text: str, source: str) -> Any:
    """Parse a value that was typed on a command line. Raises ValueError, naming the `#`, where a comment leaves out a
    part of a text, or the end of a list. Behind a number or a whole list it is a comment.
    """
    comment = _comment_in(text)
    cut = ""
    if comment is not None:
        cut = f"`#` begins a comment, so {truncate(comment)!r} is left out; quote the text that has it"
    try:
        value = parse_plain(text, source)
    except ValueError as error:
        raise ValueError(f"{error}; {cut}") if cut else error from None
    if cut and isinstance(value, str | None):
        raise ValueError(f"{source}: {cut}")
    return value


def _comment_in(text: str) -> str | None:
    """Return the first comment of a YAML document, from its `#` on; None where there is none."""
    end = 0
    try:
        for token in yaml.scan(text, Loader=_Loader):
            before, mark, behind = text[end : token.start_mark.index].partition("#")
            if mark and not before.strip():
                return mark + behind
            end = token.end_mark.index
    except yaml.YAMLError:  # which parsing reports
        return None
    return None


def parse_with_lines(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """Parse one YAML document; return its value, and the line of each key, by names such as reward.functions[0].use.

    Raises ValueError with the source and the line.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _add_lines(node, "", lines)
        return loader.construct_document(node), lines
    except RecursionError:
        raise ValueError(f"{source}: broken YAML: nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of too many digits
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{source}{f':{mark.line + 1}' if mark else ''}: broken YAML: {problem}") from error


def _add_lines(node: yaml.Node, name: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{name}.{key.value}" if name else str(key.value)
            lines[inner] = key.start_mark.line + 1
            _add_lines(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            inner = f"{name}[{number}]"
            lines[inner] = value.start_mark.line + 1
            _add_lines(value, inner, lines)


def dump_plain(values: dict[str, Any]) -> str:
    """Return YAML that `parse_plain` reads back as the same values, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def quoted(text: str) -> str:
    """Escape the line breaks in JSON that YAML knows and JSON does not."""
    return text.translate(_BREAKS)
