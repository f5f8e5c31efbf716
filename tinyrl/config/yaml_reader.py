"""YAML as plain settings: names, text, numbers, booleans, null and lists."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tinyrl.text import truncate

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 5e-5 is a number (YAML 1.1 wants 5.0e-5), dates are text, a key is there once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [one for one in resolvers if one[0].removeprefix(_TAG) in ("int", "float", "bool", "null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader` reads: text that looks like 5e-5 is quoted, and nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


def parse_plain(text: str, source: str) -> Any:
    """Parse one YAML document. Raises ValueError with the source and the line."""
    try:
        return _Loader(text).get_single_data()
    except RecursionError:
        raise ValueError(f"{source}: broken YAML: nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no number, such as 0b_
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{source}{f':{mark.line + 1}' if mark else ''}: broken YAML: {problem}") from error


def dump_plain(values: dict[str, Any]) -> str:
    """Return YAML that `parse_plain` reads back as the same values, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
