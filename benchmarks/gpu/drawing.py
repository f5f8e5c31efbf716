"""Drawing in two levels by one read of the logits: the sums of blocks, then one block a row.

Today's path (tinyrl/generation/drawing.py: sample_tokens) shifts and exponentiates all logits in memory and reads them
again. The rule and the uniforms are the same, and so are the tokens, but where a uniform falls within rounding of the
border between two. Truncation (top-p, top-k) and greedy decoding are not computed here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_in_two_levels(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token (R,) for each row of logits (R, V) float32 by its uniform u (R,) float64, and its
    log-probability (R,).
    """
    from benchmarks.gpu import kernels

    vocabulary = logits.shape[1]
    maxima, sums, width = kernels.block_sums(logits)
    highest = maxima.amax(-1, keepdim=True)
    mass = sums.double() * (maxima - highest).double().exp()
    ends = mass.cumsum(-1)
    total = ends[:, -1:]
    target = u.unsqueeze(-1) * total
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    at = block * width + torch.arange(width, device=logits.device)
    weights = logits.gather(1, at.clamp(max=vocabulary - 1)).sub_(highest).double().exp_()
    weights.masked_fill_(at >= vocabulary, 0.0)
    inside = weights.cumsum(-1)
    # Rounding may leave the target just before the block or at its end, as in `draw`.
    left = (target - (ends - mass).gather(-1, block)).clamp_(min=0.0)
    left = torch.minimum(left, inside[:, -1:] * (1.0 - 1e-12))
    place = torch.searchsorted(inside, left, right=True).clamp_(max=width - 1)
    token = (block * width + place).squeeze(-1).clamp_(max=vocabulary - 1)
    logprob = (weights.gather(-1, place) / total).log()
    return token, logprob.squeeze(-1).float()
