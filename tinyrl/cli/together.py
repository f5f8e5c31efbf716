"""Which options of a command go together: each command declares its rules, and the rest is refused by name.

An option that would be taken and ignored is refused before anything is read. A rule names options (--worst) and the
words before the settings, by the beginning of what the help calls them (METHOD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from tinyrl.config.methods import and_list, or_list


@dataclass(frozen=True)
class Needs:
    """`option` has an effect only beside one of `others`."""

    option: str
    others: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Excludes:
    """Beside `option` the `others` have no effect, unless one of `unless` is given too."""

    option: str
    others: tuple[str, ...]
    why: str
    unless: tuple[str, ...] = ()


Rule = Needs | Excludes


def check_together(context: typer.Context, rules: Sequence[Rule]) -> None:
    """Raise ValueError, naming the options, where one that was given would have no effect."""
    given = given_names(context)
    for rule in rules:
        if rule.option not in given:
            continue
        if isinstance(rule, Excludes):
            if not given & {*rule.unless}:
                refuse(context, rule.others, f"with {rule.option}: {rule.why}")
        elif not given & {*rule.others}:
            raise ValueError(f"{rule.option} needs {or_list([*rule.others])}: {rule.why}")


def check_not_empty(context: typer.Context) -> None:
    """Raise ValueError, naming it, for an argument or an option that is empty, as "$RUN" is where RUN is not set: as a
    path it would mean the current folder.
    """
    for one in context.command.params:
        value = context.params[str(one.name)]
        words = value if isinstance(value, list) else [value]
        if any(word is not None and not str(word).strip() for word in words):
            raise ValueError(f"{one.opts[0] if one.param_type_name == 'option' else one.metavar} is empty")


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ValueError where any of the names was given: it has no effect, and why."""
    given = given_names(context)
    idle = [name for name in names if name in given]
    if idle:
        raise ValueError(f"{and_list(idle)} {'has' if len(idle) == 1 else 'have'} no effect {why}")


def given_names(context: typer.Context) -> set[str]:
    """Return the options that were typed, and the name of an argument in which a word is not a setting."""
    given = set[str]()
    for one in context.command.params:
        source = context.get_parameter_source(str(one.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        if one.param_type_name == "option":
            given |= {*one.opts}
            continue
        words = context.params[str(one.name)]
        if isinstance(words, str) or any("=" not in word for word in words or ()):
            given.add(str(one.metavar).partition(" ")[0].strip("[]"))
    return given
