"""Options and completions that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def complete_setting(incomplete: str) -> list[str]:
    """Packaged recipes and `section.key=` that begin like this."""
    from tinyrl.config.recipe import packaged_recipes
    from tinyrl.config.settings import SECTIONS, fields_of, section_class

    keys = [f"{section}.{key}=" for section in SECTIONS for key in fields_of(section_class(section))]
    return [name for name in [*packaged_recipes(), *keys] if name.startswith(incomplete)]


Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to run")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run Python code that comes with a hub model")
]
