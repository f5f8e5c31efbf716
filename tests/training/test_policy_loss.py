"""The policy loss as presets configure it: what it divides by, what it corrects, what it says."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tinyrl.config.method_sections import GrpoConfig
from tinyrl.training.policy_loss import Counts, policy_loss, sampling_gap

LENGTHS = 8


def batch_with(mask: torch.Tensor, **fields: torch.Tensor) -> Any:
    """A batch whose samples have these fields (b, T); `old` stays None where it is not given."""
    return SimpleNamespace(mask=mask, items=[SimpleNamespace(old=fields.get("old"))], padded=fields.__getitem__)


def loss_of(
    logprobs: torch.Tensor,
    batch: Any,
    counts: Counts,
    preset: str,
    *,
    entropy: torch.Tensor | None = None,
    **fields: Any,
) -> Any:
    section: Any = GrpoConfig.model_validate({"preset": preset, **fields})
    how: Any = {"kl_coef": 0.0, "max_new_tokens": LENGTHS, "inexact": True}
    return policy_loss(
        logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, batch, counts, section, **how
    )


def stopping(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A policy that goes on with probability sigmoid(theta) and stops after at most LENGTHS tokens: log-probabilities
    of the responses of every length (LENGTHS, LENGTHS), and which tokens they have.
    """
    go_on, stop = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)
    column, length = torch.arange(LENGTHS), torch.arange(1, LENGTHS + 1).unsqueeze(1)
    logprobs = torch.where(column < length - 1, go_on, stop)
    logprobs = torch.where((length == LENGTHS) & (column == LENGTHS - 1), torch.zeros(()), logprobs)  # no choice left
    return logprobs, column < length


def test_rloo_has_the_gradient_of_the_expected_reward() -> None:
    """Every length once, weighted by its probability: the mean over sequences is then an expectation. A mean within
    each sequence would weigh a token of a long response less, which is another gradient.
    """
    theta = torch.tensor(0.4, requires_grad=True)
    logprobs, mask = stopping(theta)
    probability = (logprobs * mask).sum(1).exp()
    rewards = torch.arange(1.0, LENGTHS + 1).sqrt()
    expected = (probability * rewards).sum()
    (truth,) = torch.autograd.grad(expected, theta, retain_graph=True)
    assert probability.sum().item() == pytest.approx(1.0)

    weights = (probability * LENGTHS).detach()
    batch = batch_with(mask, logprobs=logprobs.detach(), advantage=weights * (rewards - expected.detach()))
    gradients = {}
    for preset in ("rloo", "grpo"):
        loss, _ = loss_of(logprobs, batch, Counts.of(mask), preset)
        (gradients[preset],) = torch.autograd.grad(-loss, theta, retain_graph=True)
    assert gradients["rloo"].item() == pytest.approx(truth.item(), rel=1e-5)
    assert gradients["grpo"].item() < 0.5 * truth.item()


@pytest.mark.parametrize("preset", ["dapo", "cispo"])
@pytest.mark.parametrize(
    ("fields", "weights", "capped"),
    [
        ({}, [2 / 3, 1.5, 2.0], 1 / 3),
        ({"importance_correction": "none"}, [1.0, 1.0, 1.0], None),
        ({"importance_correction": "token-mask"}, [2 / 3, 1.5, 0.0], 1 / 3),
        ({"importance_correction": "sequence"}, [2.0, 2.0, 2.0], 1.0),
        ({"importance_correction": "sequence-mask"}, [0.0, 0.0, 0.0], 1.0),
    ],
)
def test_the_mismatch_is_corrected_as_configured(
    preset: str, fields: dict[str, Any], weights: list[float], capped: float | None
) -> None:
    """Old over sampling probability is 2/3, 3/2 and 4, of the sequence 4: the factor of each token's gradient."""
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    logprobs = old.clone().requires_grad_()
    sampled = old - torch.tensor([[2 / 3, 1.5, 4.0]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    batch = batch_with(mask, old=old, logprobs=sampled, advantage=torch.ones(1, 3))
    loss, metrics = loss_of(logprobs, batch, Counts(3, 1, 1), preset, aggregation="token", **fields)
    loss.backward()
    assert logprobs.grad is not None
    assert (-3 * logprobs.grad[0]).tolist() == pytest.approx(weights)
    assert metrics.get("policy/capped_weights") == (None if capped is None else pytest.approx(capped))
    gap = sampling_gap(logprobs, batch, Counts(3, 1, 1))["policy/sampling_gap"]
    assert gap.item() == pytest.approx((math.log(1.5) * 2 + math.log(4)) / 3)


@pytest.mark.parametrize("preset", ["dapo", "grpo", "dr_grpo"])
def test_an_entropy_bonus_is_a_mean_over_tokens_whatever_the_aggregation(preset: str) -> None:
    """d loss / d entropy = -entropy_coef / tokens for each of the tokens of the step that count."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    entropy = torch.rand(2, 3, requires_grad=True)
    zeros = torch.zeros(2, 3)
    batch = batch_with(mask, logprobs=zeros, advantage=zeros)
    loss, _ = loss_of(zeros, batch, Counts(12, 5, 6), preset, entropy=entropy, entropy_coef=0.3)
    loss.backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.where(mask, -0.3 / 12, 0.0))
