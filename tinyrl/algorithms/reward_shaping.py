"""Per-token rewards from one score per response and a per-token KL penalty.

The shaping of Ziegler et al. (1909.08593) and InstructGPT (2203.02155). What differs: tokens the policy did not choose
(tool output, padding) get neither penalty nor score, and the score goes to the last token it chose, the EOS if any.
"""

import torch
from torch import Tensor

from tinyrl.algorithms.masking import assert_shapes, keep_true


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Penalty on every chosen token, score on the last: r[b, t] = -kl_coef kl[b, t] + [t is the last True] scores[b].

    Ziegler et al. (1909.08593) Eq. 2, per token. 0 on False tokens. A row without a True token gives 0 everywhere, and
    its score is ignored (a dropped row may hold NaN).
    scores: (B,); kl, mask: (B, T) -> (B, T).
    Raises AssertionError on shapes and when the score of a row with a True token is not finite: drop the row first.
    """
    assert_shapes(mask, kl=kl)
    assert scores.shape == mask.shape[:1], f"scores is {tuple(scores.shape)}, mask is {tuple(mask.shape)}"
    scores = keep_true(scores, mask.any(dim=1))
    assert bool(torch.isfinite(scores).all()), f"scores that are not finite: {scores[~torch.isfinite(scores)].tolist()}"
    true_from_here_on = mask.long().flip(1).cumsum(1).flip(1)
    last = mask & (true_from_here_on == 1)
    return -kl_coef * keep_true(kl, mask) + torch.where(last, scores.unsqueeze(1), 0.0)
