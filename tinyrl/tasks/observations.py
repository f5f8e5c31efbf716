"""Observations as tokens: what an environment says, put behind the policy's turn as the model is used to read it.

Tokens are appended and never made again from text, so what is trained is what was sampled. After a stop string, and
without a chat template, an answer is raw text. After the end of a chat turn it is a message of role `tool`: what the
template writes around it is tokenised with its special tokens, the content alone and without any, so that an answer
that holds "<|im_end|>" does not end the turn (huggingface/transformers#29279).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.models.templates import template_text
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import open_thinking, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("tool", "user")  # of a message that answers, the first that the template has
SAID, ANSWERED, THOUGHT = "policysaid", "environmentanswered", "policythought"
CHARS_A_TOKEN = 64  # of longer texts only the beginning is tokenised


@dataclass(frozen=True)
class Observation:
    """What is read: its tokens, and the text as far as it was read."""

    tokens: list[int]
    text: str


class ObservationTokens:
    """Turns answers into tokens for one tokenizer, at most `max_tokens` of each answer's own.

    chat: whether prompts go through the chat template, with `variables` and `tools`; eos: tokens that end a turn.
    role: of a message that answers; end: the token that ends a turn; opened: a <think> that the template opens for the
    next turn; strips_thinking: whether the template would leave out of earlier turns what stays in ours. Raises
    ValueError for a template that has no place for an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool,
        variables: dict[str, Any],
        eos: set[int],
        max_tokens: int,
    ) -> None:
        self.tokenizer, self.eos, self.max_tokens = tokenizer, eos, max_tokens
        self.end = answer_end(tokenizer, chat=chat, variables=variables)
        self.role, self.opened, self.strips_thinking = "tool", "", False
        self._before: list[int] = []
        self._after: list[int] = []
        self.chat = chat
        if not chat:
            return
        between, after = self._around(variables)
        self._before, self._after = token_ids(tokenizer, between), token_ids(tokenizer, after)
        self.opened = open_thinking(after)
        shown = self._render(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}", variables)
        self.strips_thinking = THOUGHT not in shown

    @property
    def most(self) -> int:
        return self.max_tokens + len(self._before) + len(self._after)

    def __call__(self, text: str, *, ended_at: int | None) -> Observation:
        """The tokens of an answer to a turn that ended with the EOS token `ended_at` (None: at a stop string)."""
        content, text = self._cut(text)
        if not self.chat or ended_at is None:
            return Observation(content, text)
        closes = bool(self._before) and self._before[0] in self.eos  # the policy has closed its turn itself
        return Observation([*self._before[closes:], *content, *self._after], text)

    def cut(self, text: str) -> str:
        return self._cut(text)[1]

    def _cut(self, text: str) -> tuple[list[int], str]:
        text = text[: CHARS_A_TOKEN * self.max_tokens]
        encoded: Any = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        content = [int(i) for i in encoded["input_ids"]]
        if len(content) > self.max_tokens:
            content = content[: self.max_tokens]
            text = str(self.tokenizer.decode(content))
        return content, text

    def _around(self, variables: dict[str, Any]) -> tuple[str, str]:
        """What the template writes between a turn and its answer, and between the answer and the next turn."""
        problem: ValueError | None = None
        for self.role in ROLES:
            try:
                text = self._render(SAID, variables)
            except ValueError as error:
                problem = error
                continue
            _, said, rest = text.partition(SAID)
            between, answered, after = rest.partition(ANSWERED)
            if said and answered and ANSWERED not in after:
                return between, after
        raise ValueError(
            "the model's chat template has no place for what an environment answers: neither a message of role tool "
            f"nor another of the user's{f' ({problem})' if problem else ''}"
        )

    def _render(self, said: str, variables: dict[str, Any]) -> str:
        messages = [
            {"role": "user", "content": "asked"},
            {"role": "assistant", "content": said},
            {"role": self.role, "content": ANSWERED},
        ]
        return template_text(self.tokenizer, messages, variables=variables, add_generation_prompt=True)
