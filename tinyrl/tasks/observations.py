"""Observations as tokens: an environment's reply behind the policy's turn, as the chat template would write it.

Tokens are appended and never made again from text, so what is trained is what was sampled. After a stop string, and
without a chat template, a reply is raw text. After the end of a chat turn it is a message of role `tool`: the
template's text around it is tokenised with its markers, the content without any (models/tokens.py), so that a reply
that holds "<|im_end|>" does not end the turn.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.models.templates import template_text
from tinyrl.models.tokens import disguised, reads_parts_alike, token_ids, tokens_behind
from tinyrl.tasks.answers import answer_end
from tinyrl.tasks.prompts import open_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED, TURN, REPLY, THOUGHT = "asked", "policysaid", "environmentanswered", "policythought"
CHARS_A_TOKEN = 64  # of longer texts only the beginning is tokenised


@dataclass(frozen=True)
class Observation:
    """The tokens of a reply, and its text as far as they go."""

    tokens: list[int]
    text: str


class ObservationTokens:
    """Turns replies into tokens for one tokenizer, at most `max_tokens` of each reply's own.

    chat: whether prompts go through the chat template, with `variables` and `tools`; eos: tokens that end a turn.
    role: of a message that replies; end: the token that ends a turn; opened: a <think> that the template opens for the
    next turn; strips_thinking: whether the template leaves the thinking out of earlier turns, while it stays in ours.
    Raises ValueError for a template that has no place for a reply.
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
        self.tokenizer, self.chat, self.eos, self.max_tokens = tokenizer, chat, eos, max_tokens
        self.end = answer_end(tokenizer, chat=chat, variables=variables)
        self.role, self._around = self._find_role(variables) if chat else ("tool", ("", ""))
        self._before, self._after = (token_ids(tokenizer, text) for text in self._around)
        self.opened = open_thinking(self._around[1])
        thinking = f"<think>\n{THOUGHT}\n</think>\n\n{TURN}"
        self.strips_thinking = chat and THOUGHT not in self._render(thinking, self.role, variables)

    @property
    def most(self) -> int:
        """Most tokens of one observation, with those around the reply."""
        return self.max_tokens + len(self._before) + len(self._after)

    def __call__(self, text: str, *, ended_at: int | None) -> Observation:
        """Tokenise a reply to a turn that ended with the EOS token `ended_at` (None: at a stop string)."""
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
        if len(content) <= self.max_tokens:
            return content, text
        content = content[: self.max_tokens]
        return content, str(self.tokenizer.decode(content))

    def _find_role(self, variables: dict[str, Any]) -> tuple[str, tuple[str, str]]:
        """Return the role of a reply, the template's text between a turn and its reply, and that before the next turn.

        Some templates write every role that they do not know as the assistant, and so a tool's reply as another turn of
        the policy.
        """
        problem = as_policy = ""
        with suppress(ValueError):
            as_policy = self._render(TURN, "assistant", variables)
        for role in ("tool", "user"):
            try:
                text = self._render(TURN, role, variables)
            except ValueError as error:
                problem = f" ({error})"
                continue
            opening, turn, rest = text.partition(ASKED)[2].partition(TURN)
            between, reply, after = rest.partition(REPLY)
            own = role == "tool" and (rest.startswith(opening + REPLY) or text == as_policy)
            if turn and reply and REPLY not in after and not own:
                return role, (between, after)
        raise ValueError(
            "the model's chat template has no place for what an environment answers: neither a message of role tool "
            f"nor another of the user's{problem}"
        )

    def _render(self, turn: str, role: str, variables: dict[str, Any]) -> str:
        roles = (("user", ASKED), ("assistant", turn), (role, REPLY))
        messages = [{"role": each, "content": content} for each, content in roles]
        return template_text(self.tokenizer, messages, variables=variables, add_generation_prompt=True)
