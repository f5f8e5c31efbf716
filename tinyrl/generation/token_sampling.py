"""Keyed random numbers, token sampling from logits, and detection of stop strings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# ---- Keyed random numbers ----
# The uniform of token t comes from (seed, step, prompt, sample, t) by a counter-based hash, so a sample does not
# depend on which rows share its batch, on the engine, on a split after an out-of-memory error, or on a restart.


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


# ---- Token sampling from logits, and detection of stop strings ----


def sample_tokens(
    logits: Tensor, u: Tensor, *, temperature: float, top_k: int, top_p: float, greedy: bool
) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under softmax(logits / temperature), from one pass over the logits.

    logits (R, V) float32, overwritten; u (R,) uniforms. Returns (R,) int64 and (R,) float32.
    """
    z = logits.div_(temperature) if temperature != 1.0 else logits
    token = z.argmax(-1) if greedy else None
    weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
    if token is not None:
        total = weights.sum(-1, dtype=torch.float64)
    elif top_k or top_p < 1:
        total = weights.sum(-1, dtype=torch.float64)
        token = draw(truncate(weights / total.unsqueeze(-1).float(), top_k=top_k, top_p=top_p), u)[0]
    else:
        token, total = draw(weights, u)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    return token, (chosen / total).log().float()


def truncate(probs: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Zero everything outside the top_k tokens and outside the smallest set of mass top_p; (R, V) -> (R, V)."""
    ordered, order = probs.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    if top_k:
        keep[:, top_k:] = False
    return torch.zeros_like(probs).scatter(-1, order, torch.where(keep, ordered, 0.0))


def stop_said_at(tokens: list[int], stop: list[str], tokenizer: PreTrainedTokenizerBase, *, look_at: int) -> int | None:
    """How many of `tokens` there are when a stop string has just been completed; None where none has. Only ends within
    the last `look_at` tokens are checked.
    """
    # A token is at least one byte; a few more, because decoding that starts inside a character or a word is off.
    window = max(len(s.encode()) for s in stop) + 8
    for end in range(max(1, len(tokens) - look_at + 1), len(tokens) + 1):
        text = tokenizer.decode(tokens[max(0, end - window) : end])
        if any(s in text for s in stop):  # pyright: ignore[reportOperatorIssue]
            return end
    return None
