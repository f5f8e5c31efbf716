"""What a step learns from, and the policy loss of GRPO and PPO on it: surrogate, importance weights, entropy bonus, KL.

    loss = surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference)

Every term is a sum over the micro-batch divided by a count of the whole minibatch, so micro-batching changes no
gradient. To add a surrogate, write a function as `cispo_loss` in algorithms/losses.py and a branch in `surrogate_loss`.
To add a number of each token that a loss reads: a field of `LossInputs`, and the trainer that sets it.

Axis letters: B samples of a step, b of a micro-batch, T longest response. x[:, t] is of response token t, 0 where there
is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tinyrl.algorithms.kl import ESTIMATORS, k1
from tinyrl.algorithms.losses import (
    Aggregation,
    Metrics,
    cispo_loss,
    clipped_surrogate,
    entropy_bonus,
    importance_ratio,
    kl_loss,
    mismatch_weights,
)
from tinyrl.algorithms.masking import masked_sum

if TYPE_CHECKING:
    from tinyrl.config.method_sections import Mismatch, Surrogate
    from tinyrl.generation.sample import Sample
    from tinyrl.models.batch import Batch
    from tinyrl.models.logprobs import Teaching

MISMATCH_CAP = 2.0  # of the weights for inexact sampling (Yao et al. 2025)
RATIO_CAP = 5.0  # of CISPO's importance weights
ROUNDING = 1e-4  # nats per token: two passes of one policy in float32 are nearer (3.4e-5 seen with 135M parameters)


# ---- what a loss reads ----


@dataclass(frozen=True)
class LossInputs:
    """What a loss reads of each response token: (B, T) of the samples of a step, (b, T) of those of a micro-batch.

    None: this run does not need it. mask is bool, the others are float32 without gradient; log-probabilities are in
    nats.
    """

    mask: Tensor  # tokens in the loss
    sampled: Tensor  # log-probabilities as recorded while sampling
    advantage: Tensor
    old: Tensor | None = None  # log-probabilities under the policy before the update: the ratio's denominator
    reference: Tensor | None = None  # log-probabilities under the reference
    values: Tensor | None = None  # of the critic before the update
    returns: Tensor | None = None  # that the critic is to predict

    def rows(self, rows: Sequence[int]) -> LossInputs:
        """Return those of some of the samples."""
        chosen = [*rows]
        return self._each(lambda x: x[chosen])

    def of(self, batch: Batch) -> LossInputs:
        """Return those of a micro-batch of these samples (b, T), T being its longest response, on its device."""
        rows = torch.tensor([*batch.rows])  # these are on the CPU, so no GPU waits for them
        return self._each(lambda x: batch.on_device(x[rows, : batch.num_columns]))

    def _each(self, change: Callable[[Tensor], Tensor]) -> LossInputs:
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return LossInputs(
            mask=change(self.mask),
            sampled=change(self.sampled),
            advantage=change(self.advantage),
            old=changed(self.old),
            reference=changed(self.reference),
            values=changed(self.values),
            returns=changed(self.returns),
        )


@dataclass(frozen=True)
class TeacherOutputs:
    """What a teacher says of samples: log-probabilities (B, T) of their tokens in the loss; the distributions at these,
    for each sample; and which samples it has scored (`taught`), having had a text of `teacher.hint` for them.
    """

    logprobs: Tensor
    distributions: list[Teaching]
    taught: list[bool]

    def rows(self, rows: Sequence[int]) -> TeacherOutputs:
        """Return those of some of the samples."""
        return TeacherOutputs(
            logprobs=self.logprobs[[*rows]],
            distributions=[self.distributions[row] for row in rows],
            taught=[self.taught[row] for row in rows],
        )


@dataclass(frozen=True)
class Experience:
    """The samples of a step or of a minibatch, the inputs of their loss, and the outputs of a teacher, if any."""

    samples: list[Sample]
    inputs: LossInputs
    teacher: TeacherOutputs | None = None

    @cached_property
    def has_advantage(self) -> list[bool]:
        """Return which samples have an advantage on some token in the loss, found once for all micro-batches."""
        return torch.where(self.inputs.mask, self.inputs.advantage, 0.0).any(dim=1).tolist()

    @cached_property
    def is_taught(self) -> list[bool]:
        """Return which samples have tokens in the loss that a teacher has scored."""
        if self.teacher is None:
            return [False] * len(self.samples)
        return [sample.in_loss and taught for sample, taught in zip(self.samples, self.teacher.taught, strict=True)]

    def rows(self, rows: Sequence[int]) -> Experience:
        """Return some of the samples: a minibatch."""
        return Experience(
            samples=[self.samples[row] for row in rows],
            inputs=self.inputs.rows(rows),
            teacher=None if self.teacher is None else self.teacher.rows(rows),
        )

    def plain(self) -> list[dict[str, Any]]:
        """Convert to JSON, for the record of a batch that is not finite."""
        inputs = self.inputs
        columns = {
            "advantage": inputs.advantage,
            "old": inputs.old,
            "ref": inputs.reference,
            "values": inputs.values,
            "returns": inputs.returns,
            "teacher": None if self.teacher is None else self.teacher.logprobs,
        }
        lines = list[dict[str, Any]]()
        for row, sample in enumerate(self.samples):
            length = len(sample.response)
            numbers = {name: None if x is None else x[row, :length].tolist() for name, x in columns.items()}
            lines.append(sample.plain() | numbers)
        return lines


# ---- the loss ----


@dataclass(frozen=True)
class PolicyLossOptions:
    """What the policy loss of an optimizer step is made of. The defaults are what PPO's paper fixes, and GRPO's family
    varies.

    kl_coef: weight of a KL in the loss (0: none); inexact: tokens are sampled with other numerics than training uses
    (bfloat16, other kernels), which `importance_correction` corrects for; clip_eps_high: None is clip_eps.
    """

    clip_eps: float
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: float
    max_new_tokens: int
    inexact: bool
    surrogate: Surrogate = "clip"
    clip_eps_high: float | None = None
    aggregation: Aggregation = "token"
    importance_correction: Mismatch = "token"
    kl_unbiased: bool = False


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
    def of(cls, minibatch: Experience) -> Counts:
        """Count a minibatch."""
        samples = minibatch.samples
        in_loss = [sum(sample.listed("loss")[0]) for sample in samples]
        is_taught = [True] * len(samples) if minibatch.teacher is None else minibatch.teacher.taught
        taught = [count for count, scored in zip(in_loss, is_taught, strict=True) if scored]
        return cls(
            tokens=sum(in_loss),
            sequences=sum(count > 0 for count in in_loss),
            episodes=len({sample.episode for sample in samples if sample.in_loss}),
            rows=len(samples),
            taught=sum(taught),
        )

    def denominator(self, aggregation: Aggregation, *, max_new_tokens: int) -> int:
        """Return the divisor of the aggregation: tokens, sequences, or Dr. GRPO's constant."""
        if aggregation == "constant":
            return self.rows * max_new_tokens
        return self.tokens if aggregation == "token" else self.sequences


def policy_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, counts: Counts, options: PolicyLossOptions
) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics) of a micro-batch; `counts` are those of its minibatch, so both add up over micro-batches.

    logprobs, entropy (b, T) are the policy's, with a gradient. Without `old` the pass's own values are the old ones, so
    that the ratio is 1.

    Metrics: the surrogate's, policy/entropy, with a KL policy/kl_loss and (without `old`) objective/kl, and where
    weights correct a mismatch between sampling and training policy/capped_weights, the share of tokens whose weight is
    above its cap.
    """
    old = logprobs.detach() if inputs.old is None else inputs.old
    denominator = counts.denominator(options.aggregation, max_new_tokens=options.max_new_tokens)
    loss, metrics = surrogate_loss(logprobs, old, inputs, counts, options, denominator=denominator)
    bonus, entropy_metrics = entropy_bonus(entropy, inputs.mask, denominator=counts.tokens)
    if options.entropy_coef > 0:
        loss = loss - options.entropy_coef * bonus
    if options.kl_coef > 0:
        assert inputs.reference is not None
        penalty, kl_metrics = kl_penalty(logprobs, old, inputs.reference, inputs.mask, options, denominator=denominator)
        loss = loss + options.kl_coef * penalty
        metrics |= kl_metrics
        if inputs.old is None:
            nats = masked_sum(k1(logprobs.detach(), inputs.reference), inputs.mask)
            metrics["objective/kl"] = nats / max(counts.episodes, 1)
    return loss, metrics | entropy_metrics


def surrogate_loss(
    logprobs: Tensor,
    old: Tensor,
    inputs: LossInputs,
    counts: Counts,
    options: PolicyLossOptions,
    *,
    denominator: int,
) -> tuple[Tensor, Metrics]:
    """Compute the surrogate (loss, metrics) that `options.surrogate` names, with importance weights where tokens are
    sampled inexactly.
    """
    mask = inputs.mask
    advantages = inputs.advantage
    weights = None
    capped = None
    if options.inexact and options.importance_correction != "none":
        mode = options.importance_correction
        weights, capped = mismatch_weights(old, inputs.sampled, mask, mode=mode, cap=MISMATCH_CAP)
    if options.surrogate == "cispo":
        loss, metrics = cispo_loss(
            logprobs,
            old,
            advantages,
            mask,
            ratio_cap=RATIO_CAP,
            aggregation=options.aggregation,
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
            clip_eps=options.clip_eps,
            clip_eps_high=options.clip_eps_high,
            ratio_level="sequence" if options.surrogate == "sequence" else "token",
            aggregation=options.aggregation,
            denominator=denominator,
            token_weights=weights,
            metric_denominator=counts.tokens,
        )
    if capped is not None:
        metrics["policy/capped_weights"] = masked_sum(capped.float(), mask) / counts.tokens
    return loss, metrics


def kl_penalty(
    logprobs: Tensor, old: Tensor, reference: Tensor, mask: Tensor, options: PolicyLossOptions, *, denominator: int
) -> tuple[Tensor, Metrics]:
    """Compute the KL to the reference in the loss, with `options.kl_unbiased` multiplied by the ratio."""
    kl = ESTIMATORS[options.kl_estimator](logprobs, reference)
    ratio = importance_ratio(logprobs, old, mask) if options.kl_unbiased else None
    return kl_loss(kl, mask, aggregation=options.aggregation, denominator=denominator, ratio=ratio)


def sampling_gap(logprobs: Tensor, inputs: LossInputs, counts: Counts) -> Metrics:
    """Compute policy/sampling_gap, the mean |training - sampling| log-probability of a token before an update."""
    gap = masked_sum((logprobs.detach() - inputs.sampled).abs(), inputs.mask)
    return {"policy/sampling_gap": gap / counts.tokens}


def only_rounding(logprobs: Tensor, inputs: LossInputs, *, kl_coef: float) -> bool:
    """Return whether rounding is all that the gradient of a micro-batch would be, in which all advantages are 0 and
    nothing is added for entropy or a teacher.

    The KL in the loss, if any, is then that of a policy which is its reference: no log-probability of a token in the
    loss is further than ROUNDING from it. Adam divides a gradient by its own size, so it would make a full step of such
    noise.
    """
    if kl_coef == 0:
        return True
    assert inputs.reference is not None
    distance = (logprobs.detach() - inputs.reference).abs()
    return bool(torch.where(inputs.mask, distance, 0.0).max() <= ROUNDING)
