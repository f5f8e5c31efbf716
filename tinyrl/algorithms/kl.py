"""Per-token KL estimators, and the controller that adapts the weight of the KL.

The estimators of joschu.net/blog/kl-approx for KL(policy || reference), on tokens sampled from the policy. What
differs: the log-ratio of k3 is clamped so that it cannot overflow (below), and an infinite or NaN difference (padding
may hold one, and these functions see no mask) is returned as it is. Masked out later, it leaves clean gradients;
counted, it makes the loss non-finite, for the caller to stop on.
In the loss, k1 has zero mean gradient on-policy, and k3's gradient is that of KL(policy || reference) only when
weighted by the ratio (see losses.kl_loss). In the reward it is the other way round: only k1 penalises KL there. The
policy gradient of a reward -k is that of E[-k] with k held fixed; for k1 the term left out, E[grad k1], is zero, for k2
and k3 it is not, and training ends at another optimum (tests/algorithms/test_kl.py shows it).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far outside any trust region, far inside float32


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative: k1 = log p(x) - log q(x), p the policy, q the reference.

    logprobs, ref_logprobs: (B, T) -> (B, T).
    """
    return _of_difference(logprobs, ref_logprobs, lambda difference: difference)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased, low variance, never negative: k2 = (log p(x) - log q(x))^2 / 2; its gradient on-policy is KL's.

    logprobs, ref_logprobs: (B, T) -> (B, T).
    """
    return _of_difference(logprobs, ref_logprobs, lambda difference: 0.5 * difference.square())


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, low variance, never negative: k3 = q(x)/p(x) - 1 - log(q(x)/p(x)) = exp(-k1) - 1 + k1.

    GRPO (2402.03300) Eq. 4. k1 is clamped from below at -20, since exp(-k1) would overflow; a large k1 does no harm.
    logprobs, ref_logprobs: (B, T) -> (B, T).
    """

    def estimate(difference: Tensor) -> Tensor:
        difference = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-difference) + difference

    return _of_difference(logprobs, ref_logprobs, estimate)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def next_kl_coef(kl_coef: float, *, observed_kl: float, target_kl: float, horizon: float, num_samples: float) -> float:
    """The adaptive controller: kl_coef * (1 + clip(observed_kl / target_kl - 1, -0.2, 0.2) * num_samples / horizon).

    Ziegler et al. (1909.08593) section 2.2, with num_samples / horizon for K_beta, as its code has it.
    observed_kl, target_kl: nats per response (k1 summed over a response, mean over the batch), num_samples: responses
    since the last call, all floats -> float.
    Raises ValueError when num_samples >= 5 * horizon (one step could make the weight zero or negative), when target_kl
    or horizon is not positive, and when observed_kl is not finite.
    """
    if not (target_kl > 0 and horizon > 0):
        raise ValueError(f"target_kl and horizon must be positive; they are {target_kl} and {horizon}")
    if num_samples >= 5 * horizon:
        raise ValueError(f"horizon is {horizon}: it must be more than a fifth of the {num_samples} samples of a step")
    if not math.isfinite(observed_kl):
        raise ValueError(f"observed_kl is {observed_kl}: the KL weight cannot follow a number that is not finite")
    error = min(max(observed_kl / target_kl - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)


def _of_difference(logprobs: Tensor, ref_logprobs: Tensor, estimator: Callable[[Tensor], Tensor]) -> Tensor:
    assert logprobs.dim() == 2, f"logprobs must be (B, T), not {tuple(logprobs.shape)}"
    assert logprobs.shape == ref_logprobs.shape, f"{tuple(logprobs.shape)} against {tuple(ref_logprobs.shape)}"
    difference = logprobs.float() - ref_logprobs.float()
    finite = torch.isfinite(difference)
    # The estimator never sees what is not finite: its backward would turn a gradient of 0 into 0 * inf = NaN.
    return torch.where(finite, estimator(torch.where(finite, difference, 0.0)), difference)
