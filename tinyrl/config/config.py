"""The resolved configuration of a run: its sections together, what their defaults depend on, and what cannot go
together.

A `Config` is plain data: reading it back from config.yaml gives the same object. Everything that depends on another
field is filled in here, so that config.yaml never holds a blank that code has to guess. This file never imports
torch: `tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from tinyrl.config.schema import (
    PRESETS,
    CriticConfig,
    GenerationConfig,
    GrpoConfig,
    LoraSection,
    ModelConfig,
    OptimConfig,
    PpoConfig,
    ReferenceConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RunConfig,
    Section,
    SftConfig,
    TaskConfig,
)

__all__ = [
    "METHODS",
    "METHOD_SECTIONS",
    "PRESETS",
    "SECTIONS",
    "Config",
    "CriticConfig",
    "GenerationConfig",
    "GrpoConfig",
    "LoraSection",
    "Method",
    "ModelConfig",
    "OptimConfig",
    "PpoConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RunConfig",
    "Section",
    "SftConfig",
    "TaskConfig",
]

Method = Literal["grpo", "ppo", "sft", "reward"]
METHODS: tuple[Method, ...] = ("grpo", "ppo", "sft", "reward")
METHOD_SECTIONS = ("reference", "critic", "reward", "generation", "grpo", "ppo", "sft", "reward_model")
SECTIONS: dict[str, tuple[str, ...]] = {  # which of these a method uses; every method uses the other sections
    "grpo": ("reference", "reward", "generation", "grpo"),
    "ppo": ("reference", "critic", "reward", "generation", "ppo"),
    "sft": ("sft",),
    "reward": ("reward_model",),
}


class Config(Section):
    """Everything a run is a function of. Sections a method does not use are None and not written."""

    method: Method
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraSection = Field(default_factory=LoraSection)
    reference: ReferenceConfig | None = None
    critic: CriticConfig | None = None
    task: TaskConfig = Field(default_factory=TaskConfig)
    reward: RewardConfig | None = None
    generation: GenerationConfig | None = None
    optim: OptimConfig = Field(default_factory=OptimConfig)
    grpo: GrpoConfig | None = None
    ppo: PpoConfig | None = None
    sft: SftConfig | None = None
    reward_model: RewardModelConfig | None = None
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="before")
    @classmethod
    def _sections_of_method(cls, data: Any) -> Any:
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults."""
        if not isinstance(data, dict) or data.get("method") not in METHODS:
            return data
        used = {name for name in cls.model_fields if name not in METHOD_SECTIONS} | {*SECTIONS[data["method"]]}
        kept = {key: value for key, value in data.items() if key not in METHOD_SECTIONS or key in used}
        blank = {name: {} for name in used if name != "method" and kept.get(name) is None}
        return {**kept, **blank}

    @model_validator(mode="after")
    def _resolve(self) -> Config:
        full = not self.lora.enabled
        optim = self.optim
        optim.learning_rate = optim.learning_rate or (1e-6 if full else 5e-5)
        if self.method == "ppo":
            optim.critic_learning_rate = optim.critic_learning_rate or (1e-5 if full else 1e-4)
        if self.critic is not None:
            self.critic.kind = self.critic.kind or ("separate" if full or self.critic.path else "adapter")
        if self.task.name is None:
            self.task.name = "rows"
        for problem in (*self._conflicts_of_models(), *self._conflicts_of_numbers(), *self._conflicts_of_kl()):
            raise ValueError(problem)
        return self

    def _conflicts_of_models(self) -> Iterator[str]:
        """Sentences for models, adapters and roles that cannot go together, most telling first."""
        lora, model, critic = self.lora, self.model, self.critic
        if self.method in ("grpo", "ppo") and lora.dropout > 0:
            yield (
                f"lora.dropout={lora.dropout}: dropout makes the ratio of new to old log-probabilities random, "
                "so ppo and grpo need 0"
            )
        if not lora.enabled and model.quantization:
            yield (
                f"model.quantization={model.quantization} needs lora.enabled=true: quantised weights cannot be trained"
            )
        if not lora.enabled and model.adapter:
            yield (
                f"model.adapter={model.adapter} needs lora.enabled=true "
                "(to fine-tune every weight from it, merge the adapter into the base first)"
            )
        if critic and not lora.enabled and critic.kind == "adapter":
            yield (
                "critic.kind=adapter needs lora.enabled=true; "
                "with full fine-tuning use separate, shared or shared-detached"
            )
        if critic and critic.path and critic.kind != "separate":
            yield f"critic.path={critic.path} is for critic.kind=separate; critic.kind is {critic.kind} here"

    def _conflicts_of_numbers(self) -> Iterator[str]:
        """Sentences for settings of sampling, rewards and batches that cannot go together."""
        generation, section, method = self.generation, self.grpo or self.ppo, self.method
        if generation and not generation.allow_truncated_sampling and (generation.top_p < 1 or generation.top_k):
            name = "top_k" if generation.top_k else "top_p"
            yield (
                f"generation.{name}={getattr(generation, name)} cuts the distribution that is sampled but not the one "
                "that is scored (KL turns negative, ratios lie); "
                "set generation.allow_truncated_sampling=true to train like that anyway"
            )
        if generation and self.reward and self.reward.overlong_tokens > generation.max_new_tokens:
            yield (
                f"reward.overlong_tokens={self.reward.overlong_tokens} is more than "
                f"generation.max_new_tokens={generation.max_new_tokens}, so every answer would be penalised"
            )
        if section and section.minibatch_size and section.batch_size % section.minibatch_size:
            size, total = section.minibatch_size, section.batch_size
            most = min(size, total)
            fits = next((n for n in range(most, max(0, most - 10_000), -1) if total % n == 0), 1)
            yield (
                f"{method}.minibatch_size={size} does not divide the {total} sequences of a step; {fits} would, "
                "and null means all of them at once"
            )

    def _conflicts_of_kl(self) -> Iterator[str]:
        """Sentences for KL settings that cannot go together."""
        grpo, ppo, method = self.grpo, self.ppo, self.method
        if ppo and ppo.kl_controller == "adaptive" and ppo.kl_coef == 0:
            yield "ppo.kl_coef=0 stays 0 under ppo.kl_controller=adaptive, which multiplies it; start above 0"
        section = grpo or ppo
        if section is None or section.kl_coef == 0:
            return
        if section.kl_placement == "loss" and section.kl_estimator == "k1":
            yield (
                f"{method}.kl_estimator=k1 in the loss has zero mean gradient; "
                f"use k3 or k2, or {method}.kl_placement=reward"
            )
        if self.reference and self.reference.kind == "none":
            yield f"{method}.kl_coef={section.kl_coef} needs a reference; set it to 0, or reference.kind=auto"
        if grpo and grpo.advantage == "group" and grpo.kl_placement == "reward":
            yield (
                "grpo.kl_placement=reward goes with the rloo and reinforce++ advantages; "
                "group advantages take the KL in the loss"
            )
