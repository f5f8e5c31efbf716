"""Token sampling from logits, and detection of stop strings."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.rng import draw


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
