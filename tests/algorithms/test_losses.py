"""CISPO, value, KL and entropy losses against hand-computed literals, scalar loops and exact expectations."""

import math
from typing import Any

import pytest
import torch

from tinyrl.algorithms.kl import k3
from tinyrl.algorithms.losses import (
    cispo_loss,
    clipped_value_loss,
    entropy_bonus,
    importance_ratio,
    kl_loss,
    mismatch_weights,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("aggregation", "divisors"), [("token", (3, 3)), ("sequence", (4, 2))])
@pytest.mark.parametrize("weights", [None, [[1.0, 0.5, NAN], [3.0, NAN, NAN]]])
def test_cispo_by_hand(aggregation: Any, divisors: tuple[int, int], weights: list[list[float]] | None) -> None:
    """REINFORCE with ratios 1/2, 4 (capped at 1.5) and 2 (capped): no token loses its gradient."""
    logprobs = torch.tensor([[-1.0, -2.0, NAN], [-3.0, INF, NAN]], requires_grad=True)
    ratios, advantages = (
        torch.tensor([[0.5, 4.0, 1.0], [2.0, 1.0, 1.0]]),
        torch.tensor([[2.0, -1.0, NAN], [4.0, NAN, 1.0]]),
    )
    mask = torch.tensor([[True, True, False], [True, False, False]])
    more: Any = {} if weights is None else {"token_weights": torch.tensor(weights)}
    old = logprobs.detach() - ratios.log()
    loss, metrics = cispo_loss(logprobs, old, advantages, mask, ratio_cap=1.5, aggregation=aggregation, **more)
    loss.backward()
    one, two, three = (1.0, 1.0, 1.0) if weights is None else (1.0, 0.5, 3.0)
    a, b = divisors  # of the first row's tokens, and of the second's
    slopes = [-0.5 * 2.0 * one / a, 1.5 * 1.0 * two / a, -1.5 * 4.0 * three / b]
    assert logprobs.grad is not None
    assert logprobs.grad[mask].tolist() == pytest.approx(slopes)
    assert logprobs.grad[~mask].abs().sum().item() == 0.0
    assert loss.item() == pytest.approx(-slopes[0] - 2 * slopes[1] - 3 * slopes[2])
    assert metrics["policy/clipfrac"].item() == pytest.approx(1 / a + 1 / b)


@pytest.mark.parametrize(
    ("clip", "denominator", "loss", "gradient"),
    [
        # clipped values 0.5, 1.5, 0.1, -, 3: squares max(1, 2.25), max(1, 2.25), 1, -, 1
        (0.5, None, 0.5 * (2.25 + 2.25 + 1.0 + 1.0) / 4, [0.0, 0.0, -0.25, 0.0, 0.25]),
        (None, 8, 0.5 * (1.0 + 1.0 + 1.0 + 1.0) / 8, [-0.125, 0.125, -0.125, 0.0, 0.125]),
    ],
)
def test_value_loss_by_hand(clip: float | None, denominator: float | None, loss: float, gradient: list[float]) -> None:
    values = torch.tensor([[1.0, 1.0, 0.1, NAN, 3.0]], requires_grad=True)
    old_values = torch.tensor([[0.0, 2.0, 0.0, 7.0, 3.0]])
    returns = torch.tensor([[2.0, 0.0, 1.1, INF, 2.0]])
    mask = torch.tensor([[True, True, True, False, True]])
    found, metrics = clipped_value_loss(values, old_values, returns, mask, value_clip_eps=clip, denominator=denominator)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert {k: v.item() for k, v in metrics.items()} == {"value/loss": found.item()} | (
        {} if clip is None else {"value/clipfrac": 0.5}
    )
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx(gradient)


def test_kl_loss_by_hand() -> None:
    kl = torch.tensor([[1.0, 3.0, NAN], [2.0, INF, NAN], [NAN, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    ratio = torch.tensor([[2.0, 1.0, NAN], [0.5, INF, NAN], [NAN, NAN, NAN]])
    assert kl_loss(kl, mask)[0].item() == 2.0
    assert kl_loss(kl, mask, aggregation="sequence")[0].item() == 2.0
    assert kl_loss(kl, mask, aggregation="sequence", denominator=4)[0].item() == 1.0
    assert kl_loss(kl, mask, aggregation="constant", denominator=12)[0].item() == 0.5
    with torch.autograd.set_detect_anomaly(True):
        loss, metrics = kl_loss(kl, mask, ratio=ratio, denominator=12)
        loss.backward()
    assert loss.item() == 0.5
    assert metrics["policy/kl_loss"].item() == 0.5
    assert kl.grad is not None
    assert kl.grad[mask].tolist() == pytest.approx([2 / 12, 1 / 12, 0.5 / 12])
    assert kl.grad[~mask].abs().sum().item() == 0.0


@pytest.mark.parametrize("weighted", [True, False])
def test_ratio_weighted_k3_has_the_gradient_of_the_kl(weighted: bool) -> None:
    """Exact: a sum over a vocabulary of five replaces the average over samples from the old policy."""
    generator = torch.Generator().manual_seed(2)
    logits, old_logits, ref_logits = torch.randn(3, 5, generator=generator).unbind()
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), ref_logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    old = old_logits.log_softmax(0)
    logprobs, mask = policy.unsqueeze(1), torch.ones(5, 1, dtype=torch.bool)  # five responses of one token
    ratio = importance_ratio(logprobs, old.unsqueeze(1), mask) if weighted else None
    kl = k3(logprobs, reference.unsqueeze(1))
    terms = torch.stack(
        [kl_loss(kl[i : i + 1], mask[:1], ratio=None if ratio is None else ratio[i : i + 1])[0] for i in range(5)]
    )
    (got,) = torch.autograd.grad((old.exp() * terms).sum(), logits)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6) == weighted
    if weighted:
        assert (old.exp() * terms).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_entropy_bonus_by_hand() -> None:
    entropy = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, INF]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    bonus, metrics = entropy_bonus(entropy, mask)
    bonus.backward()
    assert bonus.item() == 3.0
    assert metrics["policy/entropy"].item() == 3.0
    assert entropy.grad is not None
    assert entropy.grad.flatten().tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3, 0.0, 0.0])
    assert entropy_bonus(entropy, mask, denominator=18)[0].item() == 0.5


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
        ({"mode": "sequence", "cap": 5.0}, [3.0, 3.0, 3.0, 0.25], [0, 0, 0, 0]),
        ({"mode": "sequence", "cap": 2.0}, [2.0, 2.0, 2.0, 0.25], [1, 1, 1, 0]),
        ({"mode": "sequence-mask", "cap": 5.0}, [3.0, 3.0, 3.0, 0.25], [0, 0, 0, 0]),
        ({"mode": "sequence-mask", "cap": 2.0}, [0.0, 0.0, 0.0, 0.25], [1, 1, 1, 0]),
    ],
)
def test_mismatch_weights_by_hand(settings: dict[str, Any], weights: list[float], bounded: list[int]) -> None:
    """A row with ratios 1/2, 3/2 and 4 around a token that was read, whose product is 3, and a row of one token."""
    got = weights_of([[0.5, 9.0, 1.5, 4.0], [0.25, 9.0, 9.0, 9.0]], [[1, 0, 1, 1], [1, 0, 0, 0]], **settings)
    assert got == (pytest.approx(weights), [bool(b) for b in bounded])


def test_extreme_mismatch_weights_stay_finite_and_carry_no_gradient() -> None:
    old = torch.tensor([[0.0, -900.0]], requires_grad=True)
    mask = torch.ones(1, 2).bool()
    weights, _ = mismatch_weights(old, torch.tensor([[-900.0, 0.0]]), mask, mode="token-mask", cap=1e6)
    assert weights.tolist() == [[0.0, 0.0]]
    assert not weights.requires_grad
