"""The section of each training method: grpo, ppo, sft, reward_model, dpo. Those that sample come first."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tinyrl.config.sections import (
    NonNegative,
    NonNegativeFloat,
    NumPrompts,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Share,
    Text,
)

Advantage = Literal["group", "leave-one-out", "reinforce++", "reinforce++-baseline"]
Scale = Literal["std", "batch", "none"]
Aggregation = Literal["token", "sequence", "sequence-sum", "constant"]
Mismatch = Literal["token", "sequence", "token-mask", "sequence-mask", "none"]
PairLoss = Literal["sigmoid", "ipo", "ipo_sum", "kto", "orpo", "simpo"]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]

Presets = dict[str, dict[str, Any]]  # plain fields; the first preset has them all, others the differences from it
PRESETS: Presets = {
    "dapo": {
        "num_prompts": 32, "num_epochs": 1, "minibatch_size": None, "advantage": "group", "advantage_scale": "std",
        "clip_eps": 0.2, "clip_eps_high": 0.28, "aggregation": "token", "kl_coef": 0.0, "kl_estimator": "k3",
    },
    "grpo": {"clip_eps_high": 0.2, "aggregation": "sequence", "kl_coef": 0.04},
    "dr_grpo": {"clip_eps_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "gdpo": {},
    "cispo": {},
    "rloo": {"advantage": "leave-one-out", "clip_eps_high": 0.2, "aggregation": "sequence-sum", "kl_coef": 0.05,
             "kl_estimator": "k1"},
    "reinforce++": {"advantage": "reinforce++", "clip_eps_high": 0.2, "kl_coef": 0.01, "kl_estimator": "k1"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "clip_eps_high": 0.2, "kl_coef": 0.01,
                             "kl_estimator": "k2"},
}  # fmt: skip
PPO_PRESETS: Presets = {
    "ppo": {
        "num_prompts": 128, "num_epochs": 4, "minibatch_size": 64, "clip_eps": 0.2, "value_clip_eps": 0.2,
        "gae_lambda": 0.95, "kl_coef": 0.05, "kl_estimator": "k1",
    },
    "a2c": {"num_epochs": 1, "minibatch_size": None, "value_clip_eps": None, "gae_lambda": 1.0},
}  # fmt: skip


class PolicyGradientSection(Section):
    """Fields of GRPO and PPO; the preset gives those without a default their values."""

    presets: ClassVar[Presets]
    preset: Any
    num_prompts: NumPrompts = Field(description="prompts per step")
    num_epochs: Positive = Field(description="passes over one rollout")
    minibatch_size: Positive | None = Field(description="sequences per optimizer step; null: the whole rollout")
    clip_eps: Rate = Field(description="the ratio is clipped at 1 - clip_eps and 1 + clip_eps (grpo: clip_eps_high)")
    kl_coef: NonNegativeFloat = Field(description="KL coefficient; ppo.target_kl adapts it; 0: no KL")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(description="k1: KL in the reward; k3 or k2: KL in the loss")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus")

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the KL is in the reward, by k1: its gradient in a loss is 0 in the mean, and only there k2 and
        k3 have the KL's.
        """
        return self.kl_estimator == "k1"

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        first = next(iter(cls.presets))
        preset = data.get("preset", first)
        return {**cls.presets[first], **(cls.presets.get(preset, {}) if isinstance(preset, str) else {}), **data}


class GrpoConfig(PolicyGradientSection):
    presets = PRESETS
    preset: Literal[
        "dapo", "grpo", "dr_grpo", "gspo", "gdpo", "cispo", "rloo", "reinforce++", "reinforce++-baseline"
    ] = Field(default="dapo", description="default values of the fields in this section")
    group_size: Annotated[int, Field(ge=1, le=100_000)] = Field(default=8, description="completions per prompt")
    advantage: Advantage = Field(
        description="baseline: group mean, leave-one-out (RLOO), batch (REINFORCE++), or group then batch"
    )
    advantage_scale: Scale = Field(
        description="divide advantages by the group's standard deviation, the batch's, or not (Dr. GRPO)"
    )
    clip_eps_high: PositiveFloat = Field(description="the ratio is clipped above at 1 + clip_eps_high")
    aggregation: Aggregation = Field(
        description="token mean (DAPO), mean of sequence means (GRPO) or sums, or sum / max_new_tokens"
    )
    importance_correction: Mismatch = Field(
        default="token", description="importance weights for inexact sampling: capped (TIS), masked, or none"
    )
    dynamic_sampling_rounds: NonNegative = Field(
        default=0, description="most rounds of fresh prompts for groups without spread"
    )

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


class PpoConfig(PolicyGradientSection):
    presets = PPO_PRESETS
    preset: Literal["ppo", "a2c"] = Field(default="ppo", description="default values of the fields in this section")
    value_clip_eps: PositiveFloat | None = Field(description="value clipping range (PPO2); null: plain squared error")
    gamma: Share = Field(default=1.0, description="discount factor")
    gae_lambda: Share = Field(description="GAE lambda")
    target_kl: PositiveFloat | None = Field(
        default=None, description="adapt kl_coef to this KL, in nats per response (Ziegler et al.); null: fixed kl_coef"
    )
    value_coef: NonNegativeFloat = Field(default=0.1, description="weight of the value loss under critic.kind=shared")
    ptx_coef: NonNegativeFloat = Field(default=0.0, description="weight of the loss on ptx_data (InstructGPT's ptx)")
    ptx_data: Text | None = Field(default=None, description="rows of text as sft reads them: a file, or a hub name")

    group_size: ClassVar[int] = 1
    clip_eps_high: ClassVar[None] = None
    aggregation: ClassVar[Aggregation] = "token"
    importance_correction: ClassVar[Mismatch] = "token"

    @property
    def batch_size(self) -> int:
        return self.num_prompts


class DistillConfig(Section):
    num_prompts: NumPrompts = Field(default=32, description="prompts per step")
    group_size: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="completions per prompt")
    on_policy_fraction: Share = Field(
        default=1.0, description="share of prompts with sampled answers; others use given ones"
    )
    num_epochs: ClassVar[int] = 1
    minibatch_size: ClassVar[None] = None
    kl_coef: ClassVar[float] = 0.0
    kl_in_reward: ClassVar[bool] = False

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


class SftConfig(Section):
    batch_size: Positive = Field(default=16, description="rows per optimizer step, at most all there are")
    loss_on: Literal["completion", "all"] = Field(default="completion", description="the answer's tokens, or all")


class RewardModelConfig(Section):
    batch_size: Positive = Field(default=32, description="rows per optimizer step, at most all there are")


class DpoConfig(Section):
    loss: PairLoss = Field(default="sigmoid", description="DPO; IPO by tokens (as TRL) or summed; KTO; ORPO; SimPO")
    beta: PositiveFloat = Field(description="DPO's beta (IPO: tau, ORPO: lambda); 0.1, for simpo 2")
    label_smoothing: Smoothing = Field(default=0.0, description="share of wrong labels (cDPO), for sigmoid")
    target_margin: NonNegativeFloat = Field(default=1.0, description="SimPO's gamma: target reward margin")
    batch_size: Positive = Field(default=32, description="pairs per optimizer step, at most all there are")
    max_tokens: Positive | None = Field(default=None, description="of prompt and answer together; null: by the model")

    @model_validator(mode="before")
    @classmethod
    def _fill_beta(cls, data: Any) -> Any:
        return {"beta": 2.0 if data.get("loss") == "simpo" else 0.1, **data} if isinstance(data, dict) else data

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")
