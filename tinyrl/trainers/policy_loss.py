"""The policy loss of GRPO and PPO on a micro-batch: surrogate, importance weights, entropy bonus, KL.

    loss = surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference)

Every term is a sum over the micro-batch divided by a count of the whole minibatch, so micro-batching changes no
gradient. To add a surrogate, write a function as `cispo_loss` in algorithms/losses.py and a branch in `policy_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from tinyrl.config.method_sections import DistillConfig, GrpoConfig, PpoConfig

MISMATCH_CAP = 2.0  # of the weights for inexact sampling (Yao et al. 2025)
RATIO_CAP = 5.0  # of CISPO's importance weights


@dataclass(frozen=True)
class PolicyBatch:
    """Tensors of a micro-batch, each (b, T) with x[:, t] of response token t.

    Entries where mask is False may be anything. Only logprobs (and entropy, with a bonus) carry a gradient;
    old_logprobs are the denominator of the ratio, ref_logprobs None without a reference.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    sampling_logprobs: Tensor
    ref_logprobs: Tensor | None
    entropy: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss, from `grpo`, `ppo` or `distill`.

    kl_coef is the weight of a KL in the loss (0: none); weigh_mismatch: tokens are sampled with other numerics than
    training uses (bfloat16, other kernels), which `mismatch` corrects for.
    """

    preset: str
    clip_eps: float
    clip_eps_high: float | None
    aggregation: Aggregation
    max_new_tokens: int
    entropy_coef: float
    kl_coef: float
    kl_estimator: str
    mismatch: Mismatch | Literal["none"]
    weigh_mismatch: bool
    teacher_coef: float = 0.0

    @classmethod
    def of(
        cls,
        section: GrpoConfig | PpoConfig | DistillConfig,
        *,
        max_new_tokens: int,
        kl_coef: float,
        weigh_mismatch: bool,
        teacher_coef: float = 0.0,
    ) -> LossSettings:
        grpo = section if isinstance(section, GrpoConfig) else None
        learns_rewards = None if isinstance(section, DistillConfig) else section
        return cls(
            preset=learns_rewards.preset if learns_rewards else "",
            clip_eps=section.clip_eps,
            clip_eps_high=grpo.clip_eps_high if grpo else None,
            aggregation=grpo.aggregation if grpo else "token",
            max_new_tokens=max_new_tokens,
            entropy_coef=learns_rewards.entropy_coef if learns_rewards else 0.0,
            kl_coef=kl_coef,
            kl_estimator=learns_rewards.kl_estimator if learns_rewards else "k3",
            mismatch=grpo.mismatch if grpo else "token",
            weigh_mismatch=weigh_mismatch,
            teacher_coef=teacher_coef,
        )


@dataclass(frozen=True)
class Counts:
    """Denominators of a minibatch: tokens in the loss, sequences with such a token, all sequences."""

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


def policy_loss(batch: PolicyBatch, counts: Counts, *, settings: LossSettings) -> tuple[Tensor, Metrics]:
    """(loss, metrics) of a micro-batch; `counts` are those of its minibatch, so both add up over micro-batches.

    Metrics: the surrogate's, policy/entropy, policy/kl_loss with a KL, and where weights correct a mismatch between
    sampling and training policy/capped_weights, the share of tokens whose weight is above its cap.
    """
    weights, capped = None, None
    if settings.weigh_mismatch and settings.mismatch != "none":
        weights, capped = mismatch_weights(
            batch.old_logprobs, batch.sampling_logprobs, batch.mask, mode=settings.mismatch, cap=MISMATCH_CAP
        )
    denominator = counts.denominator(settings)
    shared: dict[str, Any] = {
        "aggregation": settings.aggregation,
        "denominator": denominator,
        "token_weights": weights,
        "metric_denominator": counts.tokens,
    }
    args = batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask
    if settings.preset == "cispo":
        loss, metrics = cispo_loss(*args, ratio_cap=RATIO_CAP, **shared)
    else:
        level = "sequence" if settings.preset == "gspo" else "token"
        clip = {"clip_eps": settings.clip_eps, "clip_eps_high": settings.clip_eps_high}
        loss, metrics = clipped_policy_loss(*args, ratio_level=level, **clip, **shared)
    bonus, entropy_metrics = entropy_bonus(batch.entropy, batch.mask, denominator=counts.tokens)
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * bonus
    if settings.kl_coef > 0:
        assert batch.ref_logprobs is not None
        kl = ESTIMATORS[settings.kl_estimator](batch.logprobs, batch.ref_logprobs)
        penalty, kl_metrics = kl_loss(kl, batch.mask, aggregation=settings.aggregation, denominator=denominator)
        loss, metrics = loss + settings.kl_coef * penalty, metrics | kl_metrics
    if capped is not None:
        metrics["policy/capped_weights"] = masked_sum(capped.float(), batch.mask) / counts.tokens
    return loss, metrics | entropy_metrics


def sampling_gap(batch: PolicyBatch, counts: Counts) -> Metrics:
    """policy/sampling_gap, the mean |training - sampling| log-probability of a token under the policy that sampled."""
    gap = masked_sum((batch.logprobs.detach() - batch.sampling_logprobs).abs(), batch.mask)
    return {"policy/sampling_gap": gap / counts.tokens}
