"""The text of tokens that come one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CHARACTER_TOKENS = 8  # no character is made of more


class IncrementalDetokenizer:
    """Text of tokens as they come, returned once it is whole: bytes of half a character wait for the others.

    before: tokens in front of them, decoded along: a tokenizer may join or drop spaces there. options: of decoding,
    by default without special tokens.
    """

    def __init__(self, tokenizer: Any, *, before: Iterable[int] = (), **options: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens = [*before]
        self._options: Any = options or {"skip_special_tokens": True}
        self._before = 0  # text is decoded from here on
        self._out = len(self._tokens)  # and was returned up to here

    def add(self, tokens: list[int], *, at_end: bool = False) -> str:
        self._tokens += tokens
        known, text = (
            str(self._tokenizer.decode(part, **self._options))
            for part in (self._tokens[self._before : self._out], self._tokens[self._before :])
        )
        half = text.endswith("\ufffd") and len(self._tokens) - self._out < CHARACTER_TOKENS
        if len(text) <= len(known) or (half and not at_end):
            return ""
        self._before = self._out
        self._out = len(self._tokens)
        return text[len(known) :]

    def end(self) -> str:
        return self.add([], at_end=True)
