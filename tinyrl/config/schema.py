"""The configuration of a run: its sections, and what depends on several of them.

Fields, with type, range and default, are in sections.py and method_sections.py. Defaults that depend on other fields (a
learning rate for LoRA or full fine-tuning) are None there and filled in by `Config`, so that config.yaml never holds a
blank that code has to guess. Nothing here imports torch, so `tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from tinyrl.config.conflicts import conflicts
from tinyrl.config.fields import Section
from tinyrl.config.method_sections import DpoConfig, GrpoConfig, PpoConfig, RewardModelConfig, SftConfig
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, MethodName, is_method
from tinyrl.config.sections import (
    URL_SETTINGS,
    CriticConfig,
    EnvironmentConfig,
    GenerationConfig,
    LoraSection,
    ModelConfig,
    OptimConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TaskConfig,
)
from tinyrl.text import hidden, masked


class Config(Section):
    """Everything a run is a function of. Sections the method does not use keep their defaults and are not written."""

    method: MethodName = Field(description="what trains")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the base model")
    lora: LoraSection = Field(default_factory=LoraSection, description="low-rank adapters on the frozen base")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="the policy to stay near to")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the value function of PPO")
    task: TaskConfig = Field(default_factory=TaskConfig, description="prompts, and where rows come from")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="what scores completions")
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, description="what answers the policy between its turns"
    )
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="sampling")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and learning rates")
    grpo: GrpoConfig = Field(default_factory=lambda: GrpoConfig.model_validate({}), description="GRPO and its family")
    ppo: PpoConfig = Field(default_factory=lambda: PpoConfig.model_validate({}), description="PPO")
    sft: SftConfig = Field(default_factory=SftConfig, description="supervised fine-tuning")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="learning a reward model from pairs, labels or ratings"
    )
    dpo: DpoConfig = Field(
        default_factory=lambda: DpoConfig.model_validate({}),
        description="a policy from pairs: DPO and its kin",
    )
    run: RunConfig = Field(default_factory=RunConfig, description="length, seed, evaluation, checkpoints")

    @model_validator(mode="before")
    @classmethod
    def _sections_of_method(cls, data: Any) -> Any:
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults."""
        if not isinstance(data, dict) or not is_method(data.get("method")):
            return data
        unused = {*OPTIONAL_SECTIONS} - {*METHODS[data["method"]].sections}
        return {
            key: {} if value is None and key != "method" else value for key, value in data.items() if key not in unused
        }

    @model_validator(mode="after")
    def _resolve(self) -> Config:
        full, optim = not self.lora.enabled, self.optim
        optim.learning_rate = optim.learning_rate or (1e-6 if full else 5e-5)
        if self.uses("critic"):
            optim.critic_learning_rate = optim.critic_learning_rate or (1e-5 if full else 1e-4)
            if self.critic.kind is None:
                self.critic.kind = "separate" if full or self.critic.path else "adapter"
                self.critic.model_fields_set.discard("kind")  # a run at critic.path decides, in runs/settle.py
        self.task.name = self.task.name or "rows"
        for problem in conflicts(self):
            raise ValueError(problem)
        return self

    def uses(self, section: str) -> bool:
        """Whether the method reads a section."""
        return section not in OPTIONAL_SECTIONS or section in METHODS[self.method].sections

    @property
    def has_reference(self) -> bool:
        """Whether the run keeps a reference."""
        wanted = self.uses("reference") and self.reference.kind == "auto"
        return wanted and (self.method != "dpo" or self.dpo.needs_reference)

    @property
    def on_policy(self) -> GrpoConfig | PpoConfig:
        """The section of a method that learns from its own samples."""
        return self.ppo if self.method == "ppo" else self.grpo

    def written(self) -> dict[str, Any]:
        """The sections that the method uses, as JSON values without secrets: what config.yaml and checkpoints hold."""
        values = self.model_dump(mode="json")
        return without_secrets({name: value for name, value in values.items() if self.uses(name)})


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Sections of settings without secrets: those of environment variables, and those in a URL."""
    shown = hidden(values)
    for section, name in URL_SETTINGS:
        part = shown.get(section)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            shown = {**shown, section: {**part, name: masked(part[name])}}
    return shown
