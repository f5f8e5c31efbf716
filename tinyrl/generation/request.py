"""A request to a sampling engine, and the sequence that is decoded for it. What comes back is a Sample (sample.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.sample import FinishReason, Sample, SampleBuilder

if TYPE_CHECKING:
    from tinyrl.generation.scheduler import CachedRow

SampledRole = Literal["policy", "reference", "base"]


@dataclass(frozen=True)
class Request:
    """One sample that is asked for: a prompt to continue, how its tokens are drawn, and what ends them.

    prompt: its tokens; row: the prompt's row in the data. key: new token t is drawn by the key's uniform t. limit: the
    most new tokens. top_k: 0 for all tokens. greedy: the likeliest token, scored at this temperature all the same.
    stop: strings that end it. role: whose weights sample. after: what becomes of its row in the cache when it has
    ended: free; cached, until another sequence needs the room; or held, until it is continued or dropped.
    on_tokens: called with new tokens as they come; on_end: called by the thread of LiveScheduler, with the error that
    ended it, if any.
    """

    prompt: list[int]
    key: np.uint64
    limit: int
    row: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop: list[str] = field(default_factory=list)
    role: SampledRole = "policy"
    after: Literal["free", "cached", "held"] = "free"
    on_tokens: Callable[[list[int]], None] | None = None
    on_end: Callable[[Exception | None], None] = lambda error: None


@dataclass(eq=False)
class DecodedSequence:
    """A request in the hands of a scheduler: its tokens so far (EOS and stop string included), with the log-probability
    of each under softmax(logits / temperature) before any top-k or top-p.

    row: the row in the cache that it continues, or that is held for it. cancelled: nobody waits for it any more.
    finish_reason: None until it has ended; a request for no tokens has. sent: tokens that on_tokens had before it began
    again.
    """

    request: Request
    row: CachedRow | None = None
    cancelled: bool = field(default=False, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    sent: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.request.limit < 1:
            self.finish_reason = "length"

    def restart(self) -> None:
        """Begin again, after an error; its key gives the same tokens, which on_tokens gets once."""
        self.sent = max(self.sent, self.tokens, key=len)
        self.tokens = []
        self.logprobs = []
        self.finish_reason = None
        self.row = None

    def cancel(self) -> None:
        """Sample no more of it, and tell nobody."""
        self.cancelled = True

    def keep(self, row: CachedRow) -> None:
        """Take a row of the cache to be continued."""
        self.row = row

    def append(
        self, tokens: list[int], logprobs: list[float], *, eos: set[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Append new tokens up to the one that ends the sequence: EOS, the last of a stop string, or the last within
        the limit. Later ones, decoded between two looks, are dropped.
        """
        before = len(self.tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if token in eos:
                self.finish_reason = "eos"
            elif self.request.stop and self._holds_stop(tokenizer):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.request.limit:
                self.finish_reason = "length"
        if self.sent and self.sent[: len(self.tokens)] != self.tokens[: len(self.sent)]:
            raise RuntimeError("other tokens were sampled after an error")
        if self.request.on_tokens is not None and not self.cancelled:
            new = self.tokens[max(before, len(self.sent)) :]
            if new:
                self.request.on_tokens(new)

    def _holds_stop(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether a stop string is in the text of the last tokens."""
        stop = self.request.stop
        # A token is at least one byte; a few more, because decoding that starts inside a character or a word is off.
        window = max(len(s.encode()) for s in stop) + 8
        text = str(tokenizer.decode(self.tokens[-window:]))
        return any(s in text for s in stop)

    def end(self, tokens: list[int], logprobs: list[float], reason: FinishReason) -> None:
        """Take the whole of what was sampled elsewhere."""
        self.tokens = tokens
        self.logprobs = logprobs
        self.finish_reason = reason

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.cancelled

    def sample(self) -> Sample:
        """Return what was sampled, once it has ended."""
        assert self.finish_reason is not None
        sampled = SampleBuilder(self.request)
        sampled.chose(self.tokens, self.logprobs)
        return sampled.sample(finish=self.finish_reason)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def room(self) -> int:
        """Return the most tokens that it may have."""
        return len(self.request.prompt) + self.request.limit
