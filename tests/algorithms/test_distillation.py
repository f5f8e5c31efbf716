"""Divergences of student and teacher by hand, and at outcomes that never come."""

import math

import pytest
import torch

from tinyrl.algorithms.distillation import jensen_shannon, kl_divergence, token_advantages, top_bins, with_tail


def test_two_outcomes_by_hand():
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    # forward: 3/4 ln(3/2) + 1/4 ln(1/2); reverse: 1/2 ln(2/3) + 1/2 ln 2
    assert jensen_shannon(student, teacher, beta=0.0).item() == pytest.approx(0.1308, abs=1e-4)
    assert jensen_shannon(student, teacher, beta=1.0).item() == pytest.approx(0.1438, abs=1e-4)
    # m = (0.5625, 0.4375): (0.75 ln 4/3 + 0.25 ln 4/7) / 4 + 3/4 (0.5 ln 8/9 + 0.5 ln 8/7)
    assert jensen_shannon(student, teacher, beta=0.25).item() == pytest.approx(0.02487, abs=1e-5)


def test_an_outcome_the_first_never_has_adds_nothing():
    p = torch.tensor([[0.0, 1.0]]).log()
    assert kl_divergence(p, torch.tensor([[0.5, 0.5]]).log()).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_outcomes_that_neither_has_give_no_gradient(beta: float):
    logits = torch.tensor([[0.3, -torch.inf, 1.0]], requires_grad=True)
    few = torch.tensor([[0.3, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.25, 0.0, 0.75]]).log()
    distance = jensen_shannon(logits.log_softmax(-1), teacher, beta=beta)
    expected = jensen_shannon(few.log_softmax(-1), teacher[:, [0, 2]], beta=beta)
    torch.testing.assert_close(distance, expected)
    (distance + expected).sum().backward()
    assert logits.grad is not None
    assert few.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[few.grad[0, 0], 0.0, few.grad[0, 1]]]))


def test_bins_and_their_tail_by_hand():
    log_p = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log()
    torch.testing.assert_close(top_bins(log_p, torch.tensor([[2, 0]])).exp(), torch.tensor([[0.3, 0.5, 0.2]]))
    assert top_bins(log_p, torch.tensor([[0, 1, 2, 3]]))[0, 4].exp() == 0.0
    torch.testing.assert_close(with_tail(torch.tensor([[0.5, 0.3]]).log()).exp(), torch.tensor([[0.5, 0.3, 0.2]]))
    assert with_tail(torch.tensor([[0.6, 0.4]]).log())[0, 2].exp().item() == pytest.approx(1e-7, rel=1e-3)


def test_worth_of_sampled_tokens():
    mask = torch.tensor([[True, True, False]])
    old, teacher = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-0.5, -4.0, 0.0]])
    torch.testing.assert_close(token_advantages(old, teacher, mask), torch.tensor([[0.5, -2.0, 0.0]]))
