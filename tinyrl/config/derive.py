"""From what was given to the whole configuration, in which settings follow from others (rules.py).

A setting that was given keeps its value. One that follows from others is derived anew whenever one of those is given
another value: a fork under another preset has all fields of that preset, but those that somebody gave. Nothing else of
a run's configuration is derived anew, so a resume without overrides is of config.yaml as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from tinyrl.config.conflicts import conflicts, contradictions
from tinyrl.config.effect import given_settings, without_effect
from tinyrl.config.explain import explain, is_foreign
from tinyrl.config.foreign_names import alias_of, answer_of
from tinyrl.config.given import Given, apply_overrides, override_value, settings_in
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.refusal import Places, Refusal, Source, raise_first, refusals_at
from tinyrl.config.removed import REMOVED, ignore_neutral, with_newer
from tinyrl.config.rules import RULES, FactsOf, ModelFacts, no_facts, with_rules
from tinyrl.config.schema import Config
from tinyrl.config.settings import fields_of
from tinyrl.process.errors import UnknownSettings
from tinyrl.text import truncate

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
        is_other = section in OPTIONAL_SECTIONS and section not in METHODS[method].sections
        is_value = not name and not isinstance(override_value(setting, text, setting), dict | list | None)
        if section == "method" or (is_other and not is_value):  # of TRL: reward_model=NAME
            if setting in REMOVED:  # whatever is trained
                raise REMOVED[setting].refusal(setting, text)
            alias = alias_of(setting.split("."))
            if alias is not None and name and name not in fields_of(section):  # verl's reward_model.enable
                raise Refusal((setting,), answer_of(alias, method).as_sentence(setting, alias, method))
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
    there = Given(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        sentences = explain(error, values, given, missing=missing)
        has_unknown = any(is_foreign(one) for one in error.errors(include_url=False))
        raise (UnknownSettings if has_unknown else ValueError)(sentences) from None
    of_model = facts(config)
    config = with_rules(config, there=there, given=given, facts=of_model, changed=changed)
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
