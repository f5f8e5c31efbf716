"""Describe the settings: a page of all of them, and a sentence for each that is wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyrl.config.aliases import ALIASES, BATCH, LINES, NOT_IN_THE_LINE, OF_METHOD, OPTIMIZER_STEPS, OPTIONS
from tinyrl.config.marks import OnlyIf
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method, or_list
from tinyrl.config.removed import REMOVED, RENAMED
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain, quoted
from tinyrl.text import did_you_mean, hang, join_truncated, truncate

MOST_SENTENCES = 3
UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's names of problems
MOST_NAMES = 60  # unknown ones that are answered, one a line
FAR = 1_000_000
FUNCTION = re.compile(r"[\w./-]+:\w+")  # FILE.py:FUNCTION, where YAML needs no quotes
KeyPath = tuple[str | int, ...]  # of a setting: ("reward", "functions", 0, "use")
Kind = dict[str, Any]  # what a setting may be: a part of the JSON schema that pydantic gives
schema = cache(Config.model_json_schema)  # takes a while, so only where it is needed
SECTIONS = tuple(name for name in Config.model_fields if name != "method")
PLAIN = {"null": ["null"], "boolean": ["true", "false"], "string": ["text"]}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


# ---- errors ----


@dataclass(frozen=True)
class Problem:
    """What is wrong. settings: those that it is about, the first by name; answer: of an unknown one, in a few words;
    copy: what to write in its place.
    """

    settings: list[str]
    sentence: str
    answer: str = ""
    copy: Copy | None = None


@dataclass(frozen=True)
class Copy:
    """What to write in place of another library's name. line: words of the command line, "" where there are none;
    without: why, in few words; divided: the count of optimizer steps that was given and the steps that it is.
    """

    line: str = ""
    without: str = ""
    divided: tuple[object, int] | None = None


@dataclass(frozen=True)
class Given:
    """The unknown names that stand outside of any section, with their values, and the method that is trained."""

    method: object
    values: dict[str, Any]

    def count(self, name: str, default: int) -> int:
        """Return a value that is a whole number above 0, else TRL's default."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else default

    @property
    def assumed(self) -> list[str]:
        """Return those of TRL's defaults that take the place of sizes which are not given."""
        defaults = {"num_generations": 8}
        if "generation_batch_size" not in self.values:
            defaults |= {"per_device_train_batch_size": 8}
        if not {"generation_batch_size", "steps_per_generation"} & {*self.values}:
            defaults |= {"gradient_accumulation_steps": 1}
        return [f"{name}={value}" for name, value in defaults.items() if name not in self.values]

    @property
    def of_update(self) -> int:
        """Return TRL's completions of an optimizer step, on one process."""
        return self.count("per_device_train_batch_size", 8) * self.count("gradient_accumulation_steps", 1)

    @property
    def of_rollout(self) -> int:
        """Return TRL's completions of a rollout, on one process."""
        steps = self.count("steps_per_generation", self.count("gradient_accumulation_steps", 1))
        return self.count("generation_batch_size", self.count("per_device_train_batch_size", 8) * steps)

    @property
    def updates(self) -> int:
        """Return TRL's optimizer steps of a rollout."""
        return self.count("num_iterations", 1) * -(-self.of_rollout // self.of_update)


def explain(
    error: ValidationError, method: object, place: Callable[[Sequence[str]], str], *, missing: Sequence[str] = ()
) -> str:
    """Return sentences about the problems that pydantic found: all unknown names, and the first of the others, at most
    one for a setting. A sentence has a place, `key`, the value, what is allowed, and what was probably meant. `place`
    returns where settings were written. The last line has what to write in place of the unknown names, where that is
    known; `missing` are settings that a run of one's own needs besides.
    """
    found: dict[str, Problem] = {}
    problems = error.errors(include_url=False)
    given = Given(method, {str(one["loc"][0]): one["input"] for one in problems if len(one["loc"]) == 1})
    for problem in problems:
        for one in _problems(problem, given):
            found.setdefault(one.settings[0], one)
    unknown = [one for one in found.values() if one.answer]
    others = [one for one in found.values() if not one.answer]
    if len(unknown) > MOST_SENTENCES:
        lines = [f"{len(unknown)} unknown settings (the first: {place(unknown[0].settings)})"]
        lines += [f"  {one.answer}" for one in unknown[:MOST_NAMES]]
        lines += ["  ..."] if len(unknown) > MOST_NAMES else []
        most = MOST_SENTENCES
    else:
        lines = [f"{place(one.settings)}: {one.sentence}" for one in unknown]
        most = MOST_SENTENCES - (len(lines) == MOST_SENTENCES)
    lines += [f"{place(one.settings)}: {one.sentence}" for one in others[:most]]
    return "\n".join(lines + _lines_to_copy(unknown, given, missing))


def _lines_to_copy(unknown: list[Problem], given: Given, missing: Sequence[str]) -> list[str]:
    """Return the line to copy, after what was converted for it, what is not in it and what to add; [] without one."""
    copies = {one.settings[0]: one.copy for one in unknown if one.copy is not None}
    words = " ".join(dict.fromkeys(copy.line for copy in copies.values() if copy.line))
    if not words:
        return []
    lines = list[str]()
    divided = [f"{name} {copy.divided[0]} is {copy.divided[1]}" for name, copy in copies.items() if copy.divided]
    if divided:
        each = given.updates
        lines.append(f"divided by {each}, as a step here has {each} of TRL's optimizer steps: {', '.join(divided)}")
    if "grpo.num_prompts=" in words and given.assumed:
        lines.append(f"grpo.num_prompts is counted with TRL's {', '.join(given.assumed)}")
    without = [f"{name} ({copy.without})" for name, copy in copies.items() if copy.without]
    if without:
        lines.append(f"not in the line: {', '.join(without)}")
    to_add = [setting for setting in missing if f"{setting}=" not in words]
    if to_add:
        example = ": without them the built-in example is trained" if METHODS[str(given.method)].recipe else ""
        lines.append(f"add {and_list(to_add)}{example}")
    return [*lines, f"to copy: {words}"]


def _problems(problem: Any, given: Given) -> list[Problem]:
    path, kind = _walk(problem["loc"])
    name = _dotted(path)
    value = problem["input"]
    if problem["type"] == "value_error":  # of our own rules
        sentence = str(problem["ctx"]["error"])
        named = re.findall(r"\b[a-z_]+\.[a-z_]+", sentence)
        if path:
            return [Problem([name, *named], f"`{name}`: {sentence}")]
        return [Problem(named or [""], sentence)]
    if problem["type"] in UNKNOWN:
        key = (*path, str(problem["loc"][len(path)]))
        name = _dotted(key)
        if removed := REMOVED.get(name):
            return [Problem([name], removed.refusal(name, value), f"`{name}` was removed")]
        if name in RENAMED:
            return [Problem([name], f"`{name}` is `{RENAMED[name]}` now", f"`{name}` is `{RENAMED[name]}`")]
        return [_unknown(key, whole, inner, given) for whole, inner in _leaves(key, value)]
    if problem["type"] == "missing":
        return [Problem([name], f"`{name}` is missing; it must be {allowed(kind)}")]
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
    fields = [*_fields(kind["items"])] if "items" in kind else []
    if fields[:1] == ["use"] and isinstance(value, str) and FUNCTION.fullmatch(value):
        near = f" Type '{name}=[{{use: {value}}}]'"
    return [Problem([name], f"`{name}` is {shown}; it must be {allowed(kind)}.{near}")]


def _leaves(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """Return the whole names below an unknown key, and the value of each: verl's names have several dots."""
    if not isinstance(value, dict) or not value or path[-1] in ALIASES:
        return [(path, value)]
    found: list[tuple[KeyPath, Any]] = []
    for name, inner in value.items():
        found += _leaves((*path, name), inner)
    return found


def _unknown(path: KeyPath, whole: KeyPath, value: Any, given: Given) -> Problem:
    """Answer an unknown key with its name here if another library has it, the section that has it, or a near one.

    path: the part of its whole name up to the first part that is unknown.
    """
    *parents, key = path
    dotted = _dotted(whole)
    in_item = any(isinstance(part, int) for part in parents)  # of a list, which has its own fields
    ends = (dotted.split(".", depth)[-1] for depth in range(len(whole)))
    alias = next((end for end in ends if end in ALIASES and not in_item), None)
    if alias is not None:
        answer = ALIASES[alias]
        if answer.startswith(("!", "#")):
            needless = answer.startswith("!")
            sentence = f"`{dotted}` is not a setting: {answer[1:]}"
            in_words = f"`{dotted}` {'is not needed' if needless else 'cannot be set'}: {answer[1:]}"
            return Problem([dotted], sentence, in_words, Copy(without="not needed" if needless else "cannot be set"))
        setting, remark = _answered(alias, given.method)
        sentence = f"`{dotted}` is not a setting: `{alias}` is `{setting}` here{remark}"
        in_words = f"`{dotted}` is `{setting}`" + (remark if alias in BATCH else "")
        return Problem([dotted], sentence, in_words, _copy_of(alias, setting, value, given))
    home = None if in_item else _home(str(key), given.method)
    known = [*_fields(_walk(tuple(parents))[1])]
    name = _dotted(path)
    copy = None
    if home is not None:
        near = f" Did you mean `{home}`?"
        copy = _in_steps(str(key), home, value, given) if key in OPTIMIZER_STEPS else Copy(line=_line(home, value))
    else:
        near = did_you_mean(str(key), known).replace("`", f"`{name.removesuffix(str(key))}", 1)
    sentence = f"unknown key `{name}`.{near or f' Known: {join_truncated(known, most=40)}'}"
    return Problem([dotted], sentence, f"`{dotted}` is unknown.{near}" if near else f"`{dotted}` is unknown", copy)


def _answered(alias: str, method: object) -> tuple[str, str]:
    """Return the setting that another library's name is under a method, and the remark behind it."""
    answer = ALIASES[alias]
    setting = re.split(r"[^\w.-]", answer)[0]
    its = OF_METHOD.get(alias, {}).get(str(method)) or _for_method(setting, method) or setting
    return its, answer.removeprefix(setting)


def _home(key: str, method: object) -> str | None:
    """Return section.key of the first section that has such a key and counts for the method."""
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[str(method)].sections} if is_method(method) else set[str]()
    home = next((section for section in SECTIONS if section not in unused and key in fields_of(section)), None)
    return None if home is None else f"{home}.{key}"


def written_as_setting(name: str, value: str, method: object) -> str:
    """Return the section.key=value that a name of this or another library is meant by; "" for a name of neither."""
    answer = ALIASES.get(name, "")
    if answer.startswith("--"):
        return ""
    own_name = not answer or answer.startswith(("!", "#"))
    setting = _home(name, method) if own_name else _answered(name, method)[0]
    return shlex.quote(f"{setting}={value}") if setting else ""


# ---- the line to copy ----


def _copy_of(alias: str, setting: str, value: Any, given: Given) -> Copy:
    """Return what to write in place of another library's name with its value."""
    shown = truncate(value if isinstance(value, str) else repr(value))
    of_itself = Copy(without=f"{shown}: see {setting}")
    if alias in OPTIONS:
        return Copy(line=shlex.join([OPTIONS[alias], value])) if isinstance(value, str) else of_itself
    if alias in NOT_IN_THE_LINE:
        return Copy(without=NOT_IN_THE_LINE[alias])
    if alias in BATCH:
        return _batch(given)
    without = _without_effect(alias, value, given)
    if without:
        return Copy(without=without)
    if alias in LINES:
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool) else ""
        line = LINES[alias].get(text.removeprefix("torch."), "")
        setting, _, text = line.partition("=")
        setting = _for_method(setting, given.method)
        return Copy(line=shlex.quote(f"{setting}={text}")) if setting else of_itself
    setting = _for_method(setting, given.method)
    if not setting:
        return Copy(without=f"not of `train {given.method}`")
    if alias in OPTIMIZER_STEPS or alias == "warmup_ratio":
        return _in_steps(alias, setting, value, given)
    line = _line(setting, value)
    own_weight = "use_bias_correction_kl" in given.values
    if alias == "beta" and setting == "grpo.kl_coef" and _above_zero(value) and not own_weight:
        line += " grpo.kl_unbiased=true"  # TRL's default
    if alias == "vllm_server_base_url" and line:
        line = f"generation.engine=server {line}"  # without which the address has no effect
    return Copy(line=line) if line else of_itself


def _without_effect(alias: str, value: Any, given: Given) -> str:
    """Return why the setting of a name would be refused or idle beside the other names; "" where it counts."""
    if alias == "num_train_epochs" and _above_zero(given.values.get("max_steps")):
        return "max_steps is given"
    if alias == "use_bias_correction_kl" and not _above_zero(given.values.get("beta")):
        return "there is no KL without beta"
    tracked = LINES["report_to"].get(str(given.values.get("report_to")), "run.trackers=[]") != "run.trackers=[]"
    if alias == "log_completions" and value is True and not tracked:
        return "there is no tracker without report_to"
    return ""


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _batch(given: Given) -> Copy:
    """Return the sizes of a step with as many completions as TRL's batch, with its defaults for what is not given."""
    section = METHODS[str(given.method)].section if is_method(given.method) else "grpo"
    if section == "grpo":
        group = given.count("num_generations", 8)
        prompts, rest = divmod(given.of_rollout, group)
        if rest:
            return Copy(without=f"{given.of_rollout} completions are no whole number of groups of {group}")
        line = f"grpo.num_prompts={prompts}"
        if given.of_update < given.of_rollout:
            line += f" grpo.minibatch_size={given.of_update}"
        return Copy(line=line)
    if "batch_size" in fields_of(section):
        return Copy(line=f"{section}.batch_size={given.of_update}")
    return Copy(without=f"see {section}.num_prompts")


def _for_method(setting: str, method: object) -> str:
    """Return a setting, or that of the same name in the method's own section; "" where the method has none."""
    section, _, key = setting.partition(".")
    if section not in OPTIONAL_SECTIONS or not is_method(method):
        return setting
    its = METHODS[str(method)]
    if section in its.sections:
        return setting
    return f"{its.section}.{key}" if key in fields_of(its.section) else ""


def _in_steps(name: str, setting: str, value: Any, given: Given) -> Copy:
    """Convert a count of optimizer steps, or a share of TRL's max_steps to warm up in, to steps."""
    count = value
    longest = given.count("max_steps", 0)
    is_warmup = setting == "optim.warmup_steps"
    if is_warmup and isinstance(value, float) and 0 <= value < 1:
        if not longest:
            return Copy(without="a share of the run: give optim.warmup_steps")
        count = math.ceil(value * longest)
    if type(count) is not int:
        return Copy(without="a number of steps here")
    if count < 0:
        return Copy(without=f"{count} means that it is not set")
    steps = -(-count // given.updates)
    changed = given.updates > 1 or count != value
    return Copy(line=_line(setting, steps), divided=(value, steps) if changed else None)


def _line(setting: str, value: Any) -> str:
    """Return section.key=value as a word of the command line; "" for a value that no setting has."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    try:
        text = value if isinstance(value, str) else quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError):
        return ""
    return shlex.quote(f"{setting}={text}")


def _dotted(path: KeyPath) -> str:
    """Return a path as people write it: reward.functions[0].use."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return truncate("".join(parts).removeprefix("."))


# ---- what a setting may be ----


def fields_of(*path: str) -> dict[str, Kind]:
    """Return the fields of the section at `path` (of all settings without one), and what each may be; {} elsewhere."""
    walked, kind = _walk(path)
    return _fields(kind) if walked == path else {}


def _fields(kind: Kind) -> dict[str, Kind]:
    return _followed(kind).get("properties", {})


def _followed(kind: Kind) -> Kind:
    """Return what a schema refers to; an optional section, or list, is the section or the list."""
    options = [option for option in kind.get("anyOf", ()) if option.get("type") != "null"]
    kind = options[0] if len(options) == 1 else kind
    return schema()["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _walk(loc: KeyPath) -> tuple[KeyPath, Kind]:
    """Return the part of an error's location that names a setting (no alternatives of a union), and its kind."""
    kind = schema()
    for depth, part in enumerate(loc):
        whole = _followed(kind)
        of_all = None if part == "[key]" else whole.get("items") or whole.get("additionalProperties")
        inner = whole.get("properties", {}).get(part) or of_all
        if not inner:
            return loc[:depth], kind
        kind = inner
    return loc, kind


def allowed(kind: Kind, *, brief: bool = False) -> str:
    """Return what a setting may be, in words: "auto or a whole number of at least 1". brief: without limits as far as
    FAR, which only keep out nonsense.
    """
    return or_list(_words(kind, brief=brief))


def _words(kind: Kind, *, brief: bool = False) -> list[str]:
    if fields := [*_fields(kind)]:
        return [f"{{{', '.join(fields[:2])}{', ...' if len(fields) > 2 else ''}}}"]
    if "anyOf" in kind:
        return [word for option in kind["anyOf"] for word in _words(option, brief=brief)]
    if "const" in kind or "enum" in kind:
        return kind.get("enum") or [kind["const"]]
    if kind["type"] == "object":
        return ["a mapping"]
    if kind["type"] == "array":
        item = allowed(kind["items"], brief=brief)
        items = re.sub(r"^a (whole )?number", r"\1numbers", item)
        return [f"a list of {items}"]
    bounds = [name for name in LIMITS if name in kind and not (brief and abs(kind[name]) >= FAR)]
    limits = " and ".join(f"{LIMITS[name]} {kind[name]}" for name in bounds)
    if bounds == ["minimum", "maximum"]:
        limits = f"from {kind['minimum']} to {kind['maximum']}"
    return PLAIN.get(kind["type"]) or [f"{NUMBERS[kind['type']]} {limits}".rstrip()]


# ---- the page ----


def describe(section: str) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each field of a section; the fields of a list's items follow the list."""
    values: BaseModel = Config.model_fields[section].get_default(call_default_factory=True)
    rows = []
    for key, kind in fields_of(section).items():
        default = dump_plain({key: getattr(values, key)}).partition(":")[2].strip()
        marks = type(values).model_fields[key].metadata
        conditions = " and ".join(mark.full(section) for mark in marks if isinstance(mark, OnlyIf))
        only = f"; only if {conditions}" if conditions else ""
        rows.append((key, default, f"{kind['description']} ({allowed(kind, brief=True)}){only}"))
        for inner, item in _fields(kind.get("items", {})).items():
            default = "" if item.get("default") is None else str(item["default"])
            rows.append((f"{key}[].{inner}", default, f"{item['description']} ({allowed(item, brief=True)})"))
    return rows


def describe_settings(section: str | None = None, *, columns: int | None = None) -> str:
    """Return one section, or all, as YAML that a recipe may hold: name and default of each field, and its meaning, in
    lines of so many columns.
    """
    if section is not None and section not in SECTIONS:
        near = did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{truncate(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    lines = []
    for name in [section] if section else SECTIONS:
        users = [method for method, its in METHODS.items() if name in its.sections]
        about = f"{Config.model_fields[name].description}{f' (read by {and_list(users)})' if users else ''}"
        lines.append(hang(about, columns, start=f"{name}:  # ", indent=" " * len(name) + "   # "))
        for key, default, meaning in describe(name):
            setting = f"{'# ' if '[]' in key else ''}{key}: {default}"
            lines.append(hang(meaning, columns, start=f"  {setting:30}  # ", indent=" " * 34 + "# "))
    return "\n".join(lines)
