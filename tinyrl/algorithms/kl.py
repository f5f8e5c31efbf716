"""Per-token KL estimators, and the controller that adapts the weight of the KL.

The estimators of joschu.net/blog/kl-approx for KL(policy || reference), on tokens sampled from the policy: logprobs,
ref_logprobs (B, T) -> (B, T). What differs: the log-ratio of k3 is clamped so that it cannot overflow, and a difference
that is not finite (padding may hold one, and these functions see no mask) is returned as it is. Masked out later, it
leaves clean gradients; counted, it makes the loss non-finite, for the caller to stop on.
In the loss, on policy, k1 has zero mean gradient, k2 that of the reverse KL(policy || reference) and k3 that of the
forward KL(reference || policy); off policy k2 and k3 have neither. Weighted by the ratio (losses.kl_loss), k3 has that
of the reverse KL, on policy and off (tests/training/test_kl_in_loss.py). In the reward only k1 penalises KL: the policy
gradient of a reward -k is that of E[-k] with k held fixed; for k1 the term left out, E[grad k1], is zero, for k2 and k3
it is not, and training ends at another optimum.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any trust region, far inside float32


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative: k1 = log p(x) - log q(x), p the policy, q the reference."""
    assert logprobs.dim() == 2, f"logprobs must be (B, T), not {tuple(logprobs.shape)}"
    assert logprobs.shape == ref_logprobs.shape, f"{tuple(logprobs.shape)} against {tuple(ref_logprobs.shape)}"
    return logprobs.float() - ref_logprobs.float()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased, low variance, never negative: k2 = (log p(x) - log q(x))^2 / 2; its gradient on-policy is KL's."""
    difference = k1(logprobs, ref_logprobs)
    finite = torch.isfinite(difference)
    # The backward of an estimator would turn a gradient of 0 into 0 * inf = NaN, so it sees finite numbers alone.
    return torch.where(finite, 0.5 * torch.where(finite, difference, 0.0).square(), difference)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: k3 = q(x)/p(x) - 1 - log(q(x)/p(x)) = exp(-k1) - 1 + k1.

    GRPO (2402.03300) Eq. 4. k1 is clamped from below at -20, since exp(-k1) would overflow; a large k1 does no harm.
    """
    difference = k1(logprobs, ref_logprobs)
    finite = torch.isfinite(difference)
    clamped = torch.where(finite, difference, 0.0).clamp(min=-MAX_LOG_RATIO)
    return torch.where(finite, torch.expm1(-clamped) + clamped, difference)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def next_kl_coef(kl_coef: float, *, observed_kl: float, target_kl: float, horizon: float, num_samples: float) -> float:
    """Adapt the weight of the KL: kl_coef * (1 + clip(observed_kl / target_kl - 1, -0.2, 0.2) * num_samples / horizon).

    Ziegler et al. (1909.08593) section 2.2, with num_samples / horizon for K_beta, as its code has it.
    observed_kl, target_kl: nats per response (k1 summed over a response, mean over the batch); num_samples: responses
    since the last call.
    Raises ValueError when num_samples >= 5 * horizon: one step could make the weight zero or negative.
    """
    if num_samples >= 5 * horizon:
        raise ValueError(f"horizon is {horizon}: it must be more than a fifth of the {num_samples} samples of a step")
    error = min(max(observed_kl / target_kl - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)
