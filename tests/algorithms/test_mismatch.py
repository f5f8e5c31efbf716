"""Weights between sampling and training: by hand, and against a loop over Python floats."""

import math
from typing import Any

import pytest
import torch

from tinyrl.algorithms.losses import mismatch_weights

NAN = math.nan


def weights_of(ratios: list[list[float]], mask: list[list[int]], **settings: Any) -> tuple[list[float], list[bool]]:
    """Weights, and where a bound decided, of the True tokens; under False lies NaN."""
    chosen = torch.tensor(mask).bool()
    sampling = torch.where(chosen, torch.full(chosen.shape, -1.0), NAN)
    weights, bounded = mismatch_weights(sampling + torch.tensor(ratios).log(), sampling, chosen, **settings)
    return weights[chosen].tolist(), bounded[chosen].tolist()


@pytest.mark.parametrize(
    ("settings", "weights", "bounded"),
    [
        ({"mode": "token", "cap": 2.0}, [0.5, 1.5, 2.0, 0.25], [0, 0, 1, 0]),
        ({"mode": "token-mask", "cap": 2.0}, [0.5, 1.5, 0.0, 0.25], [0, 0, 1, 0]),
        ({"mode": "token-mask", "cap": 5.0, "floor": 0.4}, [0.5, 1.5, 4.0, 0.0], [0, 0, 0, 1]),
        ({"mode": "sequence", "cap": 5.0}, [3.0, 3.0, 3.0, 0.25], [0, 0, 0, 0]),
        ({"mode": "sequence", "cap": 2.0}, [2.0, 2.0, 2.0, 0.25], [1, 1, 1, 0]),
        ({"mode": "sequence-mask", "cap": 5.0}, [3.0, 3.0, 3.0, 0.25], [0, 0, 0, 0]),
        ({"mode": "sequence-mask", "cap": 2.0, "floor": 0.3}, [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]),
    ],
)
def test_by_hand(settings: dict[str, Any], weights: list[float], bounded: list[int]) -> None:
    """A row with ratios 1/2, 3/2 and 4 around a token that was read, whose product is 3, and a row of one token."""
    got = weights_of([[0.5, 9.0, 1.5, 4.0], [0.25, 9.0, 9.0, 9.0]], [[1, 0, 1, 1], [1, 0, 0, 0]], **settings)
    assert got == (pytest.approx(weights), [bool(b) for b in bounded])


def test_extreme_ratios_stay_finite_and_carry_no_gradient() -> None:
    old = torch.tensor([[0.0, -900.0]], requires_grad=True)
    mask = torch.ones(1, 2).bool()
    weights, _ = mismatch_weights(old, torch.tensor([[-900.0, 0.0]]), mask, mode="token-mask", cap=1e6)
    assert weights.tolist() == [[0.0, 0.0]]
    assert not weights.requires_grad
