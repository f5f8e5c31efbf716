"""Checks that a serving engine samples from our policy: its tokenizer, its base, its adapters, each by comparison.

Four completions that the server draws are scored by our own forward pass. How far its log-probabilities are from ours
says how the two compute; when they are farther than other numerics explain, it samples from something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.engine import Completion, SampledRole
from tinyrl.generation.server_client import ServerClient
from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.roles import Roles
from tinyrl.text import shortened

TOKENS_AT_ONCE = 4096  # whose text is compared in one request
STIRRED = 0.02  # deviation of the numbers added to LoRA's B, which is zero in a fresh adapter
UNEXPLAINED = 0.1  # of the squares that the server's numbers may leave, where another model leaves 1 or more
SMALLEST_GAP, TIMES = 1e-4, 5.0  # nats per token: a gap is too large above the first one, this many times


def check_tokenizer(server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, with the first token, where a token of ours means another text there; all are looked at.

    How text is split into tokens is ours alone: the server is sent tokens, and only reads them, for stop strings.
    Raises ServerError where it does not answer.
    """
    for start in range(0, len(tokenizer), TOKENS_AT_ONCE):
        tokens = list(range(start, min(start + TOKENS_AT_ONCE, len(tokenizer))))
        if _texts(server, base, tokenizer, tokens) is None:
            continue
        while len(tokens) > 1:
            first, second = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
            tokens = second if _texts(server, base, tokenizer, first) is None else first
        here, there = _texts(server, base, tokenizer, tokens) or ("", "")
        raise ValueError(
            f"{server.name} has another tokenizer: token {tokens[0]} is {shortened(repr(here))} here "
            f"and {shortened(repr(there))} there"
        )


def _texts(
    server: ServerClient, base: str, tokenizer: PreTrainedTokenizerBase, tokens: list[int]
) -> tuple[str, str] | None:
    """What tokens mean here and there; None where that is the same."""
    here = str(tokenizer.decode(tokens))
    there = server.post("/detokenize", {"model": base, "tokens": tokens})
    there = there.get("prompt") if isinstance(there, dict) else None
    return None if here == there else (here, str(there))


def rescored(
    roles: Roles, role: SampledRole, prompts: list[list[int]], drawn: list[Completion], *, temperature: float
) -> Tensor:
    """Our own log-probabilities (N,) of all tokens that were drawn, row by row."""
    batch = roles.batch(prompts, [c.tokens for c in drawn])
    with torch.no_grad(), roles.acting(role):
        logprobs, _ = roles.logprobs("reference" if role == "reference" else "policy", batch, temperature=temperature)
    return torch.cat([row[: len(c.tokens)] for row, c in zip(logprobs.float().cpu(), drawn, strict=True)])


def served(drawn: list[Completion]) -> Tensor:
    """The server's log-probabilities (N,) of the same tokens."""
    return torch.tensor([logprob for c in drawn for logprob in c.logprobs])


def gap(theirs: Tensor, ours: Tensor) -> float:
    """Mean |difference| over the N tokens, in nats per token."""
    return float((theirs - ours).abs().mean())


def unexplained(theirs: Tensor, ours: Tensor, *, otherwise: Tensor) -> float:
    """The share of squares that `ours` leaves of the server's numbers: sum (theirs - ours)^2 over
    sum (ours - otherwise)^2. About 0 where the server computes what we do, 1 where it computes `otherwise`.
    """
    return float((theirs - ours).square().sum() / (ours - otherwise).square().sum().clamp(min=1e-30))


def is_other_model(theirs: Tensor, ours: Tensor) -> bool:
    """Whether our log-probabilities do not explain how the server's vary from token to token."""
    return unexplained(theirs, ours, otherwise=ours.mean().expand_as(ours)) > UNEXPLAINED


@contextmanager
def stirred(roles: Roles) -> Iterator[None]:
    """Inside, the policy's adapter is another one, which changes the model at once; then exactly its own again."""
    generator = torch.Generator().manual_seed(0)
    matrices = [p for n, p in roles.adapter_parameters(POLICY_ADAPTER).items() if "_B." in n]
    before = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.add_((torch.randn(p.shape, generator=generator) * STIRRED).to(p))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, own in zip(matrices, before, strict=True):
                p.copy_(own)
