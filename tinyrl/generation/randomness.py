"""Keyed random numbers and sampling by inverse CDF: a sample is a function of its key, not of its batch.

The uniform of token t comes from (seed, step, prompt, sample, t) by a counter-based hash, so a sample does not
depend on which rows share its batch, on the engine, on a split after an out-of-memory error, or on a restart.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, step: int, *, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """64-bit keys (R,) of R samples from the run's seed, the step, and each row's prompt and sample number."""
    with np.errstate(over="ignore"):
        key = np.zeros(len(prompts), dtype=np.uint64)
        for part in (
            np.uint64(seed),
            np.uint64(step % (1 << 63)),
            prompts.astype(np.uint64),
            samples.astype(np.uint64),
        ):
            key = _mix((key + _GOLDEN) ^ _mix(part * np.ones_like(key) + _GOLDEN))
    return key


def uniforms(keys: np.ndarray, *, num_tokens: int) -> Tensor:
    """Uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and t."""
    with np.errstate(over="ignore"):
        counters = keys[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64)
        words = _mix(counters)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Sample one index a row: the smallest j with cumulative weight above u times the row's total. (R,) int64.

    weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).
    """
    return draw(weights, u)[0]


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`inverse_cdf`, and the total of each row's weights (R,) float64, which comes with it.

    Sums run in two levels (blocks, then inside one block): a single float32 running sum over 150,000 entries is off
    by several percent of a mean probability.
    """
    rows, vocabulary = weights.shape
    width = block_width(vocabulary)
    blocks = -(-vocabulary // width)
    padded = torch.nn.functional.pad(weights, (0, blocks * width - vocabulary)).view(rows, blocks, width)
    block_cdf = padded.sum(-1).double().cumsum(-1)
    target = u.to(block_cdf.dtype) * block_cdf[:, -1]
    block = torch.searchsorted(block_cdf, target.unsqueeze(-1), right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, block_cdf.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, width)).squeeze(1)
    inner_cdf = inside.double().cumsum(-1)
    index = torch.searchsorted(inner_cdf, target.unsqueeze(-1) - before, right=True)
    # Rounding may leave the target at or past the block's end: step back to its last entry that can be drawn.
    last = width - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    index = (block * width + torch.minimum(index, last)).squeeze(-1)
    return index.clamp(max=vocabulary - 1), block_cdf[:, -1]  # only weights that are not numbers get past the end


def block_width(vocabulary: int) -> int:
    """A divisor of the vocabulary near its square root, so that no copy is needed to fill the last block up; the
    square root where there is none.
    """
    root = max(1, round(vocabulary**0.5))
    near = (w for d in range(root) for w in (root - d, root + d) if root / 4 <= w <= root * 4 and vocabulary % w == 0)
    return next(near, root)
