"""How the value of another library's name is read: each reader returns what to write in place of the name.

A reader is called with the setting that the name is here, the value, and all the names that were given beside it. The
plain one writes the value as it is; a few need several names: TRL's sizes of a batch, its optimizer steps, its KL.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, is_method
from tinyrl.config.settings import fields_of
from tinyrl.config.yaml_reader import quoted
from tinyrl.text import truncate

DEFAULT_SIZES = {  # TRL's
    "num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_mini_batches": 1
}  # fmt: skip
TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow")
FUNCTION = re.compile(r"[\w./-]+:\w+")  # FILE.py:FUNCTION, where YAML needs no quotes
IN_A_MODULE = re.compile(r"\w+(\.\w+)+")
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Copy:
    """What to write in place of another library's name. line: words of the command line, "" where there are none;
    without: why something of it is not written, in few words (is_needless: nothing is lost by that); brings: words for
    defaults that the name has there, written where nothing else gives their settings; divided: the count of optimizer
    steps that was given and the steps that it is; counted: a sum that led to the line; is_switch: it says less than the
    value of the setting itself.
    """

    line: str = ""
    without: str = ""
    is_needless: bool = False
    brings: str = ""
    divided: tuple[object, int] | None = None
    counted: str = ""
    is_switch: bool = False


@dataclass(frozen=True)
class ForeignNames:
    """Names of other libraries that were given together, with their values (a dotted one by the end that the table
    has), and the method that is trained. ours: the settings that were given beside them.
    """

    method: object
    values: Mapping[str, Any]
    ours: frozenset[str] = frozenset()

    def count(self, name: str, default: int) -> int:
        """Return a value that is a whole number above 0, else TRL's default."""
        value = self.values.get(name)
        return value if type(value) is int and value > 0 else default

    def has(self, *names: str) -> bool:
        """Return whether one of the names was given."""
        return any(name in self.values for name in names)

    def assumed(self, *names: str) -> str:
        """Return those of TRL's defaults that take the place of sizes which are not given, behind a comma."""
        left_out = list[str]()
        if "generation_batch_size" in self.values:
            left_out = ["per_device_train_batch_size", "gradient_accumulation_steps"]
        elif "steps_per_generation" in self.values:
            left_out = ["gradient_accumulation_steps"]
        wanted = [name for name in names if name not in self.values and name not in left_out]
        return f", with TRL's {', '.join(f'{name}={DEFAULT_SIZES[name]}' for name in wanted)}" if wanted else ""

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


def is_above_zero(value: Any) -> bool:
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
class Strategy:
    """Read when there are evaluations or checkpoints; off: the words for none."""

    off: str

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if value in ("no", False):  # YAML 1.1 reads no as false
            return Copy(line=self.off)
        if value in ("steps", "epoch"):
            return Copy(without=f"every {setting} steps", is_needless=True)
        return _unread(setting, value)


@dataclass(frozen=True)
class Option:
    """Write an option of the command line; is_flag: one without a value, where the value is true."""

    option: str
    is_flag: bool = False

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if self.is_flag:
            return Copy(line=self.option) if value is True else Copy(without="it is off", is_needless=True)
        if not isinstance(value, str):
            return _unread(setting, value)
        return Copy(line=shlex.join([self.option, value]))


@dataclass(frozen=True)
class NotCopied:
    """Write nothing, as the value says something else than the setting's."""

    why: str

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        return Copy(without=self.why)


@dataclass(frozen=True)
class Column:
    """Write the old name of a column beside its name here."""

    name: str

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if value == self.name:
            return Copy(without="it has that name here", is_needless=True)
        return as_text(f"{setting}.{self.name}", value, given)


def as_text(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write a text as it is."""
    return as_given(setting, value, given) if isinstance(value, str) else _unread(setting, value)


def modules(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write a list of modules, of one too, or apart by commas; all-linear is a word."""
    if isinstance(value, str) and value != "all-linear":
        value = [name.strip() for name in value.split(",")]
    return as_given(setting, value, given)


def lora_rank(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Read OpenRLHF's rank 0 as training of every weight."""
    return Copy(line="lora.enabled=false") if value == 0 else as_given(setting, value, given)


def trackers(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write a list of trackers; what is printed to the console and to files is there without one."""
    names = value if isinstance(value, list) else [value]
    wanted = [name for name in names if name not in ("none", "console", "file")]
    if unknown := [name for name in wanted if name not in TRACKERS]:
        return _unread(setting, unknown[0])
    return Copy(line=shlex.quote(f"{setting}=[{', '.join(wanted)}]"))


def missing_eos_penalty(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Read the one penalty that there is for a truncated completion."""
    return Copy(line=f"{setting}=penalize") if value == 1 else Copy(without="penalize subtracts 1")


def first_step_too(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Read a switch of the evaluation before the first step, which is made here."""
    return Copy(without="it is always made", is_needless=value is True)


# ---- readers that need several names ----


def adam_betas(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write AdamW's two betas: a list of them, or TRL's two numbers, with its default for one that is not given."""
    pair = [given.values.get("adam_beta1", 0.9), given.values.get("adam_beta2", 0.999)]
    betas = value if isinstance(value, list) else pair
    is_number = [isinstance(beta, int | float) and not isinstance(beta, bool) for beta in betas]
    return as_given(setting, betas, given) if all(is_number) else _unread(setting, value)


@dataclass(frozen=True)
class KlSwitch:
    """Read whether there is a KL in the loss (k3), or in the reward (k1). Without the other it is the only one.

    other: the switch and the coefficients of the KL that is elsewhere.
    """

    estimator: str
    other: tuple[str, ...]

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if value is True:
            return Copy(line=f"{setting}={self.estimator}", is_switch=True)
        if value is not False:
            return _unread(setting, value)
        if any(given.values.get(name) not in (None, False) for name in self.other):
            return Copy(without="there is another KL", is_needless=True)
        return Copy(line=f"{under_method('grpo.kl_coef', given.method)}=0", is_switch=True)


@dataclass(frozen=True)
class OfKl:
    """Read a part of a KL, which there is not where its switch is off."""

    switch: str
    read: Reader

    def __call__(self, setting: str, value: Any, given: ForeignNames) -> Copy:
        if given.values.get(self.switch) is False:
            return Copy(without=f"{self.switch} is false", is_needless=True)
        return self.read(setting, value, given)


def epochs(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write TRL's epochs, which do not count beside its max_steps or total_episodes."""
    for other in ("max_steps", "total_episodes"):
        if is_above_zero(given.values.get(other)):
            return Copy(without=f"{other} is given", is_needless=True)
    return as_given(setting, value, given)


def total_episodes(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Convert completions of a whole run to steps."""
    if not is_above_zero(value):
        return _unread(setting, value)
    steps = math.ceil(value / given.of_update)
    counted = f"{value} completions are {steps} steps of {given.of_update}"
    return Copy(line=written(setting, steps), counted=f"{setting} is counted: {counted}")


def in_steps(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Convert a count of optimizer steps to steps; of a warm-up a number below 1 is a share of the run."""
    if setting == "optim.warmup_steps" and isinstance(value, float) and 0 <= value < 1:
        return share_of_run(setting, value, given)
    count = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(count) is not int:
        return Copy(without="a number of steps here")
    if count < 0:
        return Copy(without=f"{count} means that it is not set", is_needless=True)
    return _divided(setting, value, count, given)


def share_of_run(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Convert a share of TRL's max_steps, of which 1 is all, to steps."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return Copy(without="a share of the run, from 0 to 1")
    longest = given.count("max_steps", 0)
    if value and not longest:
        return Copy(without=f"a share of the run: give {setting}")
    return _divided(setting, value, math.ceil(value * longest), given)


def _divided(setting: str, value: Any, count: int, given: ForeignNames) -> Copy:
    """Write `count` optimizer steps, which the value is, as steps."""
    steps = -(-count // given.updates)
    changed = given.updates > 1 or count != value
    return Copy(line=written(setting, steps), divided=(value, steps) if changed else None)


def batch_size(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Return the sizes of a step with as many completions as TRL's batch, with its defaults for what is not given."""
    section = METHODS[str(given.method)].section if is_method(given.method) else "grpo"
    if section == "grpo":
        return _sizes_of_grpo(given)
    if section == "ppo":
        return _sizes_of_ppo(given)
    size = "batch_size" if "batch_size" in fields_of(section) else "num_prompts"
    return Copy(line=f"{section}.{size}={given.of_update}")


def _sizes_of_grpo(given: ForeignNames) -> Copy:
    update = given.of_update
    rollout = given.of_rollout
    group = given.count("num_generations", 8)
    prompts, rest = divmod(rollout, group)
    if rest:
        return Copy(without=f"{rollout} completions are not a whole number of groups of {group}")
    line = f"grpo.num_prompts={prompts}"
    counted = f"grpo.num_prompts is counted: {rollout} completions of a rollout are {prompts} prompts x {group}"
    if update < rollout:
        line += f" grpo.minibatch_size={update}"
        counted += f", {update} of them for each optimizer step"
    names = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
    return Copy(line=line, counted=counted + given.assumed(*names))


def _sizes_of_ppo(given: ForeignNames) -> Copy:
    rollout = given.of_update
    group = given.count("num_generations", 1)
    parts = given.count("num_mini_batches", 1)
    prompts, rest = divmod(rollout, group)
    if rest:
        return Copy(without=f"{rollout} completions are not a whole number of groups of {group}")
    if rollout % parts:
        return Copy(without=f"{rollout} completions are not {parts} minibatches of the same size")
    minibatch = "null" if parts == 1 else rollout // parts
    in_parts = f", in {parts} minibatches" if parts > 1 else ""
    counted = f"ppo.num_prompts is counted: {rollout} completions of a step{in_parts}"
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
    return Copy(
        line=f"ppo.num_prompts={prompts} ppo.minibatch_size={minibatch}", counted=counted + given.assumed(*names)
    )


def num_mini_batches(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Leave the number of minibatches to the line of the sizes, of which one is needed to count."""
    if given.has("per_device_train_batch_size", "gradient_accumulation_steps"):
        return Copy()
    return Copy(without="sequences of a minibatch here")


def verls_minibatch(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Convert verl's prompts of a minibatch to sequences."""
    group = given.count("rollout.n", given.count("rollout_n", 1))
    if type(value) is not int:
        return _unread(setting, value)
    counted = f"{setting} is counted: {value} prompts x {group} completions" if group > 1 else ""
    return Copy(line=written(setting, value * group), counted=counted)


def train_batch_size(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write verl's prompts of a step, or OpenRLHF's completions of an optimizer step, by the names beside it."""
    minibatch = under_method("grpo.minibatch_size", given.method)
    if not minibatch:  # of sft, reward or dpo: rows of an optimizer step in both
        return as_given(setting, value, given)
    if given.has("rollout_batch_size"):
        return as_given(minibatch, value, given)
    if given.has("ppo_mini_batch_size", "rollout.n", "adv_estimator"):
        return as_given(setting, value, given)
    return Copy(without="prompts in verl, completions of an optimizer step in OpenRLHF")


def clip_low_high(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write OpenRLHF's two clips."""
    if not isinstance(value, list) or len(value) != 2:
        return _unread(setting, value)
    low = as_given(setting, value[0], given)
    high = under_method("grpo.clip_eps_high", given.method)
    if high:
        return Copy(line=f"{low.line} {written(high, value[1])}")
    return low if value[0] == value[1] else Copy(without=f"{setting} is one for both sides")


def critic_path(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write a critic that is a model of its own; one that starts from the policy's model has no path."""
    models = ("model", "model_name_or_path", "actor_rollout_ref.model.path", "pretrain", "sft_model_path")
    if value in [given.values[name] for name in models if name in given.values]:
        return Copy(without="the critic starts from model.path", is_needless=True)
    line = as_text(setting, value, given)
    return replace(line, line=f"critic.kind=separate {line.line}") if line.line else line


def server_url(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Add the engine, without which the address has no effect."""
    line = written(setting, value)
    return Copy(line=f"generation.engine=server {line}") if line else _unread(setting, value)


def server_host(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Make the address of TRL's host and port."""
    host = "127.0.0.1" if value == "0.0.0.0" else value  # noqa: S104  all addresses of that machine
    port = given.count("vllm_server_port", 8000)
    if given.has("vllm_server_base_url"):
        return Copy(without="vllm_server_base_url is given", is_needless=True)
    return server_url(setting, f"http://{host}:{port}", given)


def server_port(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Leave the port to the line of the host."""
    if given.has("vllm_server_host", "vllm_server_base_url"):
        return Copy()
    return server_host(setting, "127.0.0.1", given)


def dataset(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write a data set with its configuration and its split, which have names of their own there."""
    if not isinstance(value, str):
        return _unread(setting, value)
    split = given.values.get("dataset_train_split", given.values.get("prompt_split"))
    return as_given(setting, _with_parts(value, given.values.get("dataset_config"), split), given)


def test_split(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write the split of the data set that is held out."""
    name = given.values.get("dataset_name")
    if not isinstance(name, str) or not ON_THE_HUB.fullmatch(name):
        return Copy(without="a split of a data set: owner/name:config@split")
    return as_given(setting, _with_parts(name, given.values.get("dataset_config"), value), given)


def _with_parts(name: str, config: object, split: object) -> str:
    """Return the name of a data set of the hub with its configuration and its split; any other name as it is."""
    if not ON_THE_HUB.fullmatch(name):
        return name
    of_config = f":{config}" if config else ""
    of_split = f"@{split}" if split else ""
    return f"{name}{of_config}{of_split}"


def part_of_dataset(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Leave a configuration or a split to the line of the data set."""
    if given.has("dataset_name", "prompt_data"):
        return Copy()
    return Copy(without="a part of a data set: owner/name:config@split")


def reward_functions(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Write functions, by file or module, with TRL's weights; a name of the hub is a reward model."""
    names = value if isinstance(value, list) else [value]
    weights = given.values.get("reward_weights")
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [1.0] * len(names)
    functions = list[str]()
    lines = list[str]()
    others = list[str]()
    for name, weight in zip(names, weights, strict=True):
        use = name if isinstance(name, str) else ""
        if IN_A_MODULE.fullmatch(use) and not use.endswith(".py"):
            use = ":".join(use.rsplit(".", 1))
        if FUNCTION.fullmatch(use):
            functions.append(f"{{use: {use}}}" if weight == 1 else f"{{use: {use}, weight: {weight}}}")
        elif ON_THE_HUB.fullmatch(use) and not use.endswith(".py") and weight == 1 and not lines:
            lines.append(f"reward.model={use}")
        else:
            others.append(truncate(str(name)))
    if functions:
        lines.insert(0, shlex.quote(f"{setting}=[{', '.join(functions)}]"))
    without = f"{', '.join(others)}: give FILE.py:FUNCTION or MODULE:FUNCTION" if others else ""
    return Copy(line=" ".join(lines), without=without)


def reward_weights(setting: str, value: Any, given: ForeignNames) -> Copy:
    """Leave the weights to the line of the functions."""
    return Copy() if given.has("reward_funcs") else Copy(without="weights of reward.functions")
