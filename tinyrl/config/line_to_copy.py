"""The line to copy in place of other libraries' names: what is in it, what is not and why.

A line is tried before it is shown: what would have no effect in it, or be refused, is left out with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinyrl.config.aliases import ALIASES, OF_TRL, reader_of
from tinyrl.config.conflicts import conflicts, contradictions
from tinyrl.config.foreign_defaults import brought_by
from tinyrl.config.foreign_names import answer_of, setting_named
from tinyrl.config.foreign_values import Copy, ForeignNames
from tinyrl.config.given import Given
from tinyrl.config.methods import METHODS, and_list
from tinyrl.config.rules import ModelFacts, with_rules
from tinyrl.config.schema import Config

SCHEDULE_NAMES = ("lr_scheduler_type", "lr_scheduler")
RANKS = ("r", "lora_r")  # of PEFT, TRL and unsloth
MODULES = ("target_modules", "lora_target_modules")
OF_LORA = (*RANKS, *MODULES, "lora_rank", "lora_alpha", "use_peft", "peft_config", "load_in_4bit", "full_finetuning")
OF_OTHERS = (*OF_TRL, "adv_estimator", "rollout.n", "pretrain")  # names of trainers that train all weights
WITHOUT = {  # what there is without a setting that a run of one's own needs
    "model.path": "without it the embedded model is trained",
    "task.data": "a run of your own needs rows",
    "reward.functions": "unless rows have a column `answer` to compare with",
}


def copy_of(name: str, value: Any, given: ForeignNames) -> Copy:
    """Return what to write in place of a name with its value: another library's, or ours but for its section."""
    setting = setting_named(name, given.method)
    if not setting:
        return Copy(without=answer_of(name, given.method).without_line(given.method)) if name in ALIASES else Copy()
    copy = reader_of(name)(setting, value, given)
    return replace(copy, brings=brought_by(name, value, given)) if copy.line else copy


@dataclass(frozen=True)
class LineToCopy:
    """words: of the command line, by their setting or option; without: by name, what is not in it; needless: the names
    of those by which nothing is lost.
    """

    words: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    needless: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return " ".join(self.words.values())


def line_of(copies: Mapping[str, Copy], given: ForeignNames, values: Mapping[str, Any]) -> LineToCopy:
    """Return the line to copy in place of names. values: what is given beside them, over which the line is tried."""
    words = dict[str, str]()
    names = dict[str, str]()  # of other libraries, by the setting of their word
    has_value = dict[str, bool]()  # of the settings in the line; others have a switch, which says less
    for copy in copies.values():
        for setting in _words_of(copy.line):
            has_value[setting] = has_value.get(setting, False) or not copy.is_switch
    for name, copy in copies.items():
        line = _words_of(copy.line)
        brought = _words_of(copy.brings)
        own = {setting: word for setting, word in line.items() if copy.is_switch != has_value[setting]}
        words |= own
        words |= {setting: word for setting, word in brought.items() if setting not in {*has_value, *given.ours}}
        names |= dict.fromkeys(own, name)
    without = {name: copy.without for name, copy in copies.items() if copy.without}
    needless = {name for name, copy in copies.items() if copy.is_needless}
    for setting, left_out in _tried(words, values).items():
        if setting in names:  # and no default that was brought along
            without[names[setting]] = left_out.why
            needless |= {names[setting]} if left_out.is_idle else set()
    return LineToCopy(words=words, without=without, needless=needless)


def _words_of(line: str) -> dict[str, str]:
    """Return the words of a line by their settings; an option with its value by the option."""
    words = shlex.split(line)
    if words and words[0].startswith("--"):
        return {words[0]: line}
    return {word.partition("=")[0]: shlex.quote(word) for word in words}


@dataclass(frozen=True)
class _LeftOut:
    """Why a setting is not in the line; is_idle: it would have no effect there."""

    why: str
    is_idle: bool


def _tried(words: dict[str, str], values: Mapping[str, Any]) -> dict[str, _LeftOut]:
    """Take out of the words, over these values, what would have no effect or be refused; return why, by setting."""
    found = dict[str, _LeftOut]()
    while (refused := next(_refused(words, values), None)) is not None:
        setting, left_out = refused
        found[setting] = left_out
        del words[setting]
    return found


def _refused(words: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[tuple[str, _LeftOut]]:
    """Yield the settings of words that would have no effect over these values, or be refused."""
    overrides = [shlex.split(word)[0] for setting, word in words.items() if not setting.startswith("--")]
    try:
        given = Given(dict(values)).over(overrides)
        config = Config.model_validate(given.values)
    except ValueError:  # ValidationError, too: the line is refused with a sentence of its own
        return
    config = with_rules(config, there=given, given=given, facts=ModelFacts())
    for setting in words:
        section, _, name = setting.partition(".")
        is_setting = section in Config.model_fields and name in type(getattr(config, section)).model_fields
        unmet = config.unmet(section, name) if is_setting else None
        if unmet is not None:
            yield setting, _LeftOut(unmet.why, is_idle=True)
    for refusal in (*conflicts(config), *contradictions(config)):
        setting = next((setting for setting in refusal.settings if setting in words), None)
        if setting is not None:
            yield setting, _LeftOut(refusal.sentence, is_idle=False)


# ---- what stands around it ----


def lines_to_copy(
    copies: Mapping[str, Copy], given: ForeignNames, *, values: Mapping[str, Any], missing: Sequence[str]
) -> list[str]:
    """Return the line to copy in place of names, after what was converted for it, what is not in it and what to add; []
    without one. missing: settings that a run of one's own needs besides.
    """
    line = line_of(copies, given, values)
    if not line.words:
        return []
    lines = remarks(copies, given)
    without = [f"{name} ({why})" for name, why in line.without.items()]
    if without:
        lines.append(f"not in the line: {', '.join(without)}")
    to_add = [setting for setting in missing if setting not in line.words and not _is_elsewhere(setting, line)]
    if to_add:
        lines.append(f"add {_added(to_add, line, given.method)}")
    return [*lines, f"to copy: {line.text}"]


def _is_elsewhere(setting: str, line: LineToCopy) -> bool:
    """Return whether a line has something else in place of a setting: a task, or a reward model."""
    return "task.name" in line.words or (setting == "reward.functions" and "reward.model" in line.words)


def _added(settings: list[str], line: LineToCopy, method: object) -> str:
    """Return the settings to add, with what there is without them."""
    is_own = "model.path" in line.words or "task.data" in line.words
    if METHODS[str(method)].recipe is None:
        return and_list(settings)
    if not is_own:
        return f"{and_list(settings)}: without them the built-in example is trained"
    return and_list([f"{setting} ({WITHOUT[setting]})" for setting in settings])


def remarks(copies: Mapping[str, Copy], given: ForeignNames) -> list[str]:
    """Return what was divided and counted for the line to copy, and what TRL and PEFT have where nothing was given."""
    divided = [f"{name} {copy.divided[0]} is {copy.divided[1]}" for name, copy in copies.items() if copy.divided]
    lines = list[str]()
    if divided:
        each = given.updates
        how = f"divided by {each}, as a step here has {each} of TRL's optimizer steps" if each > 1 else "in steps"
        lines.append(f"{how}: {', '.join(divided)}")
    lines += dict.fromkeys(copy.counted for copy in copies.values() if copy.counted)
    if OF_TRL & {*given.values} and not given.has(*SCHEDULE_NAMES):
        lines.append(
            "without lr_scheduler_type TRL's schedule is linear, and here it is constant: optim.schedule=linear"
        )
    says_lora = given.has(*OF_LORA, "lora") or any(setting.startswith("lora.") for setting in given.ours)
    if given.has(*OF_OTHERS) and not says_lora and given.method != "reward":
        lines.append("without a peft_config or a rank all weights are trained there, and LoRA here: lora.enabled=false")
    is_of_peft = given.has(*RANKS) and "lora.target_modules" not in given.ours
    if is_of_peft and not given.has(*MODULES):
        lines.append("without target_modules PEFT adapts q_proj and v_proj of most models, this all linear layers")
    return lines
