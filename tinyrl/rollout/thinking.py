"""A budget for thinking: <think> is closed after so many tokens, and the answer begins.

Closing tokens are written by nobody's choice, so they are masked out of the loss. A completion goes on by the same
random numbers, so one that closes its thinking in time is what it would have been without a budget.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Unpack

from transformers import PreTrainedTokenizerBase

from tinyrl.generation.engine import Completion, Request, Response, SampleOptions, SamplingEngine
from tinyrl.models.tokens import tokens_behind

OPEN, CLOSE = "<think>", "</think>"
CLOSING = f"\n{CLOSE}\n\n"


def sample_within_budget(
    requests: list[Request],
    group_size: int,
    *,
    engine: SamplingEngine,
    tokenizer: PreTrainedTokenizerBase,
    opened: list[str],
    budget: int,
    max_new_tokens: int,
    **options: Unpack[SampleOptions],
) -> list[Completion]:
    """`group_size` completions of at most `max_new_tokens` for each request, in order, of which at most `budget` tokens
    think. `opened`: what each prompt has opened for its answer ("<think>", or nothing).
    """
    first = [replace(request, max_new_tokens=budget) for request in requests]
    begun = [completion for group in engine.sample(first, group_size, **options) for completion in group]
    closing = tokens_behind(tokenizer, OPEN, CLOSING)
    going, following = dict[int, Response](), list[Request]()
    for row, completion in enumerate(begun):
        request, text = requests[row // group_size], _text(tokenizer, completion.tokens)
        added = closing if thinks(opened[row // group_size] + text) else []
        room = max_new_tokens - len(completion.tokens) - len(added)
        if completion.finish_reason != "length" or room < 1:
            continue
        going[row] = response = Response()
        response.add(completion.tokens, completion.logprobs)
        response.add(added)
        following.append(request.further(row % group_size, response.tokens, room))
    ended = [group[0] for group in engine.sample(following, 1, **options)] if following else []
    for (row, response), rest in zip(going.items(), ended, strict=True):
        response.add(rest.tokens, rest.logprobs)
        begun[row] = response.ended(rest.finish_reason)
    return begun


def thinks(text: str) -> bool:
    """Whether a text has begun to think and not ended."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def thinking_tokens(tokens: list[int], *, opened: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens of a completion until its thinking ends, all where it does not; None: it does not think."""
    text = opened + _text(tokenizer, tokens)
    if OPEN not in text:
        return None
    if CLOSE not in text:
        return len(tokens)
    return bisect_left(range(len(tokens)), True, key=lambda n: CLOSE in opened + _text(tokenizer, tokens[:n]))


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens))
