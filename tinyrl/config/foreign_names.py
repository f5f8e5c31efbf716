"""Names of other libraries (aliases.py): the setting that each is under a method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tinyrl.config.aliases import ALIASES, reader_of
from tinyrl.config.foreign_row import Ours
from tinyrl.config.foreign_values import batch_size, under_method
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method
from tinyrl.config.settings import SECTIONS, fields_of
from tinyrl.text import nearest

DOTTED = re.compile(r"\b[a-z_]+\.[a-z_]+\b")  # a setting in a text, or the name of a file
NONE = Ours()


@dataclass(frozen=True)
class Counterpart:
    """What another library's name is under a method, or a matter of other methods."""

    ours: Ours = NONE
    others: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        return self.ours.setting

    @property
    def of_others(self) -> str:
        """Return the methods that have such a setting, in words."""
        return and_list([f"`train {name}`" for name in self.others])

    def as_sentence(self, name: str, alias: str, method: object) -> str:
        """Answer a name, of which the alias is the end."""
        if self.others:
            return f"`{name}` is not a setting of `train {method}`: it is one of {self.of_others}"
        if self.ours.reason:
            return f"`{name}` is not a setting: {self.ours.reason}"
        return f"`{name}` is not a setting: `{alias}` is `{self.setting}` here{self.ours.remark}"

    def in_words(self, name: str, alias: str, method: object) -> str:
        """Answer a name in a list of many."""
        if self.others:
            return f"`{name}` is of {self.of_others}, not of `train {method}`"
        if self.ours.reason:
            return f"`{name}` {self.state}: {self.ours.reason}"
        is_sum = reader_of(alias) is batch_size
        return f"`{name}` is `{self.setting}`{self.ours.remark if is_sum else ''}"

    @property
    def state(self) -> str:
        return "is not needed" if self.ours.is_needless else "cannot be set"

    def without_line(self, method: object) -> str:
        """Return why no setting is in the line to copy."""
        return f"not of `train {method}`" if self.others else self.state.removeprefix("is ")


def answer_of(alias: str, method: object) -> Counterpart:
    """Return what another library's name is under a method."""
    ours = _ours_under(alias, method)
    if ours is not None:
        return Counterpart(ours)
    return Counterpart(others=tuple(name for name in METHODS if _ours_under(alias, name) is not None))


def _ours_under(alias: str, method: object) -> Ours | None:
    """Return the answer in the settings of a method; None where it is about settings that the method lacks."""
    row = ALIASES[alias]
    ours = row.under.get(str(method), row.ours)
    if ours.reason:
        reason = _in_terms_of(ours.reason, method)
        return None if reason is None else Ours(reason=reason, is_needless=ours.is_needless)
    setting = under_method(ours.setting, method)
    return Ours(setting=setting, remark=_in_terms_of(ours.remark, method) or "") if setting else None


def _in_terms_of(text: str, method: object) -> str | None:
    """Return a text with the settings that it names as those of a method; None where the method lacks one of them."""
    named = [name for name in DOTTED.findall(text) if name.partition(".")[0] in SECTIONS]
    if not all(under_method(name, method) for name in named):
        return None
    return DOTTED.sub(lambda found: under_method(found[0], method) if found[0] in named else found[0], text)


def home_of(key: str, method: object) -> str | None:
    """Return section.key of the section that has such a key and counts for the method: its own before those of every
    method and of sampling, and these before a critic's or a teacher's.
    """
    own = METHODS[str(method)].section if is_method(method) else ""
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[str(method)].sections} if own else set[str]()
    of_some = {*OPTIONAL_SECTIONS} - {own, "generation"}
    homes = [section for section in SECTIONS if section not in unused and key in fields_of(section)]
    homes.sort(key=lambda section: (section != own, section in of_some))
    return f"{homes[0]}.{key}" if homes else None


def alias_of(parts: Sequence[object]) -> str | None:
    """Return the longest end of a dotted name, given in its parts, that is a name of another library. That of a section
    is one by itself only.
    """
    ends = [".".join(map(str, parts[at:])) for at in range(len(parts))]
    is_alone = len(parts) == 1
    return next((end for end in ends if end in ALIASES and (is_alone or end not in SECTIONS)), None)


def is_name(name: str, method: object) -> bool:
    """Return whether another library has a name, or a section that counts for the method."""
    return name in ALIASES or home_of(name, method) is not None


def setting_named(name: str, method: object) -> str:
    """Return the setting that a name without a section is: another library's, or ours but for the section; "" where
    there is none.
    """
    setting = answer_of(name, method).setting if name in ALIASES else ""
    is_own = not setting and (name not in ALIASES or not is_method(method))
    return (home_of(name, method) or "") if is_own else setting


def meant_by(name: str, method: object) -> str:
    """Return " Did you mean ...?" with the nearest name of a setting, ours without a section or another library's, and
    what that is here; "" where none is near.
    """
    names = [*(key for section in SECTIONS for key in fields_of(section)), *ALIASES]
    settings = {each: setting_named(each, method) for each in names if "." not in each}
    near = nearest(name.replace("-", "_"), [each for each, setting in settings.items() if setting], cutoff=0.8)
    if not near:
        return ""
    is_own = settings[near].endswith(f".{near}")
    return f" Did you mean `{settings[near]}`?" if is_own else f" Did you mean `{near}`, here `{settings[near]}`?"
