"""The section of each training method: grpo, ppo, sft, reward_model, dpo. Those that sample come first."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tinyrl.config.sections import (
    AboveOne,
    AtLeastOne,
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

Advantage = Literal["group", "leave-one-out", "discounted-return", "baseline-return"]
Scale = Literal["std", "batch", "none"]
RatioLevel = Literal["token", "sequence", "sequence-token"]
Aggregation = Literal["token", "sequence", "sequence-sum", "constant"]
Mismatch = Literal["token", "sequence", "token-mask", "sequence-mask", "none"]
KlController = Literal["fixed", "adaptive"]
RowKind = Literal["auto", "pairs", "labels"]
PairLoss = Literal["sigmoid", "ipo", "ipo_sum", "kto", "orpo", "simpo"]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]

Presets = dict[str, dict[str, Any]]  # plain fields; the first preset has them all, others the differences from it
PRESETS: Presets = {
    "dapo": {
        "num_prompts": 32, "num_epochs": 1, "minibatch_size": None, "advantage": "group", "advantage_scale": "std",
        "loss": "clipped", "ratio_level": "token", "clip_eps": 0.2, "clip_eps_high": 0.28, "aggregation": "token",
        "kl_coef": 0.0, "kl_placement": "loss",
    },
    "grpo": {"clip_eps_high": 0.2, "aggregation": "sequence", "kl_coef": 0.04},
    "dr_grpo": {"clip_eps_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"ratio_level": "sequence", "aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "gdpo": {"normalize_rewards": "each"},
    "cispo": {"loss": "cispo"},
    "rloo": {"advantage": "leave-one-out", "clip_eps_high": 0.2, "aggregation": "sequence-sum", "kl_coef": 0.05,
             "kl_placement": "reward"},
    "reinforce++": {"advantage": "discounted-return", "clip_eps_high": 0.2, "kl_coef": 0.01, "kl_placement": "reward"},
    "reinforce++-baseline": {"advantage": "baseline-return", "clip_eps_high": 0.2, "kl_coef": 0.01,
                             "kl_estimator": "k2"},
}  # fmt: skip
PPO_PRESETS: Presets = {
    "ppo": {
        "num_prompts": 128, "num_epochs": 4, "minibatch_size": 64, "clip_eps": 0.2, "value_clip_eps": 0.2,
        "gae_lambda": 0.95, "whiten_advantages": True, "kl_coef": 0.05, "kl_placement": "reward",
    },
    "a2c": {"num_epochs": 1, "minibatch_size": None, "value_clip_eps": None, "gae_lambda": 1.0,
            "whiten_advantages": False},
}  # fmt: skip
DISTILL_PRESETS: Presets = {
    "distill": {
        "num_prompts": 32, "num_epochs": 1, "minibatch_size": None, "clip_eps": 0.2, "kl_coef": 0.0,
        "kl_placement": "loss",
    },
}  # fmt: skip
KL_ESTIMATOR = {"loss": "k3", "reward": "k1"}  # by kl_placement, where nothing else is asked for


class OnPolicySection(Section):
    """What GRPO and PPO have in common: both learn from their own samples."""

    presets: ClassVar[Presets]
    preset: Any  # one of them, which gives the fields of the section their defaults
    num_prompts: NumPrompts = Field(description="prompts per step")
    num_epochs: Positive = Field(description="passes over one rollout")
    minibatch_size: Positive | None = Field(description="sequences per optimizer step; null: the whole rollout")
    clip_eps: Rate = Field(description="the ratio is clipped at 1 - clip_eps and 1 + clip_eps (grpo: clip_eps_high)")
    dual_clip: AboveOne | None = Field(default=None, description="bound of ratios at negative advantages; null: none")
    gamma: Share = Field(default=1.0, description="discount of rewards (grpo: of the return advantages)")
    kl_coef: NonNegativeFloat = Field(description="of the KL to the reference; adaptive: where it starts; 0: none")
    kl_placement: Literal["loss", "reward"] = Field(description="a term of the loss, or of the reward")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(description="k1 in the reward, k3 or k2 in the loss")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus")

    @property
    def batch_size(self) -> int:
        return self.num_prompts * getattr(self, "group_size", 1)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        """The preset's fields, and the KL estimator that the placement asks for, unless they are given."""
        if not isinstance(data, dict):
            return data
        first = next(iter(cls.presets))
        preset = data.get("preset", first)
        filled = {**cls.presets[first], **(cls.presets.get(preset, {}) if isinstance(preset, str) else {}), **data}
        placement = filled["kl_placement"]
        default = KL_ESTIMATOR.get(placement, "k1") if isinstance(placement, str) else "k1"
        return {"kl_estimator": default, **filled}


class GrpoConfig(OnPolicySection):
    presets = PRESETS
    preset: Literal[
        "dapo", "grpo", "dr_grpo", "gspo", "gdpo", "cispo", "rloo", "reinforce++", "reinforce++-baseline"
    ] = Field(default="dapo", description="gives the fields here their defaults")
    group_size: Annotated[int, Field(ge=1, le=100_000)] = Field(default=8, description="completions per prompt")
    advantage: Advantage = Field(description="a score against its group, the rest of it, the batch, or group and batch")
    advantage_scale: Scale = Field(description="what it is divided by: the group's deviation, the batch's, or nothing")
    normalize_rewards: Literal["sum", "each"] = Field(default="sum", description="their sum, or each alone (GDPO)")
    loss: Literal["clipped", "cispo"] = Field(description="PPO's clipped surrogate, or CISPO's capped weights")
    ratio_level: RatioLevel = Field(description="new to old probability of a token, or of the sequence (GSPO)")
    clip_eps_high: PositiveFloat = Field(description="the ratio is clipped above at 1 + clip_eps_high")
    ratio_cap: AtLeastOne = Field(default=5.0, description="cap of the importance weight under loss=cispo")
    aggregation: Aggregation = Field(description="mean over tokens, mean of means or of sums, sum by max_new_tokens")
    kl_ratio_weight: bool = Field(default=False, description="weight the KL loss by the ratio: unbiased off-policy")
    mismatch: Mismatch = Field(default="token", description="weights for inexact sampling: capped, masked, or none")
    mismatch_cap: PositiveFloat = Field(default=2.0, description="cap of those weights")
    mismatch_floor: Share = Field(default=0.0, description="of the masks: weights below it are zero, too (IcePop)")
    refill_rounds: NonNegative = Field(default=0, description="most rounds of fresh prompts for groups without spread")


class PpoConfig(OnPolicySection):
    presets = PPO_PRESETS
    preset: Literal["ppo", "a2c"] = Field(default="ppo", description="gives the fields here their defaults")
    value_clip_eps: PositiveFloat | None = Field(description="values moving further gain nothing; null: plain square")
    gae_lambda: Share = Field(description="lambda of generalised advantage estimation")
    whiten_advantages: bool = Field(description="centre advantages and scale them to unit variance, once per rollout")
    bootstrap_truncated: bool = Field(default=False, description="value of the end for a response that is cut off")
    kl_controller: KlController = Field(default="fixed", description="keep kl_coef, or steer it towards target_kl")
    target_kl: PositiveFloat = Field(default=6.0, description="of the adaptive controller, in nats per response")
    kl_horizon: AtLeastOne = Field(default=10_000, description="of the adaptive controller, in completions")
    stop_kl: PositiveFloat | None = Field(default=None, description="KL per token that ends the epochs; null: none")
    value_coef: NonNegativeFloat = Field(default=0.1, description="weight of the value loss under critic.kind=shared")
    whiten_rewards: bool = Field(default=False, description="scale token rewards to unit variance, and keep their mean")
    clip_rewards: PositiveFloat | None = Field(default=None, description="scores are clipped to +- this; null: not")
    ptx_coef: NonNegativeFloat = Field(default=0.0, description="of the next-token loss on ptx_data (InstructGPT)")
    ptx_data: Text | None = Field(default=None, description="rows of text as sft reads them: a file, or a hub name")
    ptx_batch_size: Positive = Field(default=16, description="rows of it per optimizer step, at most all there are")

    @property
    def group_size(self) -> int:
        return 1


class DistillConfig(OnPolicySection):
    presets = DISTILL_PRESETS
    preset: Literal["distill"] = Field(default="distill", description="gives the fields here their defaults")
    group_size: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="completions per prompt")
    objective: Literal["divergence", "sampled"] = Field(
        default="divergence", description="distance of the distributions, or a policy gradient on sampled tokens"
    )
    on_policy: Share = Field(default=1.0, description="share of prompts sampled; others have given answers")


class SftConfig(Section):
    batch_size: Positive = Field(default=16, description="rows per optimizer step, at most all there are")
    loss_on: Literal["completion", "all"] = Field(default="completion", description="the answer's tokens, or all")


class RewardModelConfig(Section):
    objective: RowKind = Field(default="auto", description="what rows say of answers; auto: as their columns say")
    batch_size: Positive = Field(default=32, description="rows per optimizer step, at most all there are")
    label_smoothing: Smoothing = Field(default=0.0, description="share of pairs or labels taken to be wrong")
    center: bool = Field(default=True, description="subtract the training rows' mean score: PPO starts near 0")


class DpoConfig(Section):
    loss: PairLoss = Field(default="sigmoid", description="DPO; IPO by tokens (as TRL) or summed; KTO; ORPO; SimPO")
    beta: PositiveFloat = Field(description="how near the reference; IPO's tau, ORPO's lambda; 0.1, for simpo 2")
    label_smoothing: Smoothing = Field(default=0.0, description="of sigmoid: share of pairs labelled wrongly (cDPO)")
    target_margin: NonNegativeFloat = Field(default=1.0, description="of simpo: the margin to win by, its gamma")
    batch_size: Positive = Field(default=32, description="pairs per optimizer step, at most all there are")
    max_tokens: Positive | None = Field(default=None, description="prompt with answer; null: the model's positions")

    @model_validator(mode="before")
    @classmethod
    def _fill_beta(cls, data: Any) -> Any:
        return {"beta": 2.0 if data.get("loss") == "simpo" else 0.1, **data} if isinstance(data, dict) else data

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")
