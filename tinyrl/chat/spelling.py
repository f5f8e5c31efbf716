"""Text of tokens as they come, one by one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # how a decoder writes bytes of a character that is not whole


class Spelling:
    """Hands out text once it is settled: half a character waits for its other half. State: the tokens so far, and how
    many of them have been handed out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before, self._said = 0, 0  # text is decoded from `before`; up to `said` it was handed out

    def add(self, token: int) -> str:
        """The text that this token settles; often none."""
        self._tokens.append(token)
        return self._settled(at_end=False)

    def end(self) -> str:
        """What still waits, as it is."""
        return self._settled(at_end=True)

    def _settled(self, *, at_end: bool) -> str:
        # A tokenizer may join or drop spaces by what stands before, so that is decoded along.
        known = self._decoded(self._tokens[self._before : self._said])
        text = self._decoded(self._tokens[self._before :])
        if len(text) <= len(known) or (text.endswith(HALF) and not at_end):
            return ""
        self._before, self._said = self._said, len(self._tokens)
        return text[len(known) :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
