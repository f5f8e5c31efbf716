"""Held-out numbers of a reward model: order, calibration by decile, expected calibration error.

A reward model predicts that the chosen side wins (pairs), that the label is the good one (labels), how high the rating
is (ratings). Where predictions are right on average at every height, it is calibrated (Guo et al. 2017, 1706.04599).
Bins hold equally many rows (deciles) and not equally wide ranges, most of which would be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from tinyrl.algorithms.preference import bradley_terry_loss, label_loss

Bin = tuple[float, float, int]  # mean prediction, mean of what turned out, rows
BINS = 10


def reliability(predicted: Sequence[float], observed: Sequence[float], *, bins: int = BINS) -> list[Bin]:
    """Rows in order of their prediction, cut into `bins` of as equal size as can be, lowest first. Rows with the same
    prediction stand in one bin, so that their order does not matter; a bin without rows is left out.
    """
    ranked = sorted(zip(predicted, observed, strict=True))
    found: dict[int, list[tuple[float, float]]] = {}
    start = 0
    for _, rows in groupby(ranked, key=lambda row: row[0]):
        same = list(rows)
        found.setdefault(bins * start // len(ranked), []).extend(same)
        start += len(same)
    return [(_mean([p for p, _ in rows]), _mean([o for _, o in rows]), len(rows)) for rows in found.values()]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean over rows of |mean prediction - mean outcome| of their bin; NaN without rows."""
    rows = sum(count for *_, count in bins)
    return sum(count * abs(predicted - observed) for predicted, observed, count in bins) / rows if rows else math.nan


def concordance(scores: Sequence[float], targets: Sequence[float]) -> float:
    """The share of pairs of rows with different targets that the scores put in the right order, a tie counting half.

    With targets 0 and 1 it is the area under the ROC curve. NaN where all targets are equal.
    """
    score, target = np.asarray(scores, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    right, pairs = 0.0, 0
    for at in range(len(score)):  # row by row: memory grows with the rows, not with their square
        lower = target < target[at]
        pairs += int(lower.sum())
        right += float((score[at] > score[lower]).sum()) + 0.5 * float((score[at] == score[lower]).sum())
    return right / pairs if pairs else math.nan


def pair_metrics(chosen: Tensor, rejected: Tensor, margins: Tensor) -> dict[str, Any]:
    """Accuracy (a tie counts half), mean margin and loss of held-out pairs; calibration of the side that is preferred:
    predicted is sigmoid(|difference of the scores|), observed whether that side is the chosen one.

    chosen, rejected, margins (those asked for): (n,), n at least 1.
    """
    loss, metrics = bradley_terry_loss(chosen, rejected, margin=margins)
    differences = [float(d) for d in chosen.double() - rejected.double()]
    wins = [0.5 if d == 0 else float(d > 0) for d in differences]
    return {
        "accuracy": float(metrics["rewards/accuracy"]),
        "margin": float(metrics["rewards/margin"]),
        "loss": float(loss),
        "num_pairs": len(chosen),
        **_calibration([_sigmoid(abs(d)) for d in differences], wins),
    }


def label_metrics(scores: Tensor, labels: Tensor) -> dict[str, Any]:
    """Accuracy at score 0 (exactly 0 counts half), mean score of the good label minus that of the other, area under
    the ROC curve and loss of held-out rows; calibration of sigmoid(score) as the probability of the good label.

    scores, labels (0 or 1): (n,), n at least 1. Without both labels there is neither margin nor area.
    """
    loss, metrics = label_loss(scores, labels)
    score, label = scores.double().tolist(), labels.double().tolist()
    good, bad = ([s for s, y in zip(score, label, strict=True) if y == which] for which in (1.0, 0.0))
    both = {"margin": _mean(good) - _mean(bad), "auc": concordance(score, label)} if good and bad else {}
    return {
        "accuracy": float(metrics["rewards/accuracy"]),
        **both,
        "loss": float(loss),
        "num_rows": len(score),
        **_calibration([_sigmoid(s) for s in score], label),
    }


def rating_metrics(scores: Tensor, ratings: Tensor, *, mean: float, deviation: float) -> dict[str, Any]:
    """Of held-out rows: accuracy (of two with different ratings the better one scores higher), correlation, loss
    (squared error in deviations); error and calibration of mean + deviation * score as the rating itself.

    scores, in deviations from the mean of the training ratings, and ratings, as they are: (n,), n at least 1. Where
    all ratings, or all scores, are equal there is no correlation, and in the first case no accuracy.
    """
    predicted, observed = (mean + deviation * scores.double()).tolist(), ratings.double().tolist()
    error = [p - o for p, o in zip(predicted, observed, strict=True)]
    ordered = {"accuracy": concordance(predicted, observed), "correlation": _correlation(predicted, observed)}
    return {
        **{name: value for name, value in ordered.items() if not math.isnan(value)},
        "loss": _mean([(e / deviation) ** 2 for e in error]),
        "rmse": math.sqrt(_mean([e * e for e in error])),
        "num_rows": len(error),
        **_calibration(predicted, observed),
    }


def _calibration(predicted: list[float], observed: list[float]) -> dict[str, Any]:
    bins = reliability(predicted, observed)
    return {"ece": expected_calibration_error(bins), "reliability": [list(one) for one in bins]}


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _correlation(first: list[float], second: list[float]) -> float:
    a, b = (np.asarray(values) - np.mean(values) for values in (first, second))
    spread = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread > 0 else math.nan


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
