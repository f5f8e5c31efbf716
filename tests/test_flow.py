"""Denoising steps as actions: their density."""

import math
from typing import Any

import pytest
import torch

from examples.flow import flow_sde_step, flow_step_kl


def test_a_step_by_hand() -> None:
    """sigma 0.5 -> 0.25, noise_level 0.8: g^2 = 0.64, so the drift is v + 0.64 (x + v / 2) and std = 0.8 * 0.5 = 0.4.

    x = 1, v = 2: drift 2 + 0.64 * 2 = 3.28, mean 1 - 3.28 / 4 = 0.18; half a unit of noise adds 0.2.
    x = 0, v = 1: drift 1.32, mean -0.33; no noise.
    """
    x, v, noise = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([[0.5, 0.0]])
    next_x, logprobs, mean, std = flow_sde_step(x, v, sigma=0.5, sigma_next=0.25, noise_level=0.8, noise=noise)
    assert torch.allclose(mean, torch.tensor([[0.18, -0.33]]), atol=1e-6)
    assert torch.allclose(next_x, torch.tensor([[0.38, -0.33]]), atol=1e-6)
    assert std.tolist() == pytest.approx([0.4])
    assert logprobs.tolist() == pytest.approx([-0.125 - 2 * math.log(0.4 * math.sqrt(2 * math.pi))])
    given: dict[str, Any] = {"sigma": 0.5, "sigma_next": 0.25, "noise_level": 0.8}
    assert torch.allclose(flow_sde_step(x, v, next_x=next_x, **given)[1], logprobs)
    assert flow_step_kl(mean, mean + torch.tensor([[0.4, 0.0]]), std).tolist() == pytest.approx([0.5])
