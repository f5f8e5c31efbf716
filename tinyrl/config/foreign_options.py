"""Settings that were given as options, as the command lines of other libraries have them: what to type instead."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tinyrl.config.aliases import ALIASES, reader_of
from tinyrl.config.foreign_names import Counterpart, answer_of, home_of, is_name, meant_by, setting_named
from tinyrl.config.foreign_values import ForeignNames, KlSwitch, Option, Values, batch_size
from tinyrl.config.given import settings_in
from tinyrl.config.line_to_copy import copy_of, line_of, lines_to_copy
from tinyrl.config.methods import is_method
from tinyrl.config.settings import fields_of
from tinyrl.config.yaml_reader import parse_plain

HOW_WRITTEN = "Settings are written section.key=value"
PLACEHOLDER = "VALUE"


def answer_to_options(
    options: Mapping[str, Sequence[str]],
    method: object,
    *,
    values: Mapping[str, Any] | None = None,
    missing: Sequence[str] = (),
) -> str:
    """Return how settings that were given as options are written, or why there are none; which were meant, where none
    is one; "" where none is near.

    options: by name, the words behind each; values: what is given beside them; missing: settings that a run of one's
    own needs besides.
    """
    options = dict(_switched_off(name, words) for name, words in options.items())
    known = [name for name in options if is_name(name, method)]
    if len(known) == 1:
        return answer_to_option(known[0], options[known[0]], method)
    if not known:
        return "".join(meant_by(name, method) for name in options).strip()
    beside = {"method": method, **(values or {})}
    foreign = {name: _value(name, options[name], method) for name in known}
    given = ForeignNames(method, foreign, frozenset(settings_in(beside)))
    copies = {name: copy_of(name, value, given) for name, value in foreign.items()}
    lines = [f"{HOW_WRITTEN}, without --"]
    lines += [f"`{name}` is unknown.{meant_by(name, method)}" for name in options if name not in known]
    for name in known:
        answer, home = _answer_and_home(name, method)
        lines.append(answer.in_words(name, name, method) if home is None else f"`{name}` is `{home}`")
    tried_over = beside if is_method(method) else {}
    return "\n  ".join([*lines, *lines_to_copy(copies, given, values=tried_over, missing=missing)])


def _switched_off(name: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return an option with its words; of transformers' no_NAME the switch itself, which is off."""
    is_off = name.startswith("no_") and name not in ALIASES
    return (name.removeprefix("no_"), ["false"]) if is_off else (name, words)


def answer_to_option(name: str, words: Sequence[str], method: object) -> str:
    """Return how a setting that was given as an option is written, or why there is none; "" where no library has it.

    words: what was typed behind it; none behind a flag.
    """
    answer, home = _answer_and_home(name, method)
    if home is not None:
        text = " ".join(words) or PLACEHOLDER
        return f"{HOW_WRITTEN}: {shlex.quote(f'{home}={text}')}"
    if name not in ALIASES:
        return ""
    if not answer.setting:
        return answer.as_sentence(name, name, method)
    read = reader_of(name)
    if isinstance(read, Option):
        return f"That is {shlex.join([read.option, *([] if read.is_flag else [' '.join(words) or PLACEHOLDER])])}"
    text = ""
    if read is not batch_size:  # one of several sizes that are one here
        given = ForeignNames(method, {name: _value(name, words, method)})
        text = line_of({name: copy_of(name, given.values[name], given)}, given, {}).text
    return f"{HOW_WRITTEN}: {text}" if text else answer.as_sentence(name, name, method)


def _answer_and_home(name: str, method: object) -> tuple[Counterpart, str | None]:
    """Return what another library's name is, and the setting where it is a name of ours but for its section."""
    answer = answer_of(name, method) if name in ALIASES else Counterpart()
    home = home_of(name, method)
    is_own = name not in ALIASES or (not answer.setting and not is_method(method))
    return answer, home if is_own else None


def _value(name: str, words: Sequence[str], method: object) -> Any:
    """Return the value of an option, a list of several words; a flag is true where the name is a switch."""
    if not words:
        return True if _is_switch(name, method) else PLACEHOLDER
    found = [_parsed(word, name) for word in words]
    return found if len(found) > 1 else found[0]


def _is_switch(name: str, method: object) -> bool:
    """Return whether a name without a value says something."""
    read = reader_of(name)
    if isinstance(read, Values):
        return "true" in read.lines
    if isinstance(read, KlSwitch):
        return True
    if isinstance(read, Option):
        return read.is_flag
    section, _, key = setting_named(name, method).partition(".")
    return fields_of(section).get(key, {}).get("type") == "boolean"


def _parsed(word: str, name: str) -> Any:
    try:
        return parse_plain(word, name)
    except ValueError:
        return word
