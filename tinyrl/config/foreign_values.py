"""How the value of another library's name is read: each reader returns what to write in place of the name.

A reader is called with the setting that the name is here, the value, and all the names that were given beside it. The
plain one writes the value as it is; a few need several names: TRL's sizes of a batch, its optimizer steps, its KL.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, is_method
from tinyrl.config.settings import fields_of
from tinyrl.config.yaml_reader import quoted
from tinyrl.text import truncate

RANKS = ("lora_rank", "lora_r")  # 0: every weight is trained
OF_THE_ADAPTER = ("lora.r", "lora.alpha", "lora.target_modules", "lora.target_parameters")
TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow")


@dataclass(frozen=True)
class Copy:
    """What to write in place of another library's name. line: words of the command line, "" where there are none;
    without: why, in few words; divided: the count of optimizer steps that was given and the steps that it is; counted:
    a sum that led to the line; is_switch: it says less than the value of the setting itself.
    """

    line: str = ""
    without: str = ""
    divided: tuple[object, int] | None = None
    counted: str = ""
    is_switch: bool = False


@dataclass(frozen=True)
class ForeignNames:
    """The unknown names that stand outside of any section, with their values, and the method that is trained.

    has_adapter: model.adapter is given, which brings its own rank, alpha and modules.
    """

    method: object
    values: dict[str, Any]
    has_adapter: bool = False

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

    def idle(self, setting: str) -> str:
        """Return why a setting would be refused or idle beside the other names; "" where it counts."""
        if setting.startswith("lora.") and any(self.values.get(rank) == 0 for rank in RANKS):
            return "there is no LoRA"
        if setting in OF_THE_ADAPTER and self.has_adapter:
            return "model.adapter brings its own"
        return ""


Reader = Callable[[str, Any, ForeignNames], Copy]


def under_method(setting: str, method: object) -> str:
    """Return a setting, or that of the same name in the method's own section; "" where the method has none."""
    section, _, key = setting.partition(".")
    if section not in OPTIONAL_SECTIONS or not is_method(method):
        return setting
    its = METHODS[str(method)]
    if section in its.sections:
        return setting
    is_shared = key in fields_of(its.section) and key != "preset"  # whose values are each method's own
    return f"{its.section}.{key}" if is_shared else ""


def written(setting: str, value: Any) -> str:
    """Return section.key=value as a word of the command line; "" for a value that no setting has."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    try:
        text = value if isinstance(value, str) else quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError):
        return ""
    return shlex.quote(f"{setting}={text}")


def _unread(setting: str, value: Any) -> Copy:
    shown = truncate(value if isinstance(value, str) else repr(value))
    return Copy(without=f"{shown}: see {setting}")


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


# ---- readers of one value ----


def as_given(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write the value as it is."""
    line = written(setting, value)
    return Copy(line=line) if line else _unread(setting, value)


@dataclass(frozen=True)
class Values:
    """Look the value up, as text, among those that are spelt otherwise here: in the setting that the name is, or in
    another one (section.key=value). is_switch: see Copy.
    """

    lines: Mapping[str, str]
    is_switch: bool = False

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool) else ""
        line = self.lines.get(text.removeprefix("torch."), "")
        if line and "=" not in line:
            line = f"{setting}={line}"
        own, _, spelt = line.partition("=")
        own = under_method(own, given.method)
        if not own:
            return _unread(setting, value)
        return Copy(line=shlex.quote(f"{own}={spelt}"), is_switch=self.is_switch)


@dataclass(frozen=True)
class Option:
    """Write an option of the command line."""

    option: str

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if not isinstance(value, str):
            return _unread(setting, value)
        return Copy(line=shlex.join([self.option, value]))


@dataclass(frozen=True)
class NotCopied:
    """Write nothing, as the value says something else than the setting's; but for methods under which it does not."""

    why: str
    but_for: tuple[str, ...] = ()

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if str(given.method) in self.but_for:
            return as_given(setting, value, given)
        return Copy(without=self.why)


def lora_rank(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Read OpenRLHF's rank 0 as training of every weight."""
    return Copy(line="lora.enabled=false") if value == 0 else as_given(setting, value, given)


def server_url(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Add the engine, without which the address has no effect."""
    line = written(setting, value)
    return Copy(line=f"generation.engine=server {line}") if line else _unread(setting, value)


# ---- readers that need several names ----


def kl_coef(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Add TRL's default use_bias_correction_kl=true where there is a KL in the loss of grpo."""
    copy = as_given(setting, value, given)
    adds_default = setting == "grpo.kl_coef" and _above_zero(value) and "use_bias_correction_kl" not in given.values
    return Copy(line=f"{copy.line} grpo.kl_unbiased=true") if adds_default and copy.line else copy


def kl_bias_correction(setting: str, value: Any, given: ForeignNames) -> Copy:
    if not _above_zero(given.values.get("beta")):
        return Copy(without="there is no KL without beta")
    return as_given(setting, value, given)


def epochs(setting: str, value: Any, given: ForeignNames) -> Copy:
    if _above_zero(given.values.get("max_steps")):
        return Copy(without="max_steps is given")
    return as_given(setting, value, given)


def log_completions(setting: str, value: Any, given: ForeignNames) -> Copy:
    if value is True and given.values.get("report_to") not in TRACKERS:
        return Copy(without="there is no tracker without report_to")
    return as_given(setting, value, given)


def in_steps(setting: str, value: Any, given: ForeignNames) -> Copy:
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


def batch_size(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Return the sizes of a step with as many completions as TRL's batch, with its defaults for what is not given."""
    section = METHODS[str(given.method)].section if is_method(given.method) else "grpo"
    update = given.of_update
    if section != "grpo":
        if "batch_size" in fields_of(section):
            return Copy(line=f"{section}.batch_size={update}")
        return Copy(without=f"see {section}.num_prompts")
    rollout = given.of_rollout
    group = given.count("num_generations", 8)
    prompts, rest = divmod(rollout, group)
    if rest:
        return Copy(without=f"{rollout} completions are not a whole number of groups of {group}")
    line = f"grpo.num_prompts={prompts}"
    counted = f"{rollout} completions of a rollout are {prompts} prompts x {group}"
    if update < rollout:
        line += f" grpo.minibatch_size={update}"
        counted += f", {update} of them for each optimizer step"
    return Copy(line=line, counted=counted)
