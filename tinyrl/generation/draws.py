"""How a token is drawn: by inverse CDF with keyed random numbers, each row with its own temperature, top-p and top-k.

The uniform of token t comes from (seed, step, prompt, sample, t) by a counter-based hash, so the same request gives the
same completion, to float32 rounding, whichever rows share its batch, from every engine, after a split for memory and
after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinyrl.models.device import to_device

ALL = 2.0  # as a top-p: rounding of cumulative probabilities drops no token
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are drawn. greedy: the likeliest, scored at this temperature all the same."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


@dataclass
class RowParams:
    """SamplingParams of R rows, (R,) each; None where no row needs it. all_greedy: nothing is drawn."""

    temperature: Tensor | None
    top_p: Tensor | None
    top_k: Tensor | None
    greedy: Tensor | None
    all_greedy: bool

    @classmethod
    def of(cls, rows: list[SamplingParams], device: torch.device) -> RowParams:
        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        greedy, tempered = [p.greedy for p in rows], any(p.temperature != 1 for p in rows)
        truncated, mixed = any(p.top_k or p.top_p < 1 for p in rows if not p.greedy), any(greedy) and not all(greedy)
        return cls(
            tensor([p.temperature for p in rows], torch.float32) if tempered else None,
            tensor([p.top_p if p.top_p < 1 else ALL for p in rows], torch.float32) if truncated else None,
            tensor([p.top_k or 1 << 40 for p in rows], torch.int64) if truncated else None,
            tensor(greedy, torch.bool) if mixed else None,
            all(greedy),
        )


def sample_tokens(logits: Tensor, u: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under softmax(logits / temperature), before any truncation.

    logits (R, V) float32, overwritten; u (R,) uniforms. Returns (R,) int64 and (R,) float32.
    """
    z = logits if params.temperature is None else logits.div_(params.temperature.unsqueeze(-1))
    likeliest = z.argmax(-1) if params.all_greedy or params.greedy is not None else None
    weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
    if params.all_greedy and likeliest is not None:
        token, total = likeliest, weights.sum(-1, dtype=torch.float64)
    elif params.top_p is not None and params.top_k is not None:
        total = weights.sum(-1, dtype=torch.float64)
        probs = weights / total.unsqueeze(-1).float()
        token = draw(truncate(probs, top_k=params.top_k, top_p=params.top_p), u)[0]
    else:
        token, total = draw(weights, u)
    if params.greedy is not None and likeliest is not None:
        token = torch.where(params.greedy, likeliest, token)
    chosen = weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
    return token, (chosen / total).log().float()


def truncate(probs: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero everything outside the top_k (R,) tokens and the smallest set of mass top_p (R,); (R, V) -> (R, V)."""
    ordered, order = probs.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p.unsqueeze(-1)
    keep &= torch.arange(probs.shape[-1], device=probs.device) < top_k.unsqueeze(-1)
    return torch.zeros_like(probs).scatter(-1, order, torch.where(keep, ordered, 0.0))


def draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One index a row by inverse CDF, the smallest j with cumulative weight above u times the row's total, (R,) int64;
    and the totals (R,) float64. weights (R, V) float32, not necessarily normalised; u (R,) in [0, 1).

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


# ---- keyed random numbers ----


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, step: int, *, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """64-bit keys (R,) of R samples from the run's seed, the step, and each row's prompt and sample number."""
    key = np.zeros(len(prompts), dtype=np.uint64)
    parts = np.uint64(seed), np.uint64(step % (1 << 63)), prompts.astype(np.uint64), samples.astype(np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = _mix((key + _GOLDEN) ^ _mix(part * np.ones_like(key) + _GOLDEN))
    return key


def advanced(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Keys (R,) whose uniform t is that of `keys` at tokens[r] + t."""
    with np.errstate(over="ignore"):
        return keys + _GOLDEN * tokens.astype(np.uint64)


def uniforms(keys: np.ndarray, *, num_tokens: int, first: np.ndarray | None = None) -> Tensor:
    """Uniforms in [0, 1), (R, num_tokens) float64: entry (r, t) is a function of keys[r] and first[r] + t (None: t)."""
    keys = keys if first is None else advanced(keys, first)
    with np.errstate(over="ignore"):
        words = _mix(keys[:, None] + _GOLDEN * np.arange(1, num_tokens + 1, dtype=np.uint64))
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
