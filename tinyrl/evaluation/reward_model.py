"""Metrics of a reward model on held-out rows: accuracy, margin, area under the ROC curve, loss."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from tinyrl.algorithms.preference import bradley_terry_loss, label_loss


def pair_metrics(chosen: Tensor, rejected: Tensor, margins: Tensor) -> dict[str, Any]:
    """Compute accuracy (ties half), mean margin and loss of held-out pairs: scores and wanted margins (n,), n >= 1."""
    loss, metrics = bradley_terry_loss(chosen, rejected, margin=margins)
    accuracy = float(metrics["rewards/accuracy"])
    margin = float(metrics["rewards/margin"])
    return {"accuracy": accuracy, "margin": margin, "loss": float(loss), "num_pairs": len(chosen)}


def label_metrics(scores: Tensor, labels: Tensor) -> dict[str, Any]:
    """Compute accuracy at score 0 (exactly 0 counts half), mean score of label 1 minus that of label 0, area under the
    ROC curve and loss of held-out rows (n,), n >= 1. Without both labels there is neither margin nor area.
    """
    loss, metrics = label_loss(scores, labels)
    good = scores.double()[labels == 1].tolist()
    bad = scores.double()[labels == 0].tolist()
    both = {"margin": fmean(good) - fmean(bad), "auc": roc_auc(good, bad)} if good and bad else {}
    return {"accuracy": float(metrics["rewards/accuracy"]), **both, "loss": float(loss), "num_rows": len(scores)}


def roc_auc(good: Sequence[float], bad: Sequence[float]) -> float:
    """Return the share of pairs of a good and a bad row in which the good one scores higher, a tie counting half."""
    ordered = np.sort(np.asarray(bad, dtype=np.float64))
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.sum() / (2 * len(good) * len(bad)))
