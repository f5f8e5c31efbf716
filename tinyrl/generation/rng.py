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


def advanced(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Keys (R,) whose uniform t is that of `keys` at tokens[r] + t."""
    with np.errstate(over="ignore"):
        return keys + _GOLDEN * tokens.astype(np.uint64)


def uniforms(keys: np.ndarray, *, num_tokens: int, first: np.ndarray | None = None) -> Tensor:
    """Uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and first[r] + t (None: t)."""
    start = np.zeros(len(keys), dtype=np.uint64) if first is None else first.astype(np.uint64)
    with np.errstate(over="ignore"):
        numbers = start[:, None] + np.arange(1, num_tokens + 1, dtype=np.uint64)
        counters = keys[:, None] + _GOLDEN * numbers
        words = _mix(counters)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Sample one index a row: the smallest j with cumulative weight above u times the row's total. (R,) int64.

    weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).
    """
    return draw(weights, u)[0]


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`inverse_cdf`, and the total of each row's weights (R,) float64, which it needs anyway.

    Sums run in two levels (blocks, then inside one block): a single float32 running sum over 150,000 entries is off
    by several percent of a mean probability.
    """
    rows, vocabulary = weights.shape
    width = block_width(vocabulary)
    blocks = -(-vocabulary // width)
    missing = blocks * width - vocabulary
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights  # a pad of nothing is a copy
    padded = padded.view(rows, blocks, width)
    sums = padded.sum(-1).double()
    ends = sums.cumsum(-1)
    target = (u.to(ends.dtype) * ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks - 1)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, width)).squeeze(1).double().cumsum(-1)
    # Rounding may leave the target just before the block or at its end; clamping keeps the draw inside the block.
    left = (target - (ends - sums).gather(-1, block)).clamp_(min=0.0)
    left = torch.minimum(left, inside[:, -1:] * (1.0 - 1e-12))
    index = block * width + torch.searchsorted(inside, left, right=True)
    return index.squeeze(-1).clamp_(max=vocabulary - 1), ends[:, -1]  # only NaN gets past the end


def block_width(vocabulary: int) -> int:
    """A divisor of the vocabulary near its square root, so that no block is padded; the root where there is none."""
    root = max(1, round(vocabulary**0.5))
    near = (w for d in range(root) for w in (root - d, root + d) if root / 4 <= w <= root * 4 and vocabulary % w == 0)
    return next(near, root)
