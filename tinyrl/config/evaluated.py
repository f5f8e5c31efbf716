"""Configurations that are made of another one's sections, to evaluate a policy or to talk to it."""

from __future__ import annotations

from typing import Any

from tinyrl.config.conflicts import conflicts
from tinyrl.config.derive import rebuilt
from tinyrl.config.refusal import raise_first
from tinyrl.config.rules import FactsOf
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardConfig, Section, TaskConfig, starter_path

RENDERING = ("chat", "system_prompt", "chat_template_kwargs")  # task settings that belong to the model
OWN_SAMPLING = ("engine", "max_rows", "url")  # how a model is run, not what is sampled


def with_sections(config: Config, **sections: Section) -> Config:
    """Return a configuration with other sections. Raises Refusal where they conflict with the rest."""
    changed = config.model_copy(update=sections)
    raise_first(conflicts(changed))
    return changed


def as_policy(config: Config, facts: FactsOf) -> Config:
    """Return a grpo configuration of the policy that any method has trained, to sample and score it."""
    own_reference = "none" if config.model.random_init else config.reference.kind
    own_sampling = {"generation", "environment", "reward"} if config.samples else set[str]()
    values = config.model_dump(include={"model", "lora", "task", "run", *own_sampling})
    values["lora"] |= {"dropout": 0.0}
    values["run"] |= {"trackers": []}
    return rebuilt({"method": "grpo", "reference": {"kind": own_reference}, **values}, facts=facts)


def with_task(config: Config, name: str) -> Config:
    """Return a configuration with another task and its verifier as the reward."""
    kept: dict[str, Any] = {setting: getattr(config.task, setting) for setting in RENDERING}
    return with_sections(config, task=TaskConfig(name=name, **kept), reward=RewardConfig())


def with_rows(config: Config, data: str) -> Config:
    """Return a configuration with other rows, all of which are held out."""
    rows = {"data": data, "eval_data": data, "max_samples": None, "revision": None}
    return with_sections(config, task=config.task.model_copy(update=rows))


def without_reward(config: Config) -> Config:
    """Return a configuration whose reward is to be given anew; only its time limit is kept."""
    return with_sections(config, reward=RewardConfig(timeout_s=config.reward.timeout_s))


def judged_by(first: Config, config: Config) -> Config:
    """Return the other side's configuration with the first one's rows, reward, environment and sampling."""
    own = {name: getattr(config.generation, name) for name in OWN_SAMPLING}
    generation = first.generation.model_copy(update=own)
    return with_sections(
        config, task=first.task, reward=first.reward, environment=first.environment, generation=generation
    )


def measured_by(first: Config, theirs: Config) -> Config:
    """Return the configuration by which the first one's trainer measures another side's model on the same rows. A
    reward model reads prompts as it has learnt to.
    """
    task = first.task
    if not theirs.trains.policy:
        task = task.model_copy(update={name: getattr(theirs.task, name) for name in RENDERING})
    return with_sections(first, model=theirs.model, lora=theirs.lora, task=task)


def base_of(config: Config) -> Config:
    """Return the configuration of the model below the adapter that a run starts from."""
    return config.model_copy(update={"model": config.model.model_copy(update={"adapter": None})})


def teacher_of(config: Config) -> Config:
    """Return the configuration that samples from a run's teacher.

    Raises ValueError if the teacher is not an adapter or a model.
    """
    path = config.teacher.path
    kind = config.teacher.kind
    if not config.uses("teacher") or path is None or kind not in ("adapter", "model"):
        raise ValueError(f"--vs teacher: teacher.path={path} of this run is neither an adapter nor a model to sample")
    model = {"path": path, "adapter": None, "revision": None}
    if kind == "adapter":
        model = {"adapter": str(starter_path(path) or path)}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})
