"""Names of other libraries (aliases.py): the setting that each is here, and the line to copy in their place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyrl.config.aliases import ALIASES, OF_TRL, Ours, reader_of
from tinyrl.config.foreign_values import Copy, ForeignNames, Option, Values, batch_size, in_steps, under_method, written
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method
from tinyrl.config.settings import SECTIONS, fields_of
from tinyrl.config.yaml_reader import parse_plain

DOTTED = re.compile(r"\b[a-z_]+\.[a-z_]+\b")  # a setting in a text, or the name of a file
HOW_WRITTEN = "Settings are written section.key=value"
PLACEHOLDER = "VALUE"
NONE = Ours()
SCHEDULE_NAMES = ("lr_scheduler_type", "lr_scheduler")


# ---- the setting that a name is ----


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
    """Return section.key of the first section that has such a key and counts for the method."""
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[str(method)].sections} if is_method(method) else set[str]()
    home = next((section for section in SECTIONS if section not in unused and key in fields_of(section)), None)
    return None if home is None else f"{home}.{key}"


def answer_to_option(name: str, text: str | None, method: object) -> str:
    """Return how a setting that was given as an option is written, or why there is none; "" where no library has it.

    text: the value as it was typed; None where there is none, as of a flag.
    """
    answer = answer_of(name, method) if name in ALIASES else Counterpart()
    home = home_of(name, method)
    is_own = home is not None and (name not in ALIASES or (not answer.setting and not is_method(method)))
    if is_own:
        return f"{HOW_WRITTEN}: {shlex.quote(f'{home}={PLACEHOLDER if text is None else text}')}"
    if name not in ALIASES:
        return ""
    if not answer.setting:
        return answer.as_sentence(name, name, method)
    read = reader_of(name)
    if isinstance(read, Option):
        return f"That is {shlex.join([read.option, text or PLACEHOLDER])}"
    line = ""
    if read is not batch_size:  # one of several sizes that are one here
        line = copy_of(name, answer.setting, _value_of_option(name, text), ForeignNames(method, {})).line
    return f"{HOW_WRITTEN}: {line}" if line else answer.as_sentence(name, name, method)


def _value_of_option(name: str, text: str | None) -> Any:
    """Return the value of an option; a flag is true where the name is a switch."""
    if text is None:
        read = reader_of(name)
        return True if isinstance(read, Values) and "true" in read.lines else PLACEHOLDER
    try:
        return parse_plain(text, name)
    except ValueError:
        return text


# ---- the line to copy ----


def copy_of(alias: str, setting: str, value: Any, given: ForeignNames) -> Copy:
    """Return what to write in place of another library's name with its value."""
    copy = reader_of(alias)(setting, value, given)
    why_idle = given.idle(setting)
    switches_lora_off = copy.line == "lora.enabled=false"
    return Copy(without=why_idle) if why_idle and not switches_lora_off else copy


def copy_of_own(key: str, setting: str, value: Any, given: ForeignNames) -> Copy:
    """Return what to write in place of a name that is ours but for its section."""
    if key == "warmup_steps":  # of optimizer steps in TRL, as max_steps is
        return in_steps(setting, value, given)
    return Copy(line=written(setting, value))


def lines_to_copy(copies: Mapping[str, Copy], given: ForeignNames, missing: Sequence[str]) -> list[str]:
    """Return the line to copy in place of names, after what was converted for it, what is not in it and what to add; []
    without one. missing: settings that a run of one's own needs besides.
    """
    by_setting = dict[str, str]()
    switches_first = sorted(copies.values(), key=lambda copy: not copy.is_switch)
    for copy in switches_first:  # the last line of a setting stands: a value says more than a switch
        if copy.line:
            by_setting[copy.line.partition("=")[0]] = copy.line
    in_order = dict.fromkeys(copy.line for copy in copies.values())
    words = " ".join(line for line in in_order if line in by_setting.values())
    if not words:
        return []
    lines = remarks(copies, given)
    without = [f"{name} ({copy.without})" for name, copy in copies.items() if copy.without]
    if without:
        lines.append(f"not in the line: {', '.join(without)}")
    to_add = [setting for setting in missing if f"{setting}=" not in words]
    if to_add:
        example = ": without them the built-in example is trained" if METHODS[str(given.method)].recipe else ""
        lines.append(f"add {and_list(to_add)}{example}")
    return [*lines, f"to copy: {words}"]


def remarks(copies: Mapping[str, Copy], given: ForeignNames) -> list[str]:
    """Return what was divided and counted for the line to copy."""
    divided = [f"{name} {copy.divided[0]} is {copy.divided[1]}" for name, copy in copies.items() if copy.divided]
    lines = list[str]()
    if divided:
        each = given.updates
        lines.append(f"divided by {each}, as a step here has {each} of TRL's optimizer steps: {', '.join(divided)}")
    return [*lines, *_of_trl(copies, given)]


def _of_trl(copies: Mapping[str, Copy], given: ForeignNames) -> list[str]:
    """Return what TRL's sizes were turned into, and what it has where nothing was given."""
    lines = list[str]()
    counted = next((copy.counted for copy in copies.values() if copy.counted), "")
    if counted:
        defaults = f", with TRL's {', '.join(given.assumed)}" if given.assumed else ""
        lines.append(f"grpo.num_prompts is counted: {counted}{defaults}")
    if OF_TRL & {*given.values} and not {*SCHEDULE_NAMES} & {*given.values}:
        lines.append(
            "without lr_scheduler_type TRL's schedule is linear, and here it is constant: optim.schedule=linear"
        )
    return lines
