"""The section of each training method: grpo, ppo, sft, reward_model, dpo. Those that sample come first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tinyrl.config.marks import Names, OnlyIf
from tinyrl.config.sections import (
    Epochs,
    NonNegativeFloat,
    NumPrompts,
    Positive,
    PositiveFloat,
    Rate,
    Rounds,
    Section,
    Share,
    Text,
)

Advantage = Literal["group", "leave-one-out", "reinforce++", "reinforce++-baseline"]
Surrogate = Literal["clip", "sequence", "cispo"]
Scale = Literal["std", "batch", "none"]
Aggregation = Literal["token", "sequence", "sequence-sum", "constant"]
Mismatch = Literal["token", "sequence", "token-mask", "sequence-mask", "none"]
PairLoss = Literal["sigmoid", "ipo", "ipo_sum", "kto", "orpo", "simpo"]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
GroupSize = Annotated[int, Field(ge=1, le=100_000)]
CLIPS = OnlyIf(
    lambda config: config.grpo.surrogate != "cispo",
    "grpo.surrogate is not cispo",
    why="CISPO caps the ratio and clips none",
)
GROUPED = OnlyIf(
    lambda config: config.grpo.advantage == "group", "grpo.advantage is group", why="other advantages have no scale"
)
BY_TURN = OnlyIf(lambda config: config.grpo.credit == "turn", "grpo.credit is turn", why="an episode has one reward")
SHARED_CRITIC = OnlyIf(
    lambda config: config.critic.kind == "shared", "critic.kind is shared", why="the critic has a loss of its own"
)
LEARNS_PTX = OnlyIf(lambda config: config.ppo.ptx_coef > 0, "ppo.ptx_coef > 0", why="nothing is learnt from it")
SIGMOID = OnlyIf(
    lambda config: config.dpo.loss == "sigmoid", "dpo.loss is sigmoid", why="other losses have no such term"
)
SIMPO = OnlyIf(lambda config: config.dpo.loss == "simpo", "dpo.loss is simpo", why="other losses have no such term")
GRPO_KL = OnlyIf(lambda config: config.grpo.kl_coef > 0, "grpo.kl_coef > 0", why="there is no KL")
PPO_KL = OnlyIf(lambda config: config.ppo.kl_coef > 0, "ppo.kl_coef > 0", why="there is no KL")

Presets = dict[str, dict[str, Any]]  # by preset, the fields that differ from the defaults of the section
PRESETS: Presets = {
    "dapo": {},
    "grpo": {"clip_eps_high": 0.2, "aggregation": "sequence", "kl_coef": 0.04},
    "dr_grpo": {"clip_eps_high": 0.2, "aggregation": "constant", "advantage_scale": "none"},
    "gspo": {"surrogate": "sequence", "aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "gdpo": {"reward_aggregation": "normalize-then-sum"},
    "gtpo": {"credit": "turn", "turn_gamma": 0.9},
    "cispo": {"surrogate": "cispo"},
    "rloo": {"advantage": "leave-one-out", "clip_eps_high": 0.2, "aggregation": "sequence-sum", "kl_coef": 0.05,
             "kl_estimator": "k1"},
    "reinforce++": {"advantage": "reinforce++", "clip_eps_high": 0.2, "kl_coef": 0.01, "kl_estimator": "k1"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "clip_eps_high": 0.2, "kl_coef": 0.01,
                             "kl_estimator": "k2"},
}  # fmt: skip
PPO_PRESETS: Presets = {
    "ppo": {},
    "a2c": {"num_epochs": 1, "minibatch_size": None, "value_clip_eps": None, "gae_lambda": 1.0,
            "whiten_advantages": False},
}  # fmt: skip


class OnPolicySection(Section):
    """Fields of the methods that learn from their own samples."""

    num_prompts: NumPrompts = Field(default=32, description="prompts per step")
    group_size: GroupSize = Field(default=1, description="completions per prompt")

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


# Settings of GRPO and PPO with defaults of their own, for which a preset may have other values.
NumEpochs = Annotated[Epochs, Field(description="passes over each rollout")]
MinibatchSize = Annotated[
    Positive | None, Field(description="sequences per optimizer step, at most the whole rollout; null: all")
]
KlCoef = Annotated[NonNegativeFloat, Field(description="KL coefficient; ppo.target_kl adapts it; 0: no KL")]
KlEstimator = Annotated[Literal["k1", "k2", "k3"], Field(description="k1: KL in the reward; k3 or k2: KL in the loss")]


class PolicyGradientSection(OnPolicySection):
    """Fields of GRPO and PPO."""

    preset: Any
    num_epochs: NumEpochs = 1
    minibatch_size: MinibatchSize = None
    clip_eps: Rate = Field(
        default=0.2, description="the ratio is clipped at 1 - clip_eps and 1 + clip_eps (grpo: clip_eps_high)"
    )
    kl_coef: KlCoef = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus")

    @property
    def update_size(self) -> int:
        """Return the sequences of an optimizer step."""
        return min(self.minibatch_size or self.batch_size, self.batch_size)

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the KL is in the reward (k1), not in the loss (k2, k3).

        In a loss, on policy, k2 has the gradient of the reverse KL(policy || reference), k3 that of the forward
        KL(reference || policy), k1 none in the mean. Off policy neither has either, but k3 with the ratio as its weight
        (grpo.kl_unbiased) has that of the reverse KL.
        """
        return self.kl_estimator == "k1"


class GrpoConfig(PolicyGradientSection):
    preset: Literal[
        "dapo", "grpo", "dr_grpo", "gspo", "gdpo", "gtpo", "cispo", "rloo", "reinforce++", "reinforce++-baseline"
    ] = Field(default="dapo", description="default values of the fields in this section")
    group_size: GroupSize = Field(default=8, description="completions per prompt")
    surrogate: Surrogate = Field(
        default="clip", description="clipped ratio per token (PPO) or per sequence (GSPO), or capped weight (CISPO)"
    )
    clip_eps: Annotated[Rate, CLIPS] = Field(default=0.2, description="the ratio is clipped below at 1 - clip_eps")
    reward_aggregation: Literal["sum", "normalize-then-sum"] = Field(
        default="sum", description="normalize the sum of the rewards in the group, or each reward separately (GDPO)"
    )
    advantage: Advantage = Field(
        default="group",
        description="baseline: group mean, leave-one-out (RLOO), batch (REINFORCE++), or group, then batch",
    )
    advantage_scale: Annotated[Scale, GROUPED] = Field(
        default="std",
        description="divide advantages by the standard deviation of group or batch, or by nothing (Dr. GRPO)",
    )
    credit: Literal["episode", "turn"] = Field(
        default="episode",
        description="compare an episode's reward with its group, or each turn's rewards to come with those of the "
        "group's episodes that reached the turn (GTPO)",
    )
    turn_gamma: Annotated[Share, BY_TURN] = Field(default=1.0, description="discount factor per turn")
    clip_eps_high: Annotated[PositiveFloat, CLIPS] = Field(
        default=0.28, description="the ratio is clipped above at 1 + clip_eps_high"
    )
    kl_estimator: Annotated[KlEstimator, GRPO_KL] = "k3"
    kl_unbiased: Annotated[bool, GRPO_KL] = Field(
        default=False,
        description="weigh k3 in the loss by the ratio, for the gradient of the reverse KL also off policy",
    )
    aggregation: Aggregation = Field(
        default="token",
        description="loss: token mean (DAPO), mean of sequence means (GRPO) or sums, sum / max_new_tokens",
    )
    importance_correction: Mismatch = Field(
        default="token", description="importance weights for inexact sampling: capped (TIS), masked, or none"
    )
    dynamic_sampling_rounds: Rounds = Field(
        default=0,
        description="maximum rounds that replace groups with equal rewards by fresh prompts; the rest is left out",
    )


class PpoConfig(PolicyGradientSection):
    preset: Literal["ppo", "a2c"] = Field(default="ppo", description="default values of the fields in this section")
    num_prompts: NumPrompts = Field(default=128, description="prompts per step")
    num_epochs: NumEpochs = 4
    minibatch_size: MinibatchSize = 64
    kl_coef: KlCoef = 0.05
    kl_estimator: Annotated[KlEstimator, PPO_KL] = "k1"
    value_clip_eps: PositiveFloat | None = Field(
        default=0.2, description="value clipping range (PPO2); null: plain squared error"
    )
    gamma: Share = Field(default=1.0, description="discount factor")
    gae_lambda: Share = Field(default=0.95, description="GAE lambda")
    target_kl: PositiveFloat | None = Field(
        default=None, description="adapt kl_coef to this KL, in nats per response (Ziegler et al.); null: fixed kl_coef"
    )
    value_coef: Annotated[NonNegativeFloat, SHARED_CRITIC] = Field(
        default=0.1, description="weight of the value loss with critic.kind=shared"
    )
    ptx_coef: NonNegativeFloat = Field(default=0.0, description="weight of the loss on ptx_data (InstructGPT's ptx)")
    ptx_data: Annotated[Text | None, Names("rows"), LEARNS_PTX] = Field(
        default=None, description="rows of text, as for sft: a file, or a hub name"
    )

    whiten_advantages: bool = Field(
        default=True, description="normalize the advantages of a step to mean 0 and variance 1"
    )


class DistillConfig(OnPolicySection):
    on_policy_fraction: Share = Field(
        default=1.0, description="share of prompts whose answers are sampled; for the others the rows' answers are used"
    )


class RowSection(Section):
    """Fields of the methods that learn from rows."""

    batch_size: Positive = Field(default=32, description="rows per optimizer step, at most all there are")
    max_tokens: Positive | None = Field(
        default=None,
        description="maximum tokens of prompt and answer together (longer ones: task.on_overlong_prompt); null: the "
        "model's context length",
    )


class SftConfig(RowSection):
    batch_size: Positive = Field(default=16, description="rows per optimizer step, at most all there are")
    loss_on: Literal["completion", "all"] = Field(
        default="completion", description="tokens in the loss: those of the answers, or all"
    )


class RewardModelConfig(RowSection):
    """Fields of reward models, which have those of every method that learns from rows."""


class DpoConfig(RowSection):
    loss: PairLoss = Field(
        default="sigmoid", description="loss: DPO (sigmoid), IPO per token (as TRL) or summed, KTO, ORPO or SimPO"
    )
    beta: PositiveFloat = Field(
        default=0.1, description="beta of DPO (tau of IPO, lambda of ORPO); default 0.1, for simpo 2"
    )
    label_smoothing: Annotated[Smoothing, SIGMOID] = Field(
        default=0.0, description="assumed share of wrong labels (cDPO)"
    )
    target_margin: Annotated[NonNegativeFloat, SIMPO] = Field(
        default=1.0, description="target reward margin (gamma of SimPO)"
    )
    batch_size: Positive = Field(default=32, description="pairs per optimizer step, at most all there are")

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo")
