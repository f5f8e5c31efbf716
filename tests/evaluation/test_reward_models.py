"""Held-out numbers of a reward model, by hand."""

import math

import pytest
import torch

from tinyrl.evaluation.statistics import (
    concordance,
    expected_calibration_error,
    label_metrics,
    pair_metrics,
    reliability,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_deciles_hold_equally_many_rows() -> None:
    predicted = [i / 20 for i in range(20)]
    observed = [0.0] * 10 + [1.0] * 10
    bins = reliability(list(reversed(predicted)), list(reversed(observed)))
    assert [rows for *_, rows in bins] == [2] * 10
    assert [p for p, *_ in bins] == pytest.approx([0.025 + 0.1 * i for i in range(10)])
    assert [o for _, o, _ in bins] == [0.0] * 5 + [1.0] * 5
    # distances 0.025, 0.125, 0.225, 0.325, 0.425 below the middle, 0.475, 0.375, 0.275, 0.175, 0.075 above it
    assert expected_calibration_error(bins) == pytest.approx(0.25)


def test_equal_predictions_stand_in_one_bin_whatever_the_order_of_the_rows() -> None:
    """Of 4 bins for 8 rows each has 2; the five rows of 0.5 begin in the second and fill the third and the fourth too,
    all but the last row.
    """
    rows = [(0.1, 0.0), (0.2, 1.0), *[(0.5, o) for o in (1.0, 0.0, 1.0, 1.0, 0.0)], (0.9, 1.0)]
    predicted, observed = [p for p, _ in rows], [o for _, o in rows]
    bins = reliability(predicted, observed, bins=4)
    assert bins == [(pytest.approx(0.15), 0.5, 2), (0.5, 0.6, 5), (0.9, 1.0, 1)]
    assert reliability(predicted[::-1], observed[::-1], bins=4) == bins
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.35 + 5 * 0.1 + 0.1) / 8)


def test_few_rows_and_none() -> None:
    assert reliability([0.7], [1.0]) == [(0.7, 1.0, 1)]
    assert reliability([0.7, 0.2, 0.4], [1.0, 0.0, 1.0]) == [(0.2, 0.0, 1), (0.4, 1.0, 1), (0.7, 1.0, 1)]
    assert reliability([], []) == []
    assert math.isnan(expected_calibration_error([]))
    with pytest.raises(ValueError, match="zip"):
        reliability([0.1], [])


def test_concordance_counts_pairs_of_different_targets() -> None:
    # of (1,2) (1,3) (2,3) with targets 1 2 3: the middle is scored highest
    assert concordance([0.1, 0.9, 0.5], [1.0, 2.0, 3.0]) == pytest.approx(2 / 3)
    assert concordance([0.3, 0.3, 0.5], [1.0, 2.0, 2.0]) == 0.75  # one tie, one right; equal targets do not count
    assert concordance([5.0, 4.0], [0.0, 1.0]) == 0.0
    assert math.isnan(concordance([1.0, 2.0], [3.0, 3.0]))


def test_concordance_of_two_labels_is_the_area_under_the_curve() -> None:
    scores, labels = [0.1, 0.4, 0.35, 0.8], [0.0, 0.0, 1.0, 1.0]
    assert concordance(scores, labels) == 0.75  # the example of scikit-learn's manual


def test_pairs() -> None:
    """Differences 2, -1 and 0, of which the second is lost at a confidence of sigmoid(1)."""
    found = pair_metrics(torch.tensor([3.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3))
    assert (found["accuracy"], found["num_pairs"]) == (0.5, 3)
    assert found["margin"] == pytest.approx(1 / 3)
    assert found["loss"] == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.e) + math.log(2)) / 3)
    assert found["reliability"] == [[0.5, 0.5, 1], [pytest.approx(sigmoid(1)), 0, 1], [pytest.approx(sigmoid(2)), 1, 1]]
    assert found["ece"] == pytest.approx((0 + sigmoid(1) + 1 - sigmoid(2)) / 3)


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
    assert [one[1] for one in found["reliability"]] == [0.0, 1.0, 0.0, 1.0]
    off = [sigmoid(-1), 0.5, sigmoid(0.5), 1 - sigmoid(2)]
    assert found["ece"] == pytest.approx(sum(off) / 4)


def test_one_label_has_no_margin() -> None:
    found = label_metrics(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert not {"margin", "auc"} & {*found}
    assert found["accuracy"] == 0.5


def test_scores_far_out_are_certain() -> None:
    found = pair_metrics(torch.tensor([5000.0]), torch.tensor([-5000.0]), torch.zeros(1))
    assert found["reliability"] == [[1.0, 1.0, 1]]
    found = label_metrics(torch.tensor([-5000.0, 5000.0]), torch.tensor([0.0, 1.0]))
    assert found["ece"] == 0.0
