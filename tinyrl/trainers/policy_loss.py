"""The policy loss of GRPO and PPO on a minibatch: surrogate, importance weights, entropy bonus, KL.

    loss = surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference) + teacher_coef * distance to a teacher

Every term is a sum over a micro-batch divided by a count of the whole minibatch, so micro-batching changes no gradient.
To add a surrogate, write a function from a PolicyBatch to (loss, metrics) and a name in SURROGATES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor

from tinyrl.algorithms.kl import ESTIMATORS
from tinyrl.algorithms.losses import (
    Metrics,
    Mismatch,
    cispo_loss,
    clipped_policy_loss,
    entropy_bonus,
    kl_loss,
    mismatch_weights,
)
from tinyrl.algorithms.masking import Aggregation, masked_sum
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.roles import Roles
from tinyrl.rollout.buffer import PolicyBatch, Rollout
from tinyrl.trainers.teaching import DistanceLoss

MISMATCH_CAP = 2.0  # of the weights for inexact sampling (Yao et al. 2025)
RATIO_CAP = 5.0  # of CISPO's importance weights


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss, by their names in `grpo` or `ppo`; a default applies where `ppo` has no such field.

    kl_coef is the weight of a KL in the loss (0: there is none); weigh_mismatch: tokens are sampled with other numerics
    than training uses (bfloat16, other kernels), which `mismatch` corrects for in one way or another.
    """

    temperature: float
    max_new_tokens: int
    kl_coef: float
    weigh_mismatch: bool
    clip_eps: float
    preset: str = ""
    clip_eps_high: float | None = None
    aggregation: Aggregation = "token"
    entropy_coef: float = 0.0
    kl_estimator: str = "k3"
    teacher_coef: float = 0.0
    mismatch: Mismatch | Literal["none"] = "token"

    @classmethod
    def of(cls, section: Any, **others: Any) -> LossSettings:
        """From a method's section of the configuration; `others` replace its fields."""
        there = {field.name for field in fields(cls)} - set(others)
        return cls(**{name: getattr(section, name) for name in there if hasattr(section, name)}, **others)


@dataclass(frozen=True)
class Counts:
    """What the terms of a minibatch are divided by: tokens that count, sequences with such a token, all sequences."""

    tokens: int
    sequences: int
    rows: int

    @classmethod
    def of(cls, mask: Tensor) -> Counts:
        return cls(max(1, int(mask.sum())), max(1, int(mask.any(1).sum())), len(mask))

    def denominator(self, settings: LossSettings) -> int:
        """The divisor of the aggregation: tokens, sequences, or Dr. GRPO's constant."""
        if settings.aggregation == "constant":
            return self.rows * settings.max_new_tokens
        return self.tokens if settings.aggregation == "token" else self.sequences


class PolicyLoss:
    """The loss of a minibatch, micro-batch by micro-batch: called with rows of the rollout, the policy acting.

    `first`: no optimizer step has used the rollout yet, so the policy is the one that sampled it, and its
    log-probabilities here show how far sampling and training differ, at no cost.
    """

    def __init__(
        self,
        rollout: Rollout,
        minibatch: Sequence[int],
        *,
        roles: Roles,
        settings: LossSettings,
        first: bool,
        distance: DistanceLoss | None = None,
    ) -> None:
        self.rollout, self.roles, self.settings, self.first = rollout, roles, settings, first
        self.distance = distance
        self.counts = Counts.of(rollout.loss_mask[list(minibatch)])

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self.from_states(rows, batch, self.roles.policy_states(batch))

    def from_states(self, rows: list[int], batch: SequenceBatch, states: Tensor) -> tuple[Tensor, Metrics]:
        """The same from the policy's hidden states (N, H), where they are used elsewhere too."""
        settings = self.settings
        logprobs, entropy = self.roles.logprobs(
            "policy", batch, temperature=settings.temperature, states=states, entropy_grad=settings.entropy_coef > 0
        )
        minibatch = self.rollout.minibatch(rows, batch=batch, logprobs=logprobs, entropy=entropy)
        loss, metrics = policy_loss(minibatch, self.counts, settings=settings)
        if self.distance is not None:
            apart, of_distance = self.distance.from_states(rows, batch, states)
            loss, metrics = loss + settings.teacher_coef * apart, of_distance | metrics
        if self.first:
            metrics = metrics | sampling_gap(minibatch, self.counts)
        return loss, metrics


def policy_loss(batch: PolicyBatch, counts: Counts, *, settings: LossSettings) -> tuple[Tensor, Metrics]:
    """(loss, metrics) of a micro-batch; `counts` are those of its minibatch, so both add up over micro-batches.

    Metrics: the surrogate's, policy/entropy, policy/kl_loss where there is a KL, and where weights correct a mismatch
    between sampling and training policy/capped_weights, the share of tokens whose weight is above its cap (or, where
    such are left out, below its floor).
    """
    bounded = None
    if settings.weigh_mismatch and settings.mismatch != "none":
        weights, bounded = mismatch_weights(
            batch.old_logprobs,
            batch.sampling_logprobs,
            batch.mask,
            mode=settings.mismatch,
            cap=MISMATCH_CAP,
        )
        batch = replace(batch, token_weights=weights)
    shared = {
        "aggregation": settings.aggregation,
        "denominator": counts.denominator(settings),
        "token_weights": batch.token_weights,
        "metric_denominator": counts.tokens,
    }
    loss, metrics = SURROGATES.get(settings.preset, clipped)(batch, settings, shared)
    bonus, entropy_metrics = entropy_bonus(batch.entropy, batch.mask, denominator=counts.tokens)
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * bonus
    if settings.kl_coef > 0:
        kl, kl_metrics = kl_to_reference(batch, counts, settings)
        loss, metrics = loss + settings.kl_coef * kl, metrics | kl_metrics
    if bounded is not None:
        metrics["policy/capped_weights"] = masked_sum(bounded.float(), batch.mask) / counts.tokens
    return loss, metrics | entropy_metrics


def sampling_gap(batch: PolicyBatch, counts: Counts) -> Metrics:
    """policy/sampling_gap, the mean |training - sampling| log-probability of a token under the policy that sampled."""
    gap = masked_sum((batch.logprobs.detach() - batch.sampling_logprobs).abs(), batch.mask)
    return {"policy/sampling_gap": gap / counts.tokens}


def clipped(batch: PolicyBatch, settings: LossSettings, shared: dict[str, Any]) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, and with other settings that of GRPO, DAPO, Dr. GRPO and GSPO."""
    return clipped_policy_loss(
        batch.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip_eps=settings.clip_eps,
        clip_eps_high=settings.clip_eps_high,
        ratio_level="sequence" if settings.preset == "gspo" else "token",
        **shared,
    )


def cispo(batch: PolicyBatch, settings: LossSettings, shared: dict[str, Any]) -> tuple[Tensor, Metrics]:
    """REINFORCE with a capped importance weight, under which every token keeps its gradient."""
    return cispo_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask, ratio_cap=RATIO_CAP, **shared)


SURROGATES = {"cispo": cispo}  # by preset; clipped for all others


def kl_to_reference(batch: PolicyBatch, counts: Counts, settings: LossSettings) -> tuple[Tensor, Metrics]:
    """The KL term, before its weight, aggregated as the surrogate is."""
    assert batch.ref_logprobs is not None
    kl = ESTIMATORS[settings.kl_estimator](batch.logprobs, batch.ref_logprobs)
    denominator = counts.denominator(settings)
    return kl_loss(kl, batch.mask, aggregation=settings.aggregation, denominator=denominator)
