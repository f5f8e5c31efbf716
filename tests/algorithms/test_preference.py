"""DPO and Bradley-Terry against literals."""

import math

import pytest
import torch

from tinyrl.algorithms.preference import bradley_terry_loss, dpo_loss

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


def test_dpo_gradient_by_hand() -> None:
    tensors = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
    loss, _ = dpo_loss(tensors[0], tensors[1], tensors[2], tensors[3], beta=0.5)
    loss.backward()
    want = [-0.5 / 3 / (1 + math.exp(margin)) for margin in (2.5, -0.5, 0.0)]
    assert tensors[0].grad is not None
    assert tensors[1].grad is not None
    assert tensors[0].grad.tolist() == pytest.approx(want, rel=1e-6)
    assert tensors[1].grad.tolist() == pytest.approx([-g for g in want], rel=1e-6)
    assert tensors[2].grad is None
    assert tensors[3].grad is None


def test_bradley_terry_by_hand() -> None:
    loss, metrics = bradley_terry_loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.5]))
    want = (minus_log_sigmoid(2.0) + minus_log_sigmoid(-0.5)) / 2
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
        {
            "preference/loss": want,
            "rewards/chosen": 2.0,
            "rewards/rejected": 1.25,
            "rewards/margin": 0.75,
            "rewards/accuracy": 0.5,
        },
        rel=1e-6,
    )


def test_a_smoothed_label_is_right_with_probability_one_minus_s() -> None:
    """What is logged is the loss that is trained."""
    loss, metrics = bradley_terry_loss(torch.tensor([3.0]), torch.tensor([1.0]), label_smoothing=0.1)
    want = 0.9 * minus_log_sigmoid(2.0) + 0.1 * minus_log_sigmoid(-2.0)
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert metrics["preference/loss"].item() == pytest.approx(want, rel=1e-6)
    with pytest.raises(AssertionError, match="label_smoothing"):
        bradley_terry_loss(torch.zeros(1), torch.zeros(1), label_smoothing=0.5)


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    scores = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = bradley_terry_loss(scores, torch.tensor([500.0, -500.0]))
    loss.backward()
    assert loss.item() == 500.0
    assert scores.grad is not None
    assert scores.grad.tolist() == [-0.5, 0.0]


def test_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs = list(torch.randn(4, 6, generator=generator).unbind())
    whole = logprobs[0].clone().requires_grad_()
    loss, metrics = dpo_loss(whole, logprobs[1], logprobs[2], logprobs[3], beta=0.3)
    loss.backward()
    parts = logprobs[0].clone().requires_grad_()
    sums = dict.fromkeys(metrics, 0.0)
    for rows in (slice(0, 1), slice(1, 6)):
        micro = [x[rows] for x in (parts, *logprobs[1:])]
        part, part_metrics = dpo_loss(micro[0], micro[1], micro[2], micro[3], beta=0.3, denominator=6)
        part.backward()
        sums = {k: sums[k] + v.item() for k, v in part_metrics.items()}
    assert whole.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-6, atol=0)
    assert sums == pytest.approx({k: v.item() for k, v in metrics.items()}, rel=1e-5)


def test_float32_detached_scalars_and_refusals() -> None:
    half = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = bradley_terry_loss(half, half)
    assert loss.dtype == torch.float32
    assert metrics["rewards/accuracy"].item() == 0.5
    assert all(m.dim() == 0 and not m.requires_grad and m.dtype == torch.float32 for m in metrics.values())
    with pytest.raises(AssertionError, match="against"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3))
    with pytest.raises(AssertionError, match=r"\(B,\)"):
        bradley_terry_loss(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="beta"):
        dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.0)
