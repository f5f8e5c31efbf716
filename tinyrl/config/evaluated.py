"""Configurations that are made of another one's sections, to evaluate a policy or to talk to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import ModelConfig, ReferenceConfig, RewardConfig, Section, TaskConfig, starter_path

RENDERING = ("chat", "system_prompt", "chat_template_kwargs")  # task settings that belong to the model
OWN_SAMPLING = ("engine", "max_rows", "url")  # how a model is run, not what is sampled


def with_sections(config: Config, **sections: Section) -> Config:
    """Return a configuration with other sections. Raises ValueError where they conflict with the rest."""
    values: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    return build_config(values | sections)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return a configuration with `section.key=value` laid over it; what nobody has given is chosen anew."""
    return build_config(config.model_dump(exclude_unset=True), overrides)


def of_model(path: str, *, task: str = "rows") -> Config:
    """Return the configuration of a model that no run has trained."""
    values = {"model": ModelConfig(path=path), "reference": ReferenceConfig(kind="none"), "task": TaskConfig(name=task)}
    return build_config({"method": "grpo", **values})


def as_policy(config: Config) -> Config:
    """Return a grpo configuration of the policy that any method has trained, to sample and score it."""
    own_reference = "none" if config.model.random_init else config.reference.kind
    values: dict[str, Any] = {
        "method": "grpo",
        "model": config.model,
        "lora": config.lora.model_copy(update={"dropout": 0.0}),
        "reference": ReferenceConfig(kind=own_reference),
        "task": config.task,
        "run": config.run.model_copy(update={"trackers": []}),
    }
    if config.samples:
        values |= {"generation": config.generation, "environment": config.environment, "reward": config.reward}
    return build_config(values)


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
    """Return the configuration that samples from a run's teacher. Raises ValueError where it is no adapter or model."""
    path = config.teacher.path
    kind = config.teacher.kind
    if not config.uses("teacher") or path is None or kind not in ("adapter", "model"):
        raise ValueError(f"--vs teacher: teacher.path={path} of this run is no adapter and no model to sample")
    model = {"path": path, "adapter": None, "revision": None}
    if kind == "adapter":
        model = {"adapter": str(starter_path(path) or path)}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})
