"""Held-out numbers of a reward model, by hand."""

import math

import pytest
import torch

from tinyrl.evaluation.statistics import label_metrics, pair_metrics, roc_auc


def test_the_area_under_the_curve_counts_ordered_pairs_and_ties_half() -> None:
    assert roc_auc([0.35, 0.8], [0.1, 0.4]) == 0.75  # the example of scikit-learn's manual
    assert roc_auc([0.3, 0.5], [0.3]) == 0.75
    assert roc_auc([4.0], [5.0, 6.0]) == 0.0


def test_pairs() -> None:
    """Differences 2, -1 and 0, of which the second is lost."""
    found = pair_metrics(torch.tensor([3.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3))
    assert (found["accuracy"], found["num_pairs"]) == (0.5, 3)
    assert found["margin"] == pytest.approx(1 / 3)
    assert found["loss"] == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.e) + math.log(2)) / 3)


def test_the_loss_of_held_out_pairs_asks_for_their_margins() -> None:
    found = pair_metrics(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0], dtype=torch.float64))
    assert found["loss"] == pytest.approx(math.log(2))
    assert (found["margin"], found["accuracy"]) == (2.0, 1.0)


def test_labels() -> None:
    found = label_metrics(torch.tensor([2.0, -1.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert found["accuracy"] == 2.5 / 4
    assert found["margin"] == pytest.approx((2.0 + 0.0) / 2 - (-1.0 + 0.5) / 2)
    assert found["auc"] == 0.75
    assert found["num_rows"] == 4


def test_one_label_has_no_margin() -> None:
    found = label_metrics(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert not {"margin", "auc"} & {*found}
    assert found["accuracy"] == 0.5
