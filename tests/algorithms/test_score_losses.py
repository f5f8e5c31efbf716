"""Losses of a reward model against literals: pairs that ask for a margin, labels, ratings."""

import math

import pytest
import torch

from tinyrl.algorithms.preference import bradley_terry_loss, label_loss


def minus_log_sigmoid(x: float) -> float:
    return math.log(1.0 + math.exp(-x))


def test_a_margin_is_asked_of_the_difference() -> None:
    """Scores 3 against 1 with 0.5 asked for, 1 against 1.5 with 2, 0 against 0 with none."""
    chosen = torch.tensor([3.0, 1.0, 0.0], requires_grad=True)
    loss, metrics = bradley_terry_loss(
        chosen, torch.tensor([1.0, 1.5, 0.0]), margin=torch.tensor([0.5, 2.0, 0.0])
    )  # fmt: skip
    loss.backward()
    want = (minus_log_sigmoid(1.5) + minus_log_sigmoid(-2.5) + math.log(2.0)) / 3
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert chosen.grad is not None
    slopes = [-1 / 3 / (1 + math.exp(x)) for x in (1.5, -2.5, 0.0)]
    assert chosen.grad.tolist() == pytest.approx(slopes, rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "preference/loss": want,
            "rewards/chosen": 4 / 3,
            "rewards/rejected": 2.5 / 3,
            "rewards/margin": 0.5,  # what was asked for is not subtracted
            "rewards/accuracy": 0.5,  # nor does it decide who wins: one won, one lost, one tied
        },
        rel=1e-6,
    )


def test_a_pair_labelled_wrongly_asks_for_its_margin_the_other_way_round() -> None:
    loss, _ = bradley_terry_loss(
        torch.tensor([3.0]), torch.tensor([1.0]), margin=torch.tensor([0.5]), label_smoothing=0.1
    )
    assert loss.item() == pytest.approx(0.9 * minus_log_sigmoid(1.5) + 0.1 * minus_log_sigmoid(-2.5), rel=1e-6)


def test_labels_by_hand() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, 0.0], requires_grad=True)
    loss, metrics = label_loss(scores, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    loss.backward()
    want = (minus_log_sigmoid(2.0) + minus_log_sigmoid(1.0) + minus_log_sigmoid(-0.5) + math.log(2.0)) / 4
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert scores.grad is not None
    share = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 0.5, 0.0)]
    slopes = [(p - y) / 4 for p, y in zip(share, (1, 0, 0, 1), strict=True)]
    assert scores.grad.tolist() == pytest.approx(slopes, rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"loss": want, "rewards/mean": 0.375, "rewards/accuracy": 2.5 / 4}, rel=1e-6
    )
