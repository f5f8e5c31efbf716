"""From what was given to the whole configuration: the settings whose values follow from others, and their rules.

A setting that was given keeps its value. One that follows from others is derived anew whenever one of those is given
another value: a fork under another preset has all fields of that preset, but those that somebody gave. Nothing else of
a run's configuration is derived anew, so a resume without overrides is of config.yaml as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from tinyrl.config.conflicts import conflicts, contradictions
from tinyrl.config.effect import given_settings, without_effect
from tinyrl.config.explain import UNKNOWN, explain
from tinyrl.config.given import Given, apply_overrides, settings_in
from tinyrl.config.method_sections import PPO_PRESETS, PRESETS, GrpoConfig, PpoConfig, Presets
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.refusal import Places, Refusal, Source, raise_first, refusals_at
from tinyrl.config.removed import REMOVED, ignore_neutral, with_newer
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig, GenerationConfig, Section
from tinyrl.config.settings import fields_of
from tinyrl.process.errors import UnknownSettings
from tinyrl.text import truncate

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


# ---- the rules, in the order in which they are applied ----


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


# ---- a new run ----


def derive(given: Given, facts: FactsOf = no_facts, *, missing: Sequence[str] = ()) -> Config:
    """Return the whole configuration of a new run.

    Raises ValueError, with the place, for what is not a value of its setting, settings that conflict or contradict each
    other, and an override that has no effect or is of another method. missing: settings that a run of one's own needs
    besides, for the answer to unknown names.
    """
    config = _whole(given.values, given, facts, missing=missing)
    with refusals_at(config.given.places):
        _check_effect(config, given)
        raise_first(contradictions(config))
    return config


def with_num_steps(config: Config, *, rows: int, of_step: int) -> Config:
    """Return the configuration with the run.num_steps that run.epochs gives: passes over `rows` training rows,
    `of_step` of them a step. The configuration itself where run.epochs is null.
    """
    epochs = config.run.epochs
    if epochs is None:
        return config
    num_steps = math.ceil(Fraction(str(epochs)) * rows / of_step)
    return config.model_copy(update={"run": config.run.model_copy(update={"num_steps": num_steps})})


def check_overrides(method: str, overrides: Sequence[str]) -> None:
    """Raise Refusal for an override of a section that the method lacks; a recipe may hold those of others."""
    for override in overrides:
        setting, _, text = override.partition("=")
        section, _, name = setting.partition(".")
        if section == "method" or (section in OPTIONAL_SECTIONS and section not in METHODS[method].sections):
            if setting in REMOVED:  # whatever is trained
                raise REMOVED[setting].refusal(setting, text)
            own = METHODS[method].section
            meant = f" Did you mean `{own}.{name}`?" if name in fields_of(own) else ""
            raise Refusal((setting,), f"`{section}` is not a section of `train {method}`.{meant}")


def kept_against(config: Config, facts: FactsOf = no_facts) -> Iterator[str]:
    """Yield a sentence for each value below the overrides that stays where an override, such as of a preset, would give
    it another one.
    """
    given = config.given
    typed = {*given.typed}
    of_model = facts(config)
    for rule in RULES:
        section, _, name = rule.setting.partition(".")
        follows = typed & {*rule.reads}
        is_asked_for = follows and rule.setting not in typed
        if not is_asked_for or not config.uses(section) or rule.always or rule.fits_model:
            continue
        kept = getattr(getattr(config, section), name)
        follows_value = rule.value(config, of_model)
        if given.has(rule.setting, null_counts=rule.null_is_value) and kept != follows_value:
            override = given.places.override_of(min(follows))
            yield (
                f"{given.places.of([rule.setting])}: `{rule.setting}` stays {_shown(kept)}, where {override} alone "
                f"would give {_shown(follows_value)}"
            )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


# ---- a run, resumed or forked ----


def derive_over(config: Config, overrides: Sequence[str], facts: FactsOf = no_facts) -> Config:
    """Return the configuration of a run with overrides laid over what was given: what follows from them is derived
    anew, every other value stays. Raises ValueError as `derive` does, but contradictions without one of the values that
    are new are the run's own.
    """
    values = config.model_dump(include={"method", *_sections(config)})
    given = config.given
    if given.is_whole:
        given = replace(given, values=without_derived(values, facts), is_whole=False)
    given = replace(given, values={**given.values, "method": config.method}).over(overrides)
    with refusals_at(given.places):
        check_overrides(config.method, overrides)
    values = apply_overrides(values, overrides)
    changed = {*settings_in(apply_overrides({}, overrides))}
    whole = _whole(values, given, facts, changed=changed)
    with refusals_at(whole.given.places):
        _check_effect(whole, given)
        raise_first(found for found in contradictions(whole) if changed & {*found.settings})
    return whole


def rebuilt(values: dict[str, Any], overrides: Sequence[str] = (), facts: FactsOf = no_facts) -> Config:
    """Return the configuration of values that runs had, with overrides laid over them. What is absent is derived; what
    contradicts itself without an override was so before.
    """
    given = Given(values).over(overrides)
    config = _whole(given.values, given, facts)
    with refusals_at(config.given.places):
        _check_effect(config, given)
        raise_first(found for found in contradictions(config) if {*given.typed} & {*found.settings})
    return config


def _sections(config: Config) -> list[str]:
    return [name for name in type(config).model_fields if config.uses(name)]


def read_written(values: dict[str, Any], source: Source, given: Mapping[str, Any] | None) -> Config:
    """Return the configuration that a run's config.yaml, or a checkpoint, has. given: what was given to the run; None:
    it is of an earlier version, so a value that equals what its rule derives will count as derived.
    """
    config = _whole(with_newer(values), Given(values, Places(source)), no_facts)
    if given is None:
        return config.with_given(Given(values, Places(source), is_whole=True))
    return config.with_given(Given(ignore_neutral(dict(given)), Places(source)))


def without_derived(values: dict[str, Any], facts: FactsOf = no_facts) -> dict[str, Any]:
    """Return the values of a whole configuration without those that equal what their rules derive."""
    rest = {section: dict(own) if isinstance(own, dict) else own for section, own in values.items()}
    config = _whole(values, Given(values), no_facts)
    of_model = facts(config)
    for rule in RULES:
        section, _, name = rule.setting.partition(".")
        own = rest.get(section)
        if not isinstance(own, dict) or name not in own or not config.uses(section):
            continue
        if own[name] == rule.value(config, of_model):
            del own[name]
    if config.run.epochs is not None:  # which gives the number of steps
        rest["run"].pop("num_steps", None)
    return rest


# ---- both ----


def _whole(
    values: dict[str, Any],
    given: Given,
    facts: FactsOf,
    *,
    changed: set[str] | None = None,
    missing: Sequence[str] = (),
) -> Config:
    """Validate values, and derive those that are absent, and those that were not given and follow from `changed` ones,
    to which they are added then. Raises ValueError for values that are wrong, and for those that conflict.
    """
    is_new = changed is None
    changed = set() if changed is None else changed
    there = Given(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        model = values.get("model")
        has_adapter = isinstance(model, dict) and model.get("adapter") is not None
        sentences = explain(error, values.get("method"), given.places, missing=missing, has_adapter=has_adapter)
        has_unknown = any(one["type"] in UNKNOWN for one in error.errors(include_url=False))
        raise (UnknownSettings if has_unknown else ValueError)(sentences) from None
    of_model = facts(config)
    for rule in RULES:
        if not config.uses(rule.setting.partition(".")[0]):
            continue
        absent = not there.has(rule.setting, null_counts=rule.null_is_value)
        given_too = given.has(rule.setting, null_counts=rule.null_is_value) and not rule.always
        follows = not changed.isdisjoint(rule.reads) and not given_too
        if not (absent or follows or (is_new and rule.always)):
            continue
        value = rule.value(config, of_model)
        if rule.always and value is None:
            continue
        if value != attrgetter(rule.setting)(config):
            config = config.with_setting(rule.setting, value)
            changed.add(rule.setting)
    places = replace(given.places, follows=_follows(config, given, of_model))
    with refusals_at(places):
        raise_first(conflicts(config))
    return config.with_given(replace(given, places=places))


def _follows(config: Config, given: Given, facts: ModelFacts) -> dict[str, dict[str, str]]:
    """Return, for each setting that its rule gave another value than the default, the settings that it follows from,
    with their values.
    """
    found = dict[str, dict[str, str]]()
    for rule in RULES:
        section, _, name = rule.setting.partition(".")
        is_given = given.has(rule.setting, null_counts=rule.null_is_value) and not rule.always
        if is_given or not rule.reads or not config.uses(section):
            continue
        own = getattr(config, section)
        value = getattr(own, name)
        if value != type(own).model_fields[name].default and value == rule.value(config, facts):
            found[rule.setting] = {read: truncate(str(attrgetter(read)(config))) for read in rule.reads}
    return found


def _check_effect(config: Config, given: Given) -> None:
    """Raise Refusal for an override that has no effect."""
    for setting in given_settings(apply_overrides({}, given.places.overrides)):
        ineffective = without_effect(config, setting, override=given.places.override_of(setting))
        if ineffective is not None:
            raise ineffective
