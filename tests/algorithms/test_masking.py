"""Masked reductions against literals; what lies under False never shows."""

import math

import pytest
import torch

from tinyrl.algorithms.losses import aggregate
from tinyrl.algorithms.masking import masked_mean, masked_sum, masked_whiten

NAN, INF = math.nan, math.inf
X = torch.tensor([[1.0, 2.0, NAN], [INF, 6.0, -3.0], [NAN, -INF, INF]])
MASK = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])


def test_sums_and_means_by_hand() -> None:
    assert masked_sum(X, MASK).item() == 6.0
    assert masked_sum(X, MASK, 1).tolist() == [3.0, 3.0, 0.0]
    assert masked_sum(X, MASK, dim=0).tolist() == [1.0, 8.0, -3.0]
    assert masked_mean(X, MASK).item() == 1.5
    assert masked_mean(X, MASK, 1).tolist() == [1.5, 1.5, 0.0]
    assert masked_mean(X, MASK, dim=0).tolist() == [1.0, 4.0, -3.0]


def test_nothing_to_average_is_zero_with_a_zero_gradient() -> None:
    x = torch.tensor([[NAN, INF]], requires_grad=True)
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    total = masked_mean(x, nothing) + masked_sum(x, nothing) + masked_mean(x, nothing, 1).sum()
    total.backward()
    assert total.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0]]


def test_whitening_by_hand() -> None:
    # 1, 2, 6, -3: mean 1.5, squares 0.25 + 0.25 + 20.25 + 20.25 = 41, variance 41 / 3
    std = math.sqrt(41 / 3)
    white = masked_whiten(X, MASK)
    want = torch.tensor([[-0.5, 0.5, 0.0], [0.0, 4.5, -4.5], [0.0, 0.0, 0.0]]) / std
    torch.testing.assert_close(white, want, rtol=1e-6, atol=1e-6)
    assert white[~MASK].tolist() == [0.0] * 5


def test_whitening_without_spread_is_zero_not_noise() -> None:
    for value in (0.0, 0.3, 1234.567):
        white = masked_whiten(torch.full((3, 37), value), torch.ones(3, 37, dtype=torch.bool))
        assert white.abs().max().item() < 1e-6
    one = torch.tensor([[True, False, False]])
    for mask in (one, ~one & one):
        assert masked_whiten(X[:1], mask).tolist() == [[0.0, 0.0, 0.0]]


def test_aggregations_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, NAN], [INF, 6.0, -2.0], [8.0, NAN, NAN], [NAN, INF, 0.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert aggregate(x, mask, aggregation="token").item() == 3.0  # 15 / 5 tokens
    assert aggregate(x, mask, aggregation="token", denominator=10).item() == 1.5
    assert aggregate(x, mask, aggregation="sequence").item() == pytest.approx(11.5 / 3)  # the empty row is not counted
    assert aggregate(x, mask, aggregation="sequence", denominator=4).item() == 11.5 / 4
    assert aggregate(x, mask, aggregation="sequence-sum").item() == 5.0  # 15 / 3 sequences
    assert aggregate(x, mask, aggregation="sequence-sum", denominator=4).item() == 3.75
    assert aggregate(x, mask, aggregation="constant", denominator=60).item() == 0.25


def test_a_step_in_which_nothing_counts_is_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for aggregation in ("token", "sequence", "sequence-sum", "constant"):
        assert aggregate(X[:2], nothing, aggregation=aggregation, denominator=0).item() == 0.0
    assert aggregate(X[:2], nothing, aggregation="sequence").item() == 0.0
