"""The text of a policy's turn, as rewards, judges, environments and people read it, from its tokens.

Thoughts stand in <think>...</think>, whatever the model's own markers of them are ([THINK], channels), so that one rule
tells them from the answer (text.without_thoughts). The marks that end a turn, and padding, have no text. Other markers,
special tokens too, are text: an <answer> that is one token is the same as one that is spelt.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from tinyrl.models.detokenizer import IncrementalDetokenizer
from tinyrl.models.tokens import THOUGHTS, thought_markers, token_ids
from tinyrl.tasks.answers import special_ids, turn_closing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

ROLES = ("bos", "eos", "pad", "unk", "cls", "sep")  # of special tokens that a tokenizer names
_TURN_END = re.compile(  # <|im_end|>, <|eot_id|>, <end_of_turn>, <turn|>, </s>
    r"[<\[]\|?(?:/s|eo[stmd](?:_id)?|endoftext|end|im_end|return|call|turn"
    r"|end_?of_?(?:text|turn|message|sentence|sequence|document|utterance)(?:_token)?)\|?[>\]]",
    re.IGNORECASE,
)
OPEN, CLOSE = THOUGHTS
THOUGHT_CHANNEL = "analysis"
ANSWER_CHANNEL = "final"


@lru_cache(maxsize=4)
def hidden_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens that have no text: marks that end a turn, those that begin a text or fill it up."""
    special = special_ids(tokenizer)
    named = {getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    ends = {i for i in special if _TURN_END.fullmatch(str(tokenizer.convert_ids_to_tokens(i)))}
    closing = token_ids(tokenizer, turn_closing(tokenizer, {}))[-1:] if tokenizer.chat_template else []
    return frozenset(i for i in {*named, *ends, *closing} if isinstance(i, int))


def turn_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the text of a policy's tokens."""
    return TurnDetokenizer(tokenizer).add(tokens, at_end=True)


class TurnDetokenizer:
    """The text of a policy's tokens as they come, returned once it is certain.

    State: the tokens of a message's head so far (None outside of one), whether a channel's thought is open, and whether
    there was any text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_ids(tokenizer)
        self._markers = thought_markers(tokenizer)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._head: list[int] | None = None
        self._thinks = False
        self._has_text = False

    def add(self, tokens: list[int], *, at_end: bool = False) -> str:
        text = ""
        part = list[int]()
        for token in tokens:
            if token in self._markers.tokens or self._head is not None:
                text += self._detokenizer.add(part, at_end=True)
                part = []
                self._has_text = self._has_text or bool(text)
                text += self._marked(token)
            elif token not in self._hidden:
                part.append(token)
        text += self._detokenizer.add(part, at_end=at_end)
        if at_end:
            text += self._taken_head()
        self._has_text = self._has_text or bool(text)
        return text

    def end(self) -> str:
        return self.add([], at_end=True)

    def _marked(self, token: int) -> str:
        """Return the text of a marker of thoughts, or of a token in a message's head."""
        markers = self._markers
        if token in markers.pairs:
            self._detokenizer.add([token], at_end=True)  # the text behind it depends on it
            return markers.pairs[token]
        if token in markers.ends:
            head = self._taken_head()
            closing = CLOSE if self._thinks else ""
            self._thinks = False
            return head + closing
        if token == markers.start:
            head = self._taken_head()
            self._head = [token]
            return head
        if token in self._hidden:
            return ""
        self._head = [*(self._head or []), token]
        return self._opened_message() if token == markers.message else ""

    def _opened_message(self) -> str:
        """Return the text of a message's head: none where it is the policy's thought or answer."""
        markers = self._markers
        tokens = self._head or []
        begun = tokens.index(markers.channel) if markers.channel in tokens else len(tokens) - 1
        role = self._decoded([i for i in tokens[:begun] if i != markers.start]).strip()
        channel = self._decoded(tokens[begun + 1 : -1]).strip()
        head = self._taken_head()
        if role not in ("", "assistant"):
            return head
        if channel == THOUGHT_CHANNEL:
            self._thinks = True
            return f"\n{OPEN}" if self._has_text else OPEN
        return "" if channel in ("", ANSWER_CHANNEL) else self._decoded(tokens[begun:])

    def _taken_head(self) -> str:
        """Return the text of a head, which is over."""
        text = self._decoded(self._head or [])
        self._head = None
        return text

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else ""
