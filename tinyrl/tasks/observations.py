"""Observations as tokens: what an environment says, put behind the policy's turn as the model is used to read it.

Tokens are appended and never made again from text, so what is trained is what was sampled. After a stop string, and
without a chat template, an answer is raw text. After the end of a chat turn it is a message of role `tool`: what the
template writes around it is tokenised with its markers, the content without any (models/tokens.py), so that an answer
that holds "<|im_end|>" does not end the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.models.templates import template_text
from tinyrl.models.tokens import disguised, reads_parts_alike, token_ids, tokens_behind
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import open_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("tool", "user")  # of a message that answers, the first that the template has
ASKED, SAID, ANSWERED, THOUGHT = "asked", "policysaid", "environmentanswered", "policythought"
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
        self.chat = chat
        self._around = self._find_role(variables) if chat else ("", "")
        self._before, self._after = (token_ids(tokenizer, text) for text in self._around)
        if not chat:
            return
        self.opened = open_thinking(self._around[1])
        shown = self._render(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}", variables)
        self.strips_thinking = THOUGHT not in shown

    @property
    def most(self) -> int:
        return self.max_tokens + len(self._before) + len(self._after)

    def __call__(self, text: str, *, ended_at: int | None) -> Observation:
        """The tokens of an answer to a turn that ended with the EOS token `ended_at` (None: at a stop string)."""
        content, text = self._cut(text)
        before, after = self._around if ended_at is not None else ("", "")
        tokens = [*self._before, *content, *self._after] if ended_at is not None else content
        if not reads_parts_alike(self.tokenizer):
            whole = tokens_behind(self.tokenizer, "\n", f"{before}{disguised(self.tokenizer, text)}{after}")
            tokens = whole if len(whole) <= self.most else tokens
        closes = bool(before) and tokens[0] in self.eos  # the policy has closed its turn itself
        return Observation(tokens[closes:], text)

    def cut(self, text: str) -> str:
        return self._cut(text)[1]

    def _cut(self, text: str) -> tuple[list[int], str]:
        text = text[: CHARS_A_TOKEN * self.max_tokens]
        content = token_ids(self.tokenizer, disguised(self.tokenizer, text))
        if len(content) > self.max_tokens:
            content = content[: self.max_tokens]
            text = str(self.tokenizer.decode(content))
        return content, text

    def _find_role(self, variables: dict[str, Any]) -> tuple[str, str]:
        """What the template writes between a turn and its answer, and between the answer and the next turn. Some write
        every role that they do not know as the assistant, and so the answer as the policy's own.
        """
        problem: ValueError | None = None
        for self.role in ROLES:
            try:
                text = self._render(SAID, variables)
            except ValueError as error:
                problem = error
                continue
            _, said, rest = text.partition(SAID)
            between, answered, after = rest.partition(ANSWERED)
            if said and answered and ANSWERED not in after and not self._is_own(text, variables):
                return between, after
        raise ValueError(
            "the model's chat template has no place for what an environment answers: neither a message of role tool "
            f"nor another of the user's{f' ({problem})' if problem else ''}"
        )

    def _is_own(self, text: str, variables: dict[str, Any]) -> bool:
        """Whether a rendering writes a tool's answer as another turn of the policy."""
        opening, _, rest = text.partition(ASKED)[2].partition(SAID)
        if self.role != "tool" or rest.startswith(opening + ANSWERED):
            return self.role == "tool"
        try:
            return text == self._render(SAID, variables, role="assistant")
        except ValueError:
            return False

    def _render(self, said: str, variables: dict[str, Any], *, role: str | None = None) -> str:
        messages = [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": said},
            {"role": role or self.role, "content": ANSWERED},
        ]
        return template_text(self.tokenizer, messages, variables=variables, add_generation_prompt=True)
