"""Settings that would have no effect.

A setting of the command line or of the Python API that does not count (`OnlyIf`) is refused, one of a recipe gets a
note. config.yaml of a run holds every value and is exempt.
"""

from __future__ import annotations

import shlex
from typing import Any

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config


def given_settings(values: dict[str, Any]) -> list[str]:
    """Return the settings of nested values, as section.name. One that is null or empty asks for nothing."""
    found: list[str] = []
    for section, own in values.items():
        if isinstance(own, dict):
            found += [f"{section}.{name}" for name, value in own.items() if value not in (None, [], {})]
    return found


def without_effect(
    config: Config, setting: str, *, override: str | None = None, of_recipe: bool = False
) -> Refusal | None:
    """Return the refusal of a setting that does not count, else None: of one that an `override` gives with what to type
    to have it, where that is one override more. A recipe may serve several methods, so nothing is said about its
    settings that are for other ones.
    """
    section, _, name = setting.partition(".")
    unmet = config.unmet(section, name) if config.uses(section) else None
    if unmet is None or (of_recipe and unmet.of_method):
        return None
    remedy = ""
    if override is not None and unmet.remedy is not None:
        remedy = f". To have it: {shlex.join([unmet.remedy, override])}"
    return Refusal((setting,), f"`{setting}` has no effect: {unmet.why} (it counts only if {unmet.words}){remedy}")
