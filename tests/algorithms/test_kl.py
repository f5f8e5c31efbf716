"""KL estimators against literals and exact expectations; the adaptive controller against hand-computed steps."""

import math

import pytest
import torch
from torch import Tensor

from tinyrl.algorithms.kl import k1, k2, k3, next_kl_coef
from tinyrl.algorithms.masking import keep_true

LN2 = math.log(2.0)


def test_by_hand() -> None:
    # The policy says 1/2 where the reference says 1/4, then 1/4 against 1/2, then both the same.
    logprobs = torch.tensor([[-LN2, -2 * LN2, -1.0]])
    ref_logprobs = torch.tensor([[-2 * LN2, -LN2, -1.0]])
    torch.testing.assert_close(k1(logprobs, ref_logprobs), torch.tensor([[LN2, -LN2, 0.0]]))
    torch.testing.assert_close(k2(logprobs, ref_logprobs), torch.tensor([[0.240227, 0.240227, 0.0]]), rtol=1e-5, atol=0)
    # 1/2 - 1 + ln 2 and 2 - 1 - ln 2
    torch.testing.assert_close(k3(logprobs, ref_logprobs), torch.tensor([[0.193147, 0.306853, 0.0]]), rtol=1e-5, atol=0)


def test_k3_resolves_what_two_close_models_differ_by() -> None:
    difference = 2.0**-13  # exp(x) - 1 - x is x^2 / 2 here; in float32 exp(x) would round to 1 + x
    estimate = k3(torch.tensor([[-difference]]), torch.tensor([[0.0]])).item()
    assert estimate == pytest.approx(difference**2 / 2, rel=5e-3)


def test_k3_does_not_overflow_and_keeps_its_gradient_above() -> None:
    logprobs = torch.tensor([[-500.0, 0.0, -19.0]], requires_grad=True)
    estimates = k3(logprobs, torch.tensor([[0.0, -500.0, 0.0]]))
    estimates.sum().backward()
    assert estimates[0, 0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert estimates[0, 1].item() == 499.0
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 1.0, 1.0 - math.exp(19)], rel=1e-6)


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_padding_garbage_gives_no_gradient_and_a_true_one_shows(estimator) -> None:
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf, -math.inf, 3e38]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0, -math.inf, 0.0, -3e38]])
    estimates: Tensor = estimator(logprobs, ref_logprobs)
    assert not torch.isfinite(estimates[0, 1:]).any()
    keep_true(estimates, torch.tensor([[True, False, False, False, False]])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0].item() == pytest.approx({k1: 1.0, k2: 0.5, k3: 1 - math.exp(-0.5)}[estimator])
    assert logprobs.grad[0, 1:].tolist() == [0.0] * 4


def test_controller_by_hand() -> None:
    # 1,000 samples of a horizon of 10,000: a tenth of the error, which is cut at 0.2 either way
    for observed_kl, want in ((6.0, 0.05), (6.6, 0.0505), (60.0, 0.051), (5.4, 0.0495), (-3.0, 0.049)):
        got = next_kl_coef(0.05, observed_kl=observed_kl, target_kl=6.0, horizon=10_000, num_samples=1_000)
        assert got == pytest.approx(want, rel=1e-9)
