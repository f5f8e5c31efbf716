"""The configuration of a run: every section and field, its type, its range and its default.

Types are strict: 1 is not true, "3" is not 3 and true is not a number, so a wrong type is never taken for something
else. Defaults that depend on other fields (a learning rate for LoRA or full fine-tuning) are None here and filled in
by `Config`, so that config.yaml never holds a blank that code has to guess. This file never imports torch, so
`tinyrl --help` and a config error are answered at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tinyrl.config.conflicts import conflicts
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, MethodName
from tinyrl.config.presets import DAPO, PRESETS

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of fields; a field it does not know is an error, and so are NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class ModelConfig(Section):
    path: Text = "starter"
    revision: Text | None = None  # of a hub model: a commit, a tag or a branch; None: what the hub has now
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["sdpa", "eager"] = "sdpa"
    gradient_checkpointing: bool = False
    quantization: Literal["4bit"] | None = None
    adapter: Text | None = None
    random_init: bool = False  # weights drawn from run.seed instead of read: a model trained from nothing


class LoraSection(Section):
    enabled: bool = True
    r: Positive = 16
    alpha: PositiveFloat = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"


class ReferenceConfig(Section):
    kind: Literal["auto", "none"] = "auto"


class CriticConfig(Section):
    kind: Literal["adapter", "shared", "shared-detached", "separate"] | None = None  # LoRA: adapter; full: separate
    path: Text | None = None
    warmup: NonNegative = 1


class TaskConfig(Section):
    name: Text | None = None  # None: "rows" where data is given
    data: Text | None = None
    eval_data: Text | None = None
    revision: Text | None = None  # of a hub data set in task.data, and of task.eval_data where that is the same one
    columns: dict[str, str] = Field(default_factory=dict)
    system_prompt: str | None = None
    max_samples: Positive | None = None
    chat: Literal["auto"] | bool = "auto"
    long_prompts: Literal["error", "drop"] = "error"


class RewardFunctionConfig(Section):
    use: Text
    weight: float = 1.0


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    model: Text | None = None
    model_label: int | str | None = None
    model_weight: float = 1.0
    timeout_s: PositiveFloat = 60.0
    truncated: Literal["keep", "mask", "penalize"] = "keep"
    truncated_penalty: NonNegativeFloat = 1.0
    overlong_tokens: NonNegative = 0  # DAPO's soft overlong penalty over the last so many tokens; 0: none


class GenerationConfig(Section):
    max_new_tokens: Positive = 256
    max_prompt_tokens: Positive = 1024
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    allow_truncated_sampling: bool = False
    stop: list[Text] = Field(default_factory=list)
    engine: Literal["auto", "fused", "hf-merged", "hf"] = "auto"
    max_rows: Positive | None = None  # rows decoded at a time; None: as many as a step asks for
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of sampling; auto: the model's

    @field_validator("engine", mode="before")
    @classmethod
    def _former_names(cls, name: Any) -> Any:
        return {"reference": "hf", "slim": "hf-merged"}.get(name, name) if isinstance(name, str) else name


class OptimConfig(Section):
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    learning_rate: PositiveFloat | None = None  # LoRA 5e-5, full 1e-6
    critic_learning_rate: PositiveFloat | None = None  # LoRA 1e-4, full 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0


class GrpoConfig(Section):
    preset: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"] = "dapo"
    num_prompts: Positive = 32
    group_size: Annotated[int, Field(ge=2)] = 8
    num_epochs: Positive = 1
    minibatch_size: Positive | None = None  # None: the whole rollout in one optimizer step
    advantage: Literal["group", "leave-one-out", "discounted-return"]
    advantage_scale: Literal["std", "none"]
    loss: Literal["clipped", "cispo"]
    ratio_level: Literal["token", "sequence"]
    clip_eps: Rate
    clip_eps_high: PositiveFloat
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    ratio_cap: Annotated[float, Field(ge=1)] = 5.0
    aggregation: Literal["token", "sequence", "constant"]
    kl_coef: NonNegativeFloat
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_placement: Literal["loss", "reward"]
    kl_ratio_weight: bool = False
    gamma: Share = 1.0
    refill_rounds: NonNegative = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = data.get("preset", "dapo")
        return {**DAPO, **(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **data}

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


class PpoConfig(Section):
    num_prompts: Positive = 128
    num_epochs: Positive = 4
    minibatch_size: Positive | None = 64
    clip_eps: Rate = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    value_clip_eps: PositiveFloat = 0.2
    gamma: Share = 1.0
    gae_lambda: Share = 0.95
    kl_coef: NonNegativeFloat = 0.05
    kl_placement: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    target_kl: PositiveFloat = 6.0
    kl_horizon: PositiveFloat = 10_000
    stop_kl: PositiveFloat | None = None
    value_coef: NonNegativeFloat = 0.1
    entropy_coef: NonNegativeFloat = 0.0
    whiten_rewards: bool = False
    clip_rewards: PositiveFloat | None = None

    @property
    def batch_size(self) -> int:
        return self.num_prompts


class SftConfig(Section):
    batch_size: Positive = 16
    loss_on: Literal["completion", "all"] = "completion"


class RewardModelConfig(Section):
    batch_size: Positive = 32  # pairs per optimizer step
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    center: bool = True  # subtract the mean score of the training pairs, so that PPO starts near zero


class RunConfig(Section):
    num_steps: Positive = 200
    seed: Annotated[int, Field(ge=0, lt=10**18)] = 0
    micro_batch_tokens: Literal["auto"] | Positive = "auto"
    eval_every: NonNegative = 25
    eval_prompts: NonNegative = 64
    save_every: NonNegative = 25
    keep_checkpoints: Positive = 3
    best_metric: Text = "eval/reward_mean"
    deterministic: bool = False
    threads: Literal["auto"] | Positive = "auto"
    trackers: list[Text] = Field(default_factory=list)


class Config(Section):
    """Everything a run is a function of. Sections the method does not use keep their defaults and are not written."""

    method: MethodName
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraSection = Field(default_factory=LoraSection)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    grpo: GrpoConfig = Field(default_factory=lambda: GrpoConfig.model_validate({}))
    ppo: PpoConfig = Field(default_factory=PpoConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="before")
    @classmethod
    def _sections_of_method(cls, data: Any) -> Any:
        """Drop sections the method does not use; one that is used and left blank (`grpo:`) has its defaults."""
        if not isinstance(data, dict) or data.get("method") not in METHODS:
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
            self.critic.kind = self.critic.kind or ("separate" if full or self.critic.path else "adapter")
        self.task.name = self.task.name or "rows"
        for problem in conflicts(self):
            raise ValueError(problem)
        return self

    def uses(self, section: str) -> bool:
        """Whether the method reads a section."""
        return section not in OPTIONAL_SECTIONS or section in METHODS[self.method].sections

    @property
    def on_policy(self) -> GrpoConfig | PpoConfig:
        """The section of a method that learns from its own samples."""
        return self.ppo if self.method == "ppo" else self.grpo

    def written(self) -> dict[str, Any]:
        """The sections that the method uses, as JSON values: what config.yaml and checkpoints hold."""
        return {name: value for name, value in self.model_dump(mode="json").items() if self.uses(name)}
