"""Losses of one score per response: binary cross-entropy on labels, squared error on ratings.

`denominator` (the responses of the whole optimizer step; None: of this batch) as in preference.py: the metrics of
micro-batches add up. A score of exactly 0 counts as half in the accuracy.
"""

import torch
from torch import Tensor
from torch.nn import functional

Metrics = dict[str, Tensor]


def label_loss(
    scores: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, denominator: float | None = None
) -> tuple[Tensor, Metrics]:
    """Binary cross-entropy: mean of -y log sigmoid(s) - (1 - y) log sigmoid(-s), so that s becomes the log-odds of y.

    y in {0, 1}; as in Cobbe et al. (2110.14168) for verifiers. With label_smoothing a, a label is right with
    probability 1 - a: y is replaced by (1 - a) y + a (1 - y).
    Metrics: loss, rewards/mean (of the scores), rewards/accuracy (s > 0 where y is 1, s < 0 where it is 0).
    scores, labels: (B,), [b] with b in [0, B) -> 0-dim. Raises AssertionError on shapes.
    """
    count = _count(scores, labels, denominator)
    assert 0 <= label_smoothing < 0.5, f"label_smoothing is {label_smoothing}"
    scores, labels = scores.float(), labels.float()
    right = (1 - label_smoothing) * labels + label_smoothing * (1 - labels)
    loss = -(right * functional.logsigmoid(scores) + (1 - right) * functional.logsigmoid(-scores)).sum() / count
    with torch.no_grad():
        toward = (2 * labels - 1) * scores
        wins = (toward > 0).float() + 0.5 * (toward == 0).float()
        metrics = {
            "loss": loss.detach(),
            "rewards/mean": scores.sum() / count,
            "rewards/accuracy": wins.sum() / count,
        }
    return loss, metrics


def rating_loss(scores: Tensor, ratings: Tensor, *, denominator: float | None = None) -> tuple[Tensor, Metrics]:
    """Regression: mean of (s - r)^2, so that s becomes the mean rating of such a response (HelpSteer2, 2406.08673).

    Metrics: loss, rewards/mean (of the scores).
    scores, ratings: (B,), [b] with b in [0, B) -> 0-dim. Raises AssertionError on shapes.
    """
    count = _count(scores, ratings, denominator)
    loss = (scores.float() - ratings.float()).square().sum() / count
    with torch.no_grad():
        return loss, {"loss": loss.detach(), "rewards/mean": scores.float().sum() / count}


def _count(scores: Tensor, targets: Tensor, denominator: float | None) -> float:
    assert scores.dim() == 1, f"one number per response, (B,), not {tuple(scores.shape)}"
    assert targets.shape == scores.shape, f"{tuple(scores.shape)} against {tuple(targets.shape)}"
    assert denominator is None or denominator > 0, f"denominator is {denominator}"
    return max(len(scores), 1) if denominator is None else denominator
