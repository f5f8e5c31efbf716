"""Draw a token by inverse CDF, with a uniform that is a function of (seed, step, prompt, sample, t)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyrl.generation.request import Request
from tinyrl.models.device import to_device

ALL = 2.0  # as a top-p: rounding of cumulative probabilities drops no token


def row_params(rows: list[Request], device: torch.device) -> dict[str, Tensor]:
    """Return how the tokens of R rows are drawn: parameters, (R,) each, without those that none of them needs."""
    greedy = [p.greedy for p in rows]
    truncated = any(p.top_k or p.top_p < 1 for p in rows if not p.greedy)
    columns: dict[str, tuple[bool, list[Any], torch.dtype]] = {
        "temperature": (any(p.temperature != 1 for p in rows), [p.temperature for p in rows], torch.float32),
        "top_p": (truncated, [p.top_p if p.top_p < 1 else ALL for p in rows], torch.float32),
        "top_k": (truncated, [p.top_k or 1 << 40 for p in rows], torch.int64),
        "greedy": (any(greedy) and not all(greedy), greedy, torch.bool),
        "all greedy": (all(greedy), greedy, torch.bool),
    }
    needed = {name: (values, dtype) for name, (needed, values, dtype) in columns.items() if needed}
    return {name: to_device(torch.tensor(values, dtype=dtype), device) for name, (values, dtype) in needed.items()}


def sample_tokens(logits: Tensor, u: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Draw one token a row; return it and its log-probability under softmax(logits / temperature), before truncation.

    logits (R, V) float32, overwritten; u (R,) uniforms. Returns (R,) int64 and (R,) float32.
    """
    z = logits.div_(params["temperature"].unsqueeze(-1)) if "temperature" in params else logits
    likeliest = z.argmax(-1) if "all greedy" in params or "greedy" in params else None
    weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
    if "all greedy" in params and likeliest is not None:
        token = likeliest
        total = weights.sum(-1, dtype=torch.float64)
    elif "top_p" in params:
        total = weights.sum(-1, dtype=torch.float64)
        probs = weights / total.unsqueeze(-1).float()
        token = draw(truncate_probs(probs, top_k=params["top_k"], top_p=params["top_p"]), u)[0]
    else:
        token, total = draw(weights, u)
    if "greedy" in params and likeliest is not None:
        token = torch.where(params["greedy"], likeliest, token)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    return token, (chosen / total).log().float()


def truncate_probs(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero everything outside the top_k (R,) tokens and the smallest set of mass top_p (R,); (R, V) -> (R, V)."""
    ordered, order = probs.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p.unsqueeze(-1)
    keep &= torch.arange(probs.shape[-1], device=probs.device) < top_k.unsqueeze(-1)
    return torch.zeros_like(probs).scatter(-1, order, torch.where(keep, ordered, 0.0))


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one index a row by inverse CDF, the smallest j with cumulative weight above u times the row's total, (R,)
    int64; return it and the totals (R,) float64. weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).

    Sums run in two levels (blocks, then inside one block): a single float32 running sum over 150,000 entries is off
    by several percent of a mean probability.
    """
    rows, vocabulary = weights.shape
    width = block_width(vocabulary)
    missing = -vocabulary % width
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    padded = padded.view(rows, -1, width)
    sums = padded.sum(-1).double()
    ends = sums.cumsum(-1)
    target = (u.to(ends.dtype) * ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, width)).squeeze(1).double().cumsum(-1)
    # Rounding may leave the target just before the block or at its end; clamping keeps the draw inside the block.
    left = (target - (ends - sums).gather(-1, block)).clamp_(min=0.0)
    left = torch.minimum(left, inside[:, -1:] * (1.0 - 1e-12))
    index = block * width + torch.searchsorted(inside, left, right=True)
    return index.squeeze(-1).clamp_(max=vocabulary - 1), ends[:, -1]  # only NaN gets past the end


def block_width(vocabulary: int) -> int:
    """Return the width of a block: the divisor of the vocabulary that is nearest to its square root, since padding is a
    copy; the root itself where none is from a quarter to four times of it.
    """
    root = max(1, round(vocabulary**0.5))
    for distance in range(root):
        for width in (root - distance, root + distance):
            if root / 4 <= width <= root * 4 and vocabulary % width == 0:
                return width
    return root


# ---- keyed uniforms ----

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014), a bijection of 64-bit words that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, step: int, *, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Derive 64-bit keys (R,) of R samples from the run's seed, the step, and each row's prompt and sample number."""
    key = np.full(len(prompts), _step_key(seed, step))
    for part in (prompts.astype(np.uint64), samples.astype(np.uint64)):
        key = _with_part(key, part)
    return key


@lru_cache(maxsize=64)
def _step_key(seed: int, step: int) -> np.uint64:
    """Derive the part of keys that all samples of a step have in common."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, step % (1 << 63)):
        key = _with_part(key, np.full(1, part, dtype=np.uint64))
    return key[0]


def _with_part(keys: np.ndarray, part: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _mix((keys + _GOLDEN) ^ _mix(part + _GOLDEN))


def advanced(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return keys (R,) whose uniform t is that of `keys` at tokens[r] + t."""
    with np.errstate(over="ignore"):
        return keys + _GOLDEN * tokens.astype(np.uint64)


def uniforms(keys: np.ndarray, *, num_tokens: int) -> Tensor:
    """Draw uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and t."""
    with np.errstate(over="ignore"):
        words = _mix(keys[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64))
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
