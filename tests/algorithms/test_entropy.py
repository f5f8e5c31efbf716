"""The controller of the entropy bonus, by hand."""

import math

import pytest

from tinyrl.algorithms.kl import applied_entropy_coef, next_entropy_coef


def test_the_weight_follows_the_entropy_within_its_bounds() -> None:
    coef, seen = 0.0, []
    for entropy in (0.4, 0.4, 0.4, 0.5, 0.7, 0.7, 0.7):
        coef = next_entropy_coef(coef, observed_entropy=entropy, target_entropy=0.5, step=0.25, largest=0.625)
        seen.append(coef)
    assert seen == [0.25, 0.5, 0.625, 0.625, 0.375, 0.125, 0.0]


def test_the_bonus_is_applied_where_the_entropy_is_at_most_its_target() -> None:
    observed = (None, 0.49, 0.5, 0.51)
    applied = [applied_entropy_coef(0.25, observed_entropy=e, target_entropy=0.5) for e in observed]
    assert applied == [0.0, 0.25, 0.25, 0.0]


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="observed_entropy is nan"):
        next_entropy_coef(0.0, observed_entropy=math.nan, target_entropy=0.5, step=0.1, largest=1.0)
