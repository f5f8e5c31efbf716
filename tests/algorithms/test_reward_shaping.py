"""Token rewards against literals."""

import math

import pytest
import torch

from tinyrl.algorithms.advantages import token_rewards

NAN = math.nan


def test_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()  # tool spans, padding, nothing
    kl = torch.tensor([[1.0, 2.0, -4.0, NAN], [1.0, NAN, 2.0, math.inf], [NAN, 0.5, 9.0, 0.0], [NAN, 1.0, 1.0, 1.0]])
    rewards = token_rewards(torch.tensor([10.0, -1.0, 3.0, NAN]), kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [
        [-0.5, -1.0, 12.0, 0.0],
        [-0.5, 0.0, -2.0, 0.0],
        [0.0, -0.25, 0.0, 3.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert rewards.dtype == torch.float32


def test_no_gradient_and_float32() -> None:
    scores = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    kl = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    rewards = token_rewards(scores, kl, torch.ones(1, 2, dtype=torch.bool), kl_coef=1.0)
    assert not rewards.requires_grad
    assert rewards.dtype == torch.float32


@pytest.mark.parametrize("score", [NAN, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused(score: float) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        token_rewards(torch.tensor([score]), torch.zeros(1, 2), torch.tensor([[True, False]]), kl_coef=0.0)
