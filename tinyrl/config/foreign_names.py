"""Names of other libraries (aliases.py): the setting that each is here, and the line to copy in their place."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyrl.config.aliases import ALIASES, BATCH, LINES, NOT_IN_THE_LINE, OF_METHOD, OPTIMIZER_STEPS, OPTIONS
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method
from tinyrl.config.settings import SECTIONS, fields_of
from tinyrl.config.yaml_reader import parse_plain, quoted
from tinyrl.text import truncate

DOTTED = re.compile(r"\b[a-z_]+\.[a-z_]+\b")  # a setting in a text, or the name of a file
HOW_WRITTEN = "Settings are written section.key=value"
PLACEHOLDER = "VALUE"
SWITCHES = ("use_kl_loss", "use_kl_in_reward")  # that say less than a setting's own value
RANKS = ("lora_rank", "lora_r")  # 0: every weight is trained


@dataclass(frozen=True)
class Copy:
    """What to write in place of another library's name. line: words of the command line, "" where there are none;
    without: why, in few words; divided: the count of optimizer steps that was given and the steps that it is.
    """

    line: str = ""
    without: str = ""
    divided: tuple[object, int] | None = None


@dataclass(frozen=True)
class ForeignNames:
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


# ---- the setting that a name is ----


@dataclass(frozen=True)
class Counterpart:
    """What another library's name is under a method: a setting, with a remark behind it, or the reason why there is
    none (is_needless: nothing has to be set), or a matter of other methods.
    """

    setting: str = ""
    remark: str = ""
    reason: str = ""
    is_needless: bool = False
    others: tuple[str, ...] = ()

    @property
    def of_others(self) -> str:
        """Return the methods that have such a setting, in words."""
        return and_list([f"`train {name}`" for name in self.others])

    def as_sentence(self, name: str, alias: str, method: object) -> str:
        """Answer a name, of which the alias is the end."""
        if self.others:
            return f"`{name}` is not a setting of `train {method}`: it is one of {self.of_others}"
        if self.reason:
            return f"`{name}` is not a setting: {self.reason}"
        return f"`{name}` is not a setting: `{alias}` is `{self.setting}` here{self.remark}"

    def in_words(self, name: str, alias: str, method: object) -> str:
        """Answer a name in a list of many."""
        if self.others:
            return f"`{name}` is of {self.of_others}, not of `train {method}`"
        if self.reason:
            return f"`{name}` {self.state}: {self.reason}"
        return f"`{name}` is `{self.setting}`{self.remark if alias in BATCH else ''}"

    @property
    def state(self) -> str:
        return "is not needed" if self.is_needless else "cannot be set"

    def without_line(self, method: object) -> str:
        """Return why no setting is in the line to copy."""
        return f"not of `train {method}`" if self.others else self.state.removeprefix("is ")


def answer_of(alias: str, method: object) -> Counterpart:
    """Return what another library's name is under a method."""
    answer = _answer_under(alias, method)
    if answer is not None:
        return answer
    return Counterpart(others=tuple(name for name in METHODS if _answer_under(alias, name) is not None))


def _answer_under(alias: str, method: object) -> Counterpart | None:
    """Return the answer in the settings of a method; None where it is about settings that the method lacks."""
    text = OF_METHOD.get(alias, {}).get(str(method), ALIASES[alias])
    if text.startswith(("!", "#")):
        reason = _in_terms_of(text[1:], method)
        return None if reason is None else Counterpart(reason=reason, is_needless=text.startswith("!"))
    written_setting = re.split(r"[^\w.-]", text)[0]
    setting = _for_method(written_setting, method)
    if not setting:
        return None
    remark = _in_terms_of(text.removeprefix(written_setting), method)
    return Counterpart(setting=setting, remark=remark or "")


def _in_terms_of(text: str, method: object) -> str | None:
    """Return a text with the settings that it names as those of a method; None where the method lacks one of them."""
    named = [name for name in DOTTED.findall(text) if name.partition(".")[0] in SECTIONS]
    if not all(_for_method(name, method) for name in named):
        return None
    return DOTTED.sub(lambda found: _for_method(found[0], method) if found[0] in named else found[0], text)


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
    if name in OPTIONS:
        return f"That is {shlex.join([OPTIONS[name], text or PLACEHOLDER])}"
    line = ""
    if name not in BATCH:  # one of several sizes that are one here
        line = copy_of(name, answer.setting, _value_of_option(name, text), ForeignNames(method, {})).line
    return f"{HOW_WRITTEN}: {line}" if line else answer.as_sentence(name, name, method)


def _value_of_option(name: str, text: str | None) -> Any:
    """Return the value of an option; a flag is true where the name is a switch."""
    if text is None:
        return True if "true" in LINES.get(name, {}) else PLACEHOLDER
    try:
        return parse_plain(text, name)
    except ValueError:
        return text


def _for_method(setting: str, method: object) -> str:
    """Return a setting, or that of the same name in the method's own section; "" where the method has none."""
    section, _, key = setting.partition(".")
    if section not in OPTIONAL_SECTIONS or not is_method(method):
        return setting
    its = METHODS[str(method)]
    if section in its.sections:
        return setting
    is_shared = key in fields_of(its.section) and key != "preset"  # whose values are each method's own
    return f"{its.section}.{key}" if is_shared else ""


# ---- the line to copy ----


def lines_to_copy(copies: Mapping[str, Copy], given: ForeignNames, missing: Sequence[str]) -> list[str]:
    """Return the line to copy in place of names, after what was converted for it, what is not in it and what to add; []
    without one. missing: settings that a run of one's own needs besides.
    """
    by_setting = dict[str, str]()
    switches_first = sorted(copies, key=lambda name: name not in SWITCHES)
    for name in switches_first:  # the last line of a setting stands: a value says more than a switch
        if line := copies[name].line:
            by_setting[line.partition("=")[0]] = line
    in_order = dict.fromkeys(copy.line for copy in copies.values())
    words = " ".join(line for line in in_order if line in by_setting.values())
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


def copy_of(alias: str, setting: str, value: Any, given: ForeignNames) -> Copy:
    """Return what to write in place of another library's name with its value."""
    shown = truncate(value if isinstance(value, str) else repr(value))
    of_itself = Copy(without=f"{shown}: see {setting}")
    if alias in OPTIONS:
        return Copy(line=shlex.join([OPTIONS[alias], value])) if isinstance(value, str) else of_itself
    if alias in NOT_IN_THE_LINE and str(given.method) not in OF_METHOD.get(alias, {}):
        return Copy(without=NOT_IN_THE_LINE[alias])
    if alias in BATCH:
        return _batch(given)
    if alias in RANKS and value == 0:
        return Copy(line="lora.enabled=false")
    without = _without_effect(alias, setting, value, given)
    if without:
        return Copy(without=without)
    if alias in LINES:
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool) else ""
        line = LINES[alias].get(text.removeprefix("torch."), "")
        setting, _, text = line.partition("=")
        setting = _for_method(setting, given.method)
        return Copy(line=shlex.quote(f"{setting}={text}")) if setting else of_itself
    if alias in OPTIMIZER_STEPS or alias == "warmup_ratio":
        return in_steps(alias, setting, value, given)
    line = written(setting, value)
    own_weight = "use_bias_correction_kl" in given.values
    if alias == "beta" and setting == "grpo.kl_coef" and _above_zero(value) and not own_weight:
        line += " grpo.kl_unbiased=true"  # TRL's default
    if alias == "vllm_server_base_url" and line:
        line = f"generation.engine=server {line}"  # without which the address has no effect
    return Copy(line=line) if line else of_itself


def _without_effect(alias: str, setting: str, value: Any, given: ForeignNames) -> str:
    """Return why the setting of a name would be refused or idle beside the other names; "" where it counts."""
    if alias == "num_train_epochs" and _above_zero(given.values.get("max_steps")):
        return "max_steps is given"
    if alias == "use_bias_correction_kl" and not _above_zero(given.values.get("beta")):
        return "there is no KL without beta"
    tracked = LINES["report_to"].get(str(given.values.get("report_to")), "run.trackers=[]") != "run.trackers=[]"
    if setting.startswith("lora.") and any(given.values.get(rank) == 0 for rank in RANKS):
        return "there is no LoRA"
    if alias == "log_completions" and value is True and not tracked:
        return "there is no tracker without report_to"
    return ""


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _batch(given: ForeignNames) -> Copy:
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


def in_steps(name: str, setting: str, value: Any, given: ForeignNames) -> Copy:
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
    return Copy(line=written(setting, steps), divided=(value, steps) if changed else None)


def written(setting: str, value: Any) -> str:
    """Return section.key=value as a word of the command line; "" for a value that no setting has."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    try:
        text = value if isinstance(value, str) else quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError):
        return ""
    return shlex.quote(f"{setting}={text}")
