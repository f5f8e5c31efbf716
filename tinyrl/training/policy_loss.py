"""The policy loss of GRPO and PPO on a micro-batch: surrogate, importance weights, entropy bonus, KL.

    loss = surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference)

Every term is a sum over the micro-batch divided by a count of the whole minibatch, so micro-batching changes no
gradient. To add a surrogate, write a function as `cispo_loss` in algorithms/losses.py and a branch in `surrogate_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyrl.algorithms.kl import ESTIMATORS, k1
from tinyrl.algorithms.losses import (
    Metrics,
    cispo_loss,
    clipped_surrogate,
    entropy_bonus,
    importance_ratio,
    kl_loss,
    mismatch_weights,
)
from tinyrl.algorithms.masking import Aggregation, masked_sum

if TYPE_CHECKING:
    from tinyrl.config.method_sections import GrpoConfig, PpoConfig
    from tinyrl.generation.sample import Sample
    from tinyrl.models.batch import Batch

MISMATCH_CAP = 2.0  # of the weights for inexact sampling (Yao et al. 2025)
RATIO_CAP = 5.0  # of CISPO's importance weights
ROUNDING = 1e-4  # nats a token: two passes of one policy in float32 are nearer (3.4e-5 seen with 135M parameters)


@dataclass(frozen=True)
class Counts:
    """Denominators of a minibatch, counted over all of it.

    tokens: in the loss; sequences: with such a token; episodes: with a sequence in the loss (an agent's may have
    several); rows: all sequences; taught: tokens in the loss that a teacher has scored.
    """

    tokens: int
    sequences: int
    episodes: int
    rows: int
    taught: int

    @classmethod
    def of(cls, minibatch: Sequence[Sample]) -> Counts:
        """Count a minibatch."""
        in_loss = [sum(sample.listed("loss")[0]) for sample in minibatch]
        taught = [count for sample, count in zip(minibatch, in_loss, strict=True) if sample.taught]
        return cls(
            tokens=sum(in_loss),
            sequences=sum(count > 0 for count in in_loss),
            episodes=len({sample.episode for sample in minibatch if sample.in_loss}),
            rows=len(minibatch),
            taught=sum(taught),
        )

    def denominator(self, aggregation: Aggregation, *, max_new_tokens: int) -> int:
        """Return the divisor of the aggregation: tokens, sequences, or Dr. GRPO's constant."""
        if aggregation == "constant":
            return self.rows * max_new_tokens
        return self.tokens if aggregation == "token" else self.sequences


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Batch,
    counts: Counts,
    config: GrpoConfig | PpoConfig,
    *,
    kl_coef: float,
    max_new_tokens: int,
    inexact: bool,
) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics) of a micro-batch; `counts` are those of its minibatch, so both add up over micro-batches.

    logprobs, entropy (b, T) are the policy's, with a gradient; kl_coef is the weight of a KL in the loss (0: none);
    inexact: tokens are sampled with other numerics than training uses (bfloat16, other kernels), which
    `config.importance_correction` corrects for. Without `old` of the samples the pass's own values are the old ones, so
    that the ratio is 1.

    Metrics: the surrogate's, policy/entropy, with a KL policy/kl_loss and (without `old`) objective/kl, and where
    weights correct a mismatch between sampling and training policy/capped_weights, the share of tokens whose weight is
    above its cap.
    """
    has_old = batch.items[0].old is not None
    old = batch.padded("old") if has_old else logprobs.detach()
    denominator = counts.denominator(config.aggregation, max_new_tokens=max_new_tokens)
    loss, metrics = surrogate_loss(logprobs, old, batch, counts, config, denominator=denominator, inexact=inexact)
    bonus, entropy_metrics = entropy_bonus(entropy, batch.mask, denominator=counts.tokens)
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * bonus
    if kl_coef > 0:
        penalty, kl_metrics = kl_penalty(logprobs, old, batch, config, denominator=denominator)
        loss = loss + kl_coef * penalty
        metrics |= kl_metrics
        if not has_old:
            nats = masked_sum(k1(logprobs.detach(), batch.padded("ref")), batch.mask)
            metrics["objective/kl"] = nats / max(counts.episodes, 1)
    return loss, metrics | entropy_metrics


def surrogate_loss(
    logprobs: Tensor,
    old: Tensor,
    batch: Batch,
    counts: Counts,
    config: GrpoConfig | PpoConfig,
    *,
    denominator: int,
    inexact: bool,
) -> tuple[Tensor, Metrics]:
    """Compute the surrogate (loss, metrics) that `config.surrogate` names, with importance weights where tokens are
    sampled inexactly.
    """
    mask = batch.mask
    advantages = batch.padded("advantage")
    weights = None
    capped = None
    if inexact and config.importance_correction != "none":
        sampled = batch.padded("logprobs")
        weights, capped = mismatch_weights(old, sampled, mask, mode=config.importance_correction, cap=MISMATCH_CAP)
    if config.surrogate == "cispo":
        loss, metrics = cispo_loss(
            logprobs,
            old,
            advantages,
            mask,
            ratio_cap=RATIO_CAP,
            aggregation=config.aggregation,
            denominator=denominator,
            token_weights=weights,
            metric_denominator=counts.tokens,
        )
    else:
        loss, metrics = clipped_surrogate(
            logprobs,
            old,
            advantages,
            mask,
            clip_eps=config.clip_eps,
            clip_eps_high=config.clip_eps_high,
            ratio_level="sequence" if config.surrogate == "sequence" else "token",
            aggregation=config.aggregation,
            denominator=denominator,
            token_weights=weights,
            metric_denominator=counts.tokens,
        )
    if capped is not None:
        metrics["policy/capped_weights"] = masked_sum(capped.float(), mask) / counts.tokens
    return loss, metrics


def kl_penalty(
    logprobs: Tensor, old: Tensor, batch: Batch, config: GrpoConfig | PpoConfig, *, denominator: int
) -> tuple[Tensor, Metrics]:
    """Compute the KL to the reference in the loss, with `config.kl_unbiased` multiplied by the ratio."""
    kl = ESTIMATORS[config.kl_estimator](logprobs, batch.padded("ref"))
    ratio = importance_ratio(logprobs, old, batch.mask) if config.kl_unbiased else None
    return kl_loss(kl, batch.mask, aggregation=config.aggregation, denominator=denominator, ratio=ratio)


def sampling_gap(logprobs: Tensor, batch: Batch, counts: Counts) -> Metrics:
    """Compute policy/sampling_gap, the mean |training - sampling| log-probability of a token before an update."""
    gap = masked_sum((logprobs.detach() - batch.padded("logprobs")).abs(), batch.mask)
    return {"policy/sampling_gap": gap / counts.tokens}


def only_rounding(
    logprobs: Tensor, batch: Batch, config: GrpoConfig | PpoConfig, *, kl_coef: float, teacher_coef: float
) -> bool:
    """Return whether rounding is all that the gradient of a micro-batch would be.

    All advantages are 0, nothing is added for entropy or a teacher, and the KL in the loss, if any, is that of a policy
    which is its reference (no log-probability of a token in the loss is further than ROUNDING from it). Adam divides a
    gradient by its own size, so it would make a full step of such noise.
    """
    if config.entropy_coef > 0 or teacher_coef > 0:
        return False
    if any(sample.has_advantage for sample in batch.items):
        return False
    if kl_coef == 0:
        return True
    distance = (logprobs.detach() - batch.padded("ref")).abs()
    return bool(torch.where(batch.mask, distance, 0.0).max() <= ROUNDING)
