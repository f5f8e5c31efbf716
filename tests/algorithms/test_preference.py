"""DPO and its kin, Bradley-Terry with margins, and labels against literals."""

import math

import pytest
import torch

from tinyrl.algorithms.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    label_loss,
    mismatched_kl,
    orpo_loss,
    simpo_loss,
)

CHOSEN, REJECTED = torch.tensor([-10.0, -20.0, -3.0]), torch.tensor([-12.0, -15.0, -3.0])
REF_CHOSEN, REF_REJECTED = torch.tensor([-14.0, -20.0, -5.0]), torch.tensor([-11.0, -16.0, -5.0])


def minus_log_sigmoid(x: float) -> float:
    return math.log(1.0 + math.exp(-x))


def test_dpo_by_hand() -> None:
    loss, metrics = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.5)
    # chosen rewards 2, 0, 1; rejected -0.5, 0.5, 1; margins 2.5, -0.5, 0
    want = (minus_log_sigmoid(2.5) + minus_log_sigmoid(-0.5) + math.log(2.0)) / 3
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
        {
            "preference/loss": want,
            "rewards/chosen": 1.0,
            "rewards/rejected": 1 / 3,
            "rewards/margin": 2 / 3,
            "rewards/accuracy": 0.5,  # one won, one lost, one tied
        },
        rel=1e-6,
    )


def gradients(loss_of, **settings: float) -> list[list[float]]:
    """Of chosen and rejected; the reference has none."""
    tensors = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
    loss_of(*tensors, **settings)[0].backward()
    assert tensors[2].grad is tensors[3].grad is None
    return [x.grad.tolist() for x in tensors[:2] if x.grad is not None]


def test_dpo_gradient_and_conservative_dpo_by_hand() -> None:
    """With s = 0.2: (1 - s) of the loss and s of the loss with the sides swapped."""
    chosen, rejected = gradients(dpo_loss, beta=0.5)
    want = [-0.5 / 3 / (1 + math.exp(margin)) for margin in (2.5, -0.5, 0.0)]
    assert chosen == pytest.approx(want, rel=1e-6)
    assert rejected == pytest.approx([-g for g in want], rel=1e-6)
    loss, _ = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.5, label_smoothing=0.2)
    right = minus_log_sigmoid(2.5) + minus_log_sigmoid(-0.5) + math.log(2.0)
    swapped = minus_log_sigmoid(-2.5) + minus_log_sigmoid(0.5) + math.log(2.0)
    assert loss.item() == pytest.approx((0.8 * right + 0.2 * swapped) / 3, rel=1e-6)


def test_ipo_by_hand() -> None:
    """Log-ratios 4, 0, 2 and -1, 1, 2, so h is 5, -1, 0; 1 / (2 beta) is 2, which no pair hits."""
    loss, metrics = ipo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.25)
    assert loss.item() == pytest.approx((3.0**2 + 3.0**2 + 2.0**2) / 3, rel=1e-6)
    assert metrics["rewards/margin"].item() == pytest.approx(0.25 * (5 - 1 + 0) / 3)
    chosen, rejected = gradients(ipo_loss, beta=0.25)
    assert chosen == pytest.approx([2 * 3 / 3, -2 * 3 / 3, -2 * 2 / 3], rel=1e-6)
    assert rejected == pytest.approx([-2 * 3 / 3, 2 * 3 / 3, 2 * 2 / 3], rel=1e-6)


def test_kto_by_hand() -> None:
    """Six examples, three of them desirable, with the reference point at 1 nat; rewards 2, 0, 1 and -0.5, 0.5, 1."""
    loss, metrics = kto_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.5, kl=1.0)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    desirable = [1 - sigmoid(x) for x in (1.5, -0.5, 0.5)]
    undesirable = [1 - sigmoid(x) for x in (1.0, 0.0, -0.5)]
    assert loss.item() == pytest.approx((sum(desirable) + sum(undesirable)) / 6, rel=1e-6)
    assert metrics["rewards/chosen"].item() == pytest.approx(1.0)
    assert metrics["rewards/rejected"].item() == pytest.approx(1 / 3)


def test_the_reference_point_of_kto_is_at_least_0_and_hides_no_nan() -> None:
    policy = torch.tensor([[-3.0, -5.0], [-1.0, -2.0]], requires_grad=True)
    assert mismatched_kl(policy, torch.tensor([[-4.0, -5.0], [-4.0, -4.0]])) == pytest.approx(6 / 4)
    assert mismatched_kl(policy, torch.zeros(2, 2)) == 0.0
    assert math.isnan(mismatched_kl(torch.tensor([math.nan, 1.0]), torch.zeros(2)))
    with pytest.raises(AssertionError, match="against"):
        mismatched_kl(torch.zeros(2), torch.zeros(2, 1))


def test_orpo_by_hand() -> None:
    """Mean probabilities 1/2 and 1/5, whose odds are 1 and 1/4; then the other way round."""
    half, fifth = math.log(0.5), math.log(0.2)
    loss, metrics = orpo_loss(torch.tensor([half, fifth]), torch.tensor([fifth, half]), beta=0.3)
    nll = -(half + fifth) / 2
    # -log sigmoid(log 4) = log(1 + 1/4); -log sigmoid(-log 4) = log(1 + 4)
    want = nll + 0.3 * (math.log(1.25) + math.log(5.0)) / 2
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
        {
            "preference/loss": want,
            "preference/nll": nll,
            "rewards/chosen": -math.log(4.0) / 2,
            "rewards/rejected": -math.log(4.0) / 2,
            "rewards/margin": 0.0,
            "rewards/accuracy": 0.5,
        },
        rel=1e-6,
        abs=1e-6,
    )


def test_orpo_of_certain_answers_stays_finite() -> None:
    certain = torch.tensor([0.0, -1e-9, -200.0], requires_grad=True)
    loss, _ = orpo_loss(certain, torch.tensor([-200.0, -1.0, 0.0]), beta=0.1)
    loss.backward()
    assert loss.isfinite()
    assert certain.grad is not None
    assert certain.grad.isfinite().all()


def test_simpo_by_hand() -> None:
    """Rewards 2 x -1, 2 x -0.5 and 2 x -1.5, 2 x -0.25: margins 1 and -0.5 against a target of 0.5."""
    loss, metrics = simpo_loss(torch.tensor([-1.0, -0.5]), torch.tensor([-1.5, -0.25]), beta=2.0, target_margin=0.5)
    assert loss.item() == pytest.approx((minus_log_sigmoid(0.5) + minus_log_sigmoid(-1.0)) / 2, rel=1e-6)
    assert metrics["rewards/margin"].item() == pytest.approx(0.25)


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    scores = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = bradley_terry_loss(scores, torch.tensor([500.0, -500.0]))
    loss.backward()
    assert loss.item() == 500.0
    assert scores.grad is not None
    assert scores.grad.tolist() == [-0.5, 0.0]


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


def test_labels_by_hand() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, 0.0, -3.0], requires_grad=True)
    loss, metrics = label_loss(scores, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]))
    loss.backward()
    right = minus_log_sigmoid(2.0) + minus_log_sigmoid(1.0) + minus_log_sigmoid(3.0)
    want = (right + minus_log_sigmoid(-0.5) + math.log(2.0)) / 5
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert scores.grad is not None
    share = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 0.5, 0.0, -3.0)]
    slopes = [(p - y) / 5 for p, y in zip(share, (1, 0, 0, 1, 0), strict=True)]
    assert scores.grad.tolist() == pytest.approx(slopes, rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"loss": want, "rewards/mean": -0.3, "rewards/accuracy": 3.5 / 5}, rel=1e-6
    )
