"""Denoising steps as actions: their density and their marginals."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

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


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 2, 2)], ids=["flat", "pictures"])
def test_the_log_density_and_the_kl_are_those_of_torch(shape: tuple[int, ...]) -> None:
    x, v, other, noise = (images(*shape, seed=seed) for seed in range(4))
    sigma, below = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.1]), torch.tensor([0.9, 0.5, 0.4, 0.1, 0.0])
    given = {"sigma": sigma, "sigma_next": below, "noise_level": 0.7}
    next_x, logprobs, mean, std = flow_sde_step(x, v, noise=noise, **given)
    _, of_other, other_mean, same_std = flow_sde_step(x, other, next_x=next_x, **given)
    wide = std.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    ours, theirs = Normal(mean, wide), Normal(other_mean, wide)
    assert torch.allclose(logprobs, ours.log_prob(next_x).flatten(1).sum(1), rtol=1e-5)
    assert torch.allclose(of_other, theirs.log_prob(next_x).flatten(1).sum(1), rtol=1e-5)
    assert torch.equal(std, same_std)
    kl = kl_divergence(ours, theirs).flatten(1).sum(1)
    assert torch.allclose(flow_step_kl(mean, other_mean, std), kl, rtol=1e-5)
    assert kl.min() > 0.01


MEAN, SPREAD = 1.5, 0.5  # of the toy data, which is Gaussian


def toy_variance(sigma: float) -> float:
    return (1 - sigma) ** 2 * SPREAD**2 + sigma**2


@pytest.mark.parametrize("noise_level", [0.0, 0.7])
def test_with_any_noise_the_marginals_are_those_of_the_flow(noise_level: float) -> None:
    """The velocity E[noise - data | x_sigma = x] is a regression of two Gaussians, so a step is linear in x: two points
    tell it, and mean and variance follow exactly. They are off by the step's size.
    """

    def worst(num_steps: int) -> float:
        mean, variance, off = 0.02 * MEAN, toy_variance(0.98), 0.0
        for sigma, below in pairwise(torch.linspace(0.98, 0, num_steps + 1).tolist()):
            x = torch.tensor([[0.0], [1.0]])
            centred = (x - (1 - sigma) * MEAN) / toy_variance(sigma)
            v = sigma * centred - (MEAN + (1 - sigma) * SPREAD**2 * centred)
            _, _, moved, std = flow_sde_step(x, v, sigma=sigma, sigma_next=below, noise_level=noise_level)
            offset, slope = float(moved[0]), float(moved[1] - moved[0])
            mean, variance = offset + slope * mean, slope**2 * variance + float(std[0]) ** 2
            off = max(off, abs(mean - (1 - below) * MEAN), abs(variance - toy_variance(below)))
        return off

    assert worst(2000) < 0.01
    assert worst(2000) < 0.2 * worst(200)
