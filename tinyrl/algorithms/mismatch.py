"""Importance weights between sampling and training, where the two compute a token's probability differently.

Other kernels, bfloat16 or merged weights make the policy that samples another one than the policy that is trained, with
the same parameters. What differs from the papers: nothing but the names.
"""

from typing import Literal

import torch
from torch import Tensor

from tinyrl.algorithms.kl import MAX_LOG_RATIO
from tinyrl.algorithms.masking import assert_shapes, keep_true, masked_sum

Mismatch = Literal["token", "sequence", "token-mask", "sequence-mask"]


@torch.no_grad()
def mismatch_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, mode: Mismatch, cap: float, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(weights, bounded): what a token's loss is multiplied by, and where cap or floor decide that.

        w[t] = exp(old_logprobs[t] - sampling_logprobs[t]),   W = product of w[t] over True t, for every t

        token          min(w[t], cap)                          truncated importance sampling, Yao et al. 2025
        sequence       min(W, cap)                             the same by sequence, unbiased but for the cap:
                                                               Liu et al. 2025, "When speed kills stability"
        token-mask     w[t] where floor <= w[t] <= cap else 0  IcePop, Ring-1T (2510.18855)
        sequence-mask  W where floor <= W <= cap else 0        masked importance sampling, Liu et al. 2025

    old_logprobs are training's numbers for the policy before its update. Exponents are clamped to at most 20.
    old_logprobs, sampling_logprobs, mask: (B, T), [b, t] with b in [0, B), t in [0, T) -> (B, T) and (B, T) bool, of
    which only True tokens mean something. Nothing carries a gradient.
    Raises ValueError for an unknown `mode`; AssertionError on shapes and on cap <= floor.
    """
    assert_shapes(mask, old_logprobs=old_logprobs, sampling_logprobs=sampling_logprobs)
    assert cap > floor >= 0, f"cap is {cap}, floor {floor}"
    log_ratio = keep_true(old_logprobs, mask) - keep_true(sampling_logprobs, mask)
    if mode in ("sequence", "sequence-mask"):
        log_ratio = masked_sum(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    weights = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if mode in ("token", "sequence"):
        return weights.clamp(max=cap), weights > cap
    if mode not in ("token-mask", "sequence-mask"):
        raise ValueError(f"mode is {mode!r}; it can be 'token', 'sequence', 'token-mask' or 'sequence-mask'")
    outside = (weights > cap) | (weights < floor)
    return torch.where(outside, 0.0, weights), outside
