"""Preference losses on pairs of a chosen and a rejected response: DPO and Bradley-Terry.

What differs from the papers: `denominator` (the pairs of the whole optimizer step; None: of this batch), so that
micro-batching changes neither gradient nor metrics; with it the metrics of micro-batches add up. A tie counts as half
in the accuracy, so that a model that knows nothing scores 0.5.
"""

import torch
from torch import Tensor
from torch.nn import functional

Metrics = dict[str, Tensor]


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

    DPO (2305.18290) Eq. 7; p the policy, q the reference (no gradient), each log-probability summed over the response.
    With label_smoothing s a label is right with probability 1 - s: (1 - s) loss + s (loss with the sides swapped).
    Metrics: preference/loss, rewards/chosen and rewards/rejected (beta (log p - log q)), rewards/margin,
    rewards/accuracy.
    All four: (B,), [b] with b in [0, B) -> 0-dim. Raises AssertionError on shapes and beta <= 0.
    """
    assert beta > 0, f"beta is {beta}"
    _assert_pairs(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    chosen_rewards = beta * (chosen_logprobs.float() - ref_chosen_logprobs.detach().float())
    rejected_rewards = beta * (rejected_logprobs.float() - ref_rejected_logprobs.detach().float())
    return _pairwise_loss(chosen_rewards, rejected_rewards, label_smoothing, denominator)


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, label_smoothing: float = 0.0, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """A reward model's loss: mean of -log sigmoid(s(chosen) - s(rejected)).

    Bradley-Terry as in InstructGPT (2203.02155) Eq. 1, with one pair per prompt; label_smoothing as in `dpo_loss`.
    Metrics: preference/loss, rewards/chosen and rewards/rejected (the scores), rewards/margin, rewards/accuracy.
    chosen_scores, rejected_scores: (B,), [b] with b in [0, B) -> 0-dim. Raises AssertionError on shapes.
    """
    _assert_pairs(chosen_scores, rejected_scores)
    return _pairwise_loss(chosen_scores.float(), rejected_scores.float(), label_smoothing, denominator)


def _assert_pairs(first: Tensor, *others: Tensor) -> None:
    assert first.dim() == 1, f"one number per response, (B,), not {tuple(first.shape)}"
    for other in others:
        assert other.shape == first.shape, f"{tuple(first.shape)} against {tuple(other.shape)}"


def _pairwise_loss(
    chosen: Tensor, rejected: Tensor, label_smoothing: float, denominator: float | None
) -> tuple[Tensor, Metrics]:
    assert denominator is None or denominator > 0, f"denominator is {denominator}"
    assert 0 <= label_smoothing < 0.5, f"label_smoothing is {label_smoothing}"
    pairs = max(len(chosen), 1) if denominator is None else denominator
    margin = chosen - rejected
    loss = -functional.logsigmoid(margin).sum() / pairs
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss - label_smoothing * functional.logsigmoid(-margin).sum() / pairs
    with torch.no_grad():
        wins = (margin > 0).float() + 0.5 * (margin == 0).float()
        metrics = {
            "preference/loss": loss.detach(),
            "rewards/chosen": chosen.sum() / pairs,
            "rewards/rejected": rejected.sum() / pairs,
            "rewards/margin": margin.sum() / pairs,
            "rewards/accuracy": wins.sum() / pairs,
        }
    return loss, metrics
