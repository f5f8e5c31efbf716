"""The settings as a page: each section as a recipe writes it, with every default, meaning and type."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tinyrl.config.errors import allowed, fields_of, section_class
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain
from tinyrl.text import did_you_mean, shortened

WIDTH = 80
SECTIONS = tuple(name for name, kind in fields_of(Config).items() if fields_of(kind))


def describe_settings(section: str | None = None, *, width: int = WIDTH) -> str:
    """One section, or all: YAML that a recipe may hold, in at most `width` columns, what a setting does beside it.

    Raises ValueError for a section there is not.
    """
    if section is not None and section not in SECTIONS:
        homes = [name for name in SECTIONS if section in fields_of(section_class(name))]
        near = f" `{section}` is in {and_list(homes)}." if homes else did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{shortened(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    pages = [_page(name, width) for name in ([section] if section else SECTIONS)]
    return "\n\n".join("\n".join(lines) for lines in pages)


def _page(section: str, width: int) -> list[str]:
    users = [name for name, method in METHODS.items() if section in method.sections]
    read_by = f"read by {and_list(users)}" if section in OPTIONAL_SECTIONS else ""
    heading = (f"{section}:", f"{Config.model_fields[section].description}", read_by)
    entries = list(
        _entries(section_class(section), Config.model_fields[section].get_default(call_default_factory=True))
    )
    column = max(len(left) for left, *_ in entries) + 2
    return [line for left, *texts in [heading, *entries] for line in _beside(left, *texts, column=column, width=width)]


def _entries(kind: Any, values: BaseModel) -> Iterator[tuple[str, str, str]]:
    """Name and default of each field, what it means, and what it may be; a list's items follow the list."""
    for name, allows in fields_of(kind).items():
        setting = dump_plain({name: getattr(values, name)}).strip()
        yield f"  {setting}", str(kind.model_fields[name].description), allowed(allows)
        for item in get_args(allows):
            for inner, field in getattr(item, "model_fields", {}).items():
                default = "" if field.default is PydanticUndefined else f" {field.default}"
                yield f"  #   {inner}:{default}", str(field.description), allowed(fields_of(item)[inner])


def _beside(left: str, meaning: str, allows: str, *, column: int, width: int) -> Iterator[str]:
    """Comment lines to the right of a setting; what is allowed is broken off only where it does not fit behind."""
    room = width - column - len("# ")
    lines, aside = textwrap.wrap(meaning, room), f"({allows})" if allows else ""
    if aside and len(lines[-1]) + 1 + len(aside) <= room:
        lines[-1] += f" {aside}"
    else:
        lines += textwrap.wrap(aside, room)
    for line in lines:
        yield f"{left:{column}}# {line}"
        left = ""
