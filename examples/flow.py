"""Flow matching as a policy: one denoising step is an action with a Gaussian density, as in Flow-GRPO (2505.05470).

A rectified flow carries data x_0 to noise x_1 along x_s = (1 - s) x_0 + s x_1; a model gives the velocity
v(x, s) = E[x_1 - x_0 | x_s = x]. Sampling goes from sigma = 1 (noise) to sigma = 0 (data). The ODE dx = v ds has no
density to take a ratio of; the SDE here has the same marginals at every sigma, and each of its steps is Gaussian.

Stack the steps of B images as columns and the language model's functions take them unchanged, a denoising step being a
token: logprobs and kl (B, T), a mask (B, T) of the steps that count, scores (B,), one for each finished image.

    logprobs = torch.stack([flow_sde_step(x[t], v[t], ...)[1] for t in steps], dim=1)
    advantages = group_advantages(scores, group_size=G, scale="std")
    loss, metrics = clipped_surrogate(logprobs, old_logprobs, advantages, mask, clip_eps=...)

What differs from the authors' code: log-density and KL are the exact ones of an image, sums over its D numbers; theirs
are means over them, so that their ratio is the D-th root of this one and is clipped much closer to 1. A step that is to
be left out of training, such as the last one, is False in the caller's mask.
"""

import math

import torch
from torch import Tensor


def flow_sde_step(
    x: Tensor,
    velocity: Tensor,
    *,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    noise_level: float,
    noise: Tensor | None = None,
    next_x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One Euler-Maruyama step of the reverse SDE from sigma to sigma_next: (next_x, logprobs, mean, std).

        g        = noise_level * sqrt(sigma / (1 - sigma))            at sigma = 1 with sigma_next below the line
        mean     = x + (v + g^2 / (2 sigma) * (x + (1 - sigma) v)) * (sigma_next - sigma)
        std      = g * sqrt(sigma - sigma_next)
        next_x   = mean + std * noise
        logprobs = sum over an image's numbers of log N(next_x; mean, std^2)

    Flow-GRPO (2505.05470) Eq. 8 and 9, its a being noise_level: x + (1 - sigma) v is the noise that x is expected to
    hold, -sigma times the score, so the added noise is taken out again and the marginals stay those of the ODE.
    With `next_x` (what was sampled before) the step is not drawn, only its density is given under this velocity;
    `noise` None draws it from torch's generator. noise_level 0 is the ODE's step: std and logprobs are 0.
    A gradient reaches velocity through mean and logprobs, and never goes through next_x.
    x, velocity, noise, next_x: (B, ...); sigma, sigma_next: one number, or (B,) -> next_x, mean (B, ...), logprobs,
    std (B,); float32. Raises AssertionError on shapes, unless 0 <= sigma_next < sigma <= 1, and for a next_x of a
    step without noise, which has no density.
    """
    x, velocity = x.detach().float(), velocity.float()
    assert x.shape == velocity.shape, f"x is {tuple(x.shape)}, velocity {tuple(velocity.shape)}"
    assert noise_level >= 0, f"noise_level is {noise_level}"
    now, then = (_one_each(value, x) for value in (sigma, sigma_next))
    assert bool(((then >= 0) & (then < now) & (now <= 1)).all()), f"sigma goes from {sigma} to {sigma_next}"
    g2 = noise_level**2 * now / (1 - torch.where(now == 1, then, now))
    mean = x + (velocity + g2 / (2 * now) * (x + (1 - now) * velocity)) * (then - now)
    std = (g2 * (now - then)).sqrt()
    if noise_level == 0:
        assert next_x is None, "a step without noise has no density"
        return mean.detach(), torch.zeros(len(x), device=x.device), mean, std.flatten()
    if next_x is None:
        next_x = mean + std * (torch.randn_like(x) if noise is None else noise.to(x))
    next_x = next_x.detach().float()
    assert next_x.shape == x.shape, f"x is {tuple(x.shape)}, next_x {tuple(next_x.shape)}"
    of_numbers = -0.5 * ((next_x - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return next_x, of_numbers.flatten(1).sum(1), mean, std.flatten()


def flow_step_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL(policy || reference) of a step, exactly: |mean - ref_mean|^2 / (2 std^2), two Gaussians of one variance.

    Flow-GRPO (2505.05470) section 4; the policy's step and the reference's start from the same x. No gradient reaches
    the reference. As `kl` it goes into `losses.kl_loss` in place of an estimate.
    mean, ref_mean: (B, ...); std: (B,) -> (B,) nats. Raises AssertionError on shapes and where std is not above 0.
    """
    assert mean.shape == ref_mean.shape, f"mean is {tuple(mean.shape)}, ref_mean {tuple(ref_mean.shape)}"
    assert std.shape == mean.shape[:1], f"std is {tuple(std.shape)}, mean {tuple(mean.shape)}"
    assert bool((std > 0).all()), "a step without noise has no density"
    return (mean - ref_mean.detach()).flatten(1).square().sum(1) / (2 * std.square())


def _one_each(value: float | Tensor, x: Tensor) -> Tensor:
    """A number, or one for each image, as (B, 1, ...)."""
    each = torch.as_tensor(value, dtype=torch.float32, device=x.device)
    assert each.dim() == 0 or each.shape == x.shape[:1], f"sigma is {tuple(each.shape)}, x {tuple(x.shape)}"
    return each.expand(len(x)).reshape(-1, *[1] * (x.dim() - 1))
