"""Preference losses: DPO, IPO, KTO, ORPO, SimPO and Bradley-Terry on pairs; labels of single responses.

What differs from the papers: `denominator` (the pairs of the whole optimizer step; None: of this batch), so that
micro-batching changes neither gradient nor metrics; with it the metrics of micro-batches add up. A tie counts as half
in the accuracy, so that a model that knows nothing scores 0.5.

Tensors hold one number per response, (B,); a loss is 0-dim. Shapes, beta > 0 and 0 <= label_smoothing < 0.5 are
asserted. Every loss names its reward of a response; its metrics are preference/loss, rewards/chosen, rewards/rejected,
rewards/margin and rewards/accuracy, means over pairs. "Mean log-probability": over the response's tokens; else they are
summed. log p is the policy's, log q the reference's (no gradient).
"""

import torch
from torch import Tensor
from torch.nn import functional

from tinyrl.algorithms.losses import Metrics


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Direct preference optimization: mean of -log sigmoid(beta ((log p - log q)(chosen) - (log p - log q)(rejected))).

    DPO (2305.18290) Eq. 7; each log-probability summed over the response. Reward: beta (log p - log q).
    With label_smoothing s a label is right with probability 1 - s: (1 - s) loss + s (loss with the sides swapped), the
    conservative DPO of its author's note. TRL's `sigmoid` does not read label_smoothing; its `robust` is another loss.
    """
    pairs = chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs
    chosen, rejected = _rewards(*pairs, beta=beta)
    return _pairwise_loss(chosen, rejected, label_smoothing, denominator)


def ipo_loss(*logprobs: Tensor, beta: float, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Identity preference optimization: mean of (h - 1 / (2 beta))^2, h = (log p - log q)(chosen) - (...)(rejected).

    IPO (2310.12036) Eq. 17; beta is its tau. Reward: beta (log p - log q), so a pair is learnt at a margin of 1/2.
    With summed log-probabilities this is the equation as it stands. With means over the response's tokens it is TRL's
    `ipo`, by whose account the paper's authors confirmed them: 1 / (2 beta) is then in nats per token.
    logprobs: the four of `dpo_loss`.
    """
    chosen, rejected = _rewards(*logprobs, beta=beta)
    pairs = _count(chosen, denominator)
    loss = (((chosen - rejected - 0.5) / beta) ** 2).sum() / pairs
    return loss, _pair_metrics(loss, chosen, rejected, pairs)


def kto_loss(*logprobs: Tensor, beta: float, kl: float, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Kahneman-Tversky optimization on pairs: mean over both sides of 1 - sigmoid(+-beta (log p - log q - kl)).

    KTO (2402.01306) Sec. 4: a chosen response is desirable (+), a rejected one undesirable (-), each an example of its
    own with weight 1 (lambda_D = lambda_U), so the sum is divided by twice the pairs. Reward: beta (log p - log q).
    kl >= 0 is the reference point z_0 in nats, without gradient: `mismatched_kl` over all pairs of the step.
    logprobs: the four of `dpo_loss`.
    """
    assert not kl < 0, f"kl is {kl}"
    chosen, rejected = _rewards(*logprobs, beta=beta)
    pairs = _count(chosen, denominator)
    loss = (torch.sigmoid(beta * kl - chosen) + torch.sigmoid(rejected - beta * kl)).sum() / (2 * pairs)
    return loss, _pair_metrics(loss, chosen, rejected, pairs)


def mismatched_kl(logprobs: Tensor, ref_logprobs: Tensor) -> float:
    """KTO's reference point: max(0, mean of log p - log q) over responses that belong to other prompts.

    KTO (2402.01306) Sec. 4: a cheap stand-in for the KL of policy and reference, biased, and not finite where one of
    them is not. Both of one shape.
    """
    assert logprobs.shape == ref_logprobs.shape, f"{tuple(logprobs.shape)} against {tuple(ref_logprobs.shape)}"
    return float((logprobs.detach().float() - ref_logprobs.detach().float()).mean().clamp(min=0.0))


def orpo_loss(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, beta: float, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """Odds ratio preference optimization: mean of -log P(chosen) - beta log sigmoid(margin of the log odds).

    ORPO (2403.07691) Eqs. 6 and 7, beta its lambda, without a reference; log P is the mean log-probability,
    odds = P / (1 - P). Reward: the log odds. TRL's likelihood term counts the prompt's tokens too and averages over the
    tokens of the batch; the paper's, taken here, is the response's, averaged over pairs (the metric preference/nll).
    P is kept below 1 - 1e-6, since the odds of 1 are infinite.
    """
    assert beta > 0, f"beta is {beta}"
    _assert_alike(chosen_logprobs, rejected_logprobs)
    logprobs = [x.float().clamp(max=-1e-6) for x in (chosen_logprobs, rejected_logprobs)]
    chosen, rejected = (log_p - torch.log(-torch.expm1(log_p)) for log_p in logprobs)
    pairs = _count(chosen, denominator)
    nll = -chosen_logprobs.float().sum() / pairs
    loss = nll - beta * functional.logsigmoid(chosen - rejected).sum() / pairs
    return loss, {**_pair_metrics(loss, chosen, rejected, pairs), "preference/nll": nll.detach()}


def simpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    *,
    beta: float,
    target_margin: float,
    denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Simple preference optimization: mean of -log sigmoid(beta log P(chosen) - beta log P(rejected) - target_margin).

    SimPO (2405.14734) Eq. 6, target_margin its gamma, without a reference; log P is the mean log-probability.
    Reward: beta log P.
    """
    assert beta > 0, f"beta is {beta}"
    _assert_alike(chosen_logprobs, rejected_logprobs)
    chosen = beta * chosen_logprobs.float()
    rejected = beta * rejected_logprobs.float()
    return _pairwise_loss(chosen, rejected, 0.0, denominator, margin=target_margin)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Metrics]:
    """A reward model's loss: mean of -log sigmoid(s(chosen) - s(rejected) - margin). Reward: the score s.

    Bradley-Terry as in InstructGPT (2203.02155) Eq. 1, with one pair per prompt; margin as in Llama 2 (2307.09288)
    Eq. 2, None: 0. rewards/margin is the difference of the scores; the margin asked for is not subtracted.
    """
    _assert_alike(chosen_scores, rejected_scores, *([] if margin is None else [margin]))
    asked = 0.0 if margin is None else margin.float()
    return _pairwise_loss(chosen_scores.float(), rejected_scores.float(), 0.0, denominator, margin=asked)


def label_loss(scores: Tensor, labels: Tensor, *, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Binary cross-entropy: mean of -y log sigmoid(s) - (1 - y) log sigmoid(-s), so that s becomes the log-odds of y.

    y in {0, 1}; as in Cobbe et al. (2110.14168) for verifiers.
    Metrics: loss, rewards/mean (of the scores), rewards/accuracy (s > 0 where y is 1, s < 0 where it is 0).
    """
    _assert_alike(scores, labels)
    count = _count(scores, denominator)
    scores = scores.float()
    labels = labels.float()
    loss = -(labels * functional.logsigmoid(scores) + (1 - labels) * functional.logsigmoid(-scores)).sum() / count
    means = {
        "rewards/mean": scores.detach().sum() / count,
        "rewards/accuracy": _wins((2 * labels - 1) * scores) / count,
    }
    return loss, {"loss": loss.detach(), **means}


def _assert_alike(first: Tensor, *others: Tensor) -> None:
    assert first.dim() == 1, f"one number per response, (B,), not {tuple(first.shape)}"
    for other in others:
        assert other.shape == first.shape, f"{tuple(first.shape)} against {tuple(other.shape)}"


def _count(rewards: Tensor, denominator: float | None) -> float:
    assert denominator is None or denominator > 0, f"denominator is {denominator}"
    return max(len(rewards), 1) if denominator is None else denominator


def _rewards(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float):
    """Return beta (log p - log q) of chosen and rejected."""
    assert beta > 0, f"beta is {beta}"
    _assert_alike(chosen, rejected, ref_chosen, ref_rejected)
    pairs = ((chosen, ref_chosen), (rejected, ref_rejected))
    return tuple(beta * (logprobs.float() - ref_logprobs.detach().float()) for logprobs, ref_logprobs in pairs)


def _pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    label_smoothing: float,
    denominator: float | None,
    *,
    margin: Tensor | float = 0.0,
) -> tuple[Tensor, Metrics]:
    assert 0 <= label_smoothing < 0.5, f"label_smoothing is {label_smoothing}"
    pairs = _count(chosen, denominator)
    loss = -functional.logsigmoid(chosen - rejected - margin).sum() / pairs
    if label_smoothing > 0:
        swapped = -functional.logsigmoid(rejected - chosen - margin).sum() / pairs
        loss = (1 - label_smoothing) * loss + label_smoothing * swapped
    return loss, _pair_metrics(loss, chosen, rejected, pairs)


def _wins(differences: Tensor) -> Tensor:
    """Count the positive numbers, a 0 as half."""
    return (differences > 0).float().sum() + 0.5 * (differences == 0).float().sum()


@torch.no_grad()
def _pair_metrics(loss: Tensor, chosen: Tensor, rejected: Tensor, pairs: float) -> Metrics:
    return {
        "preference/loss": loss.detach(),
        "rewards/chosen": chosen.sum() / pairs,
        "rewards/rejected": rejected.sum() / pairs,
        "rewards/margin": (chosen - rejected).sum() / pairs,
        "rewards/accuracy": _wins(chosen - rejected) / pairs,
    }
