"""Settings whose values follow from others: the rules, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from tinyrl.config.given import Given
from tinyrl.config.method_sections import PPO_PRESETS, PRESETS, GrpoConfig, PpoConfig, Presets
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig, GenerationConfig, Section

FULL_RATE = 1e-6  # of the policy; with LoRA, which starts at nothing, fifty times as much
LORA_RATE = 5e-5
FULL_CRITIC_RATE = 1e-5
LORA_CRITIC_RATE = 1e-4


@dataclass(frozen=True)
class AdapterFacts:
    """What the adapter_config.json of model.adapter says; target_modules: None for a pattern; target_parameters: None
    where no bare parameters have adapters.
    """

    r: int
    alpha: float
    target_modules: list[str] | None
    target_parameters: list[str] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What files of the models say. positions: of model.path, as its config.json has them; None: not known, as of a hub
    name.
    """

    positions: int | None = None
    adapter: AdapterFacts | None = None


FactsOf = Callable[[Config], ModelFacts]  # reads the files of the models that a configuration names


def no_facts(config: Config) -> ModelFacts:
    """Leave every model unread."""
    del config
    return ModelFacts()


@dataclass(frozen=True)
class Rule:
    """How a setting follows from others, which it `reads`. null_is_value: null is a value of it, and does not ask to
    derive it; always: in a new run it replaces what was given, which does not count then (value: None leaves that);
    fits_model: it is a default that fits the model, and any other value that was given is as good.
    """

    setting: str
    reads: tuple[str, ...]
    value: Callable[[Config, ModelFacts], Any]
    null_is_value: bool = False
    always: bool = False
    fits_model: bool = False


# ---- the rules ----


def _task_name(config: Config, facts: ModelFacts) -> str:
    return "rows"


def _preset_rules(section: type[Section], name: str, presets: Presets) -> Iterator[Rule]:
    """Yield a rule for each field that some preset has another value of than the section."""
    fields = dict.fromkeys(chain.from_iterable(presets.values()))  # in order, each once
    for field in fields:
        value = partial(_of_preset, name, field, section.model_fields[field].default, presets)
        yield Rule(f"{name}.{field}", (f"{name}.preset",), value, null_is_value=True)


def _of_preset(section: str, field: str, default: Any, presets: Presets, config: Config, facts: ModelFacts) -> Any:
    preset = getattr(config, section).preset
    return presets[preset].get(field, default)


def _critic_kind(config: Config, facts: ModelFacts) -> str:
    return "adapter" if config.lora.enabled else "separate"


def _learning_rate(config: Config, facts: ModelFacts) -> float:
    return LORA_RATE if config.lora.enabled else FULL_RATE


def _critic_learning_rate(config: Config, facts: ModelFacts) -> float | None:
    if not config.uses("critic"):
        return None
    return LORA_CRITIC_RATE if config.lora.enabled else FULL_CRITIC_RATE


def _beta(config: Config, facts: ModelFacts) -> float:
    return 2.0 if config.dpo.loss == "simpo" else 0.1


def _of_adapter(field: str, config: Config, facts: ModelFacts) -> Any:
    """Return what the adapter that is started from has already; None: there is none, or it does not say."""
    return getattr(facts.adapter, field, None)


def _max_new_tokens(config: Config, facts: ModelFacts) -> int:
    """Leave half of the model's positions to the prompt."""
    default = GenerationConfig.model_fields["max_new_tokens"].default
    if facts.positions is None or not config.samples:
        return default
    return min(default, facts.positions // 2)


def _max_observation_tokens(config: Config, facts: ModelFacts) -> int:
    """Give all observations of an episode a quarter of the model's positions."""
    default = EnvironmentConfig.model_fields["max_observation_tokens"].default
    if facts.positions is None or not config.samples:
        return default
    observations = max(1, config.environment.max_turns - 1)
    return min(default, max(1, facts.positions // 4 // observations))


RULES = (
    Rule("task.name", (), _task_name),
    *_preset_rules(GrpoConfig, "grpo", PRESETS),
    *_preset_rules(PpoConfig, "ppo", PPO_PRESETS),
    Rule("critic.kind", ("lora.enabled",), _critic_kind),
    Rule("optim.learning_rate", ("lora.enabled",), _learning_rate),
    Rule("optim.critic_learning_rate", ("lora.enabled",), _critic_learning_rate),
    Rule("dpo.beta", ("dpo.loss",), _beta),
    Rule("lora.r", ("model.adapter",), partial(_of_adapter, "r"), always=True),
    Rule("lora.alpha", ("model.adapter",), partial(_of_adapter, "alpha"), always=True),
    Rule("lora.target_modules", ("model.adapter",), partial(_of_adapter, "target_modules"), always=True),
    Rule("lora.target_parameters", ("model.adapter",), partial(_of_adapter, "target_parameters"), always=True),
    Rule("generation.max_new_tokens", ("model.path",), _max_new_tokens, fits_model=True),
    Rule(
        "environment.max_observation_tokens",
        ("model.path", "environment.max_turns"),
        _max_observation_tokens,
        fits_model=True,
    ),
)
READS = {rule.setting: rule.reads for rule in RULES}


def with_rules(
    config: Config, *, there: Given, given: Given, facts: ModelFacts, changed: set[str] | None = None
) -> Config:
    """Derive the settings of a configuration that are absent in `there`, and those that were not given and follow from
    `changed` ones, to which they are added then. changed: None in a new run.
    """
    is_new = changed is None
    changed = set() if changed is None else changed
    for rule in RULES:
        if not config.uses(rule.setting.partition(".")[0]):
            continue
        absent = not there.has(rule.setting, null_counts=rule.null_is_value)
        given_too = given.has(rule.setting, null_counts=rule.null_is_value) and not rule.always
        follows = not changed.isdisjoint(rule.reads) and not given_too
        if not (absent or follows or (is_new and rule.always)):
            continue
        value = rule.value(config, facts)
        if rule.always and value is None:
            continue
        if value != attrgetter(rule.setting)(config):
            config = config.with_setting(rule.setting, value)
            changed.add(rule.setting)
    return config
