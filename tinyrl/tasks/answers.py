"""Answers and observations as tokens: the turn to learn behind its prompt, the token that ends it, and replies.

Each is the difference of two renderings by the chat template, with the turn and without it; prompts are rendered as
they are for sampling (prompts.py). One token ends an answer wherever it is learnt, sampled or judged (`answer_end`).
Torch is never imported.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinyrl.data.formats import Side
from tinyrl.data.messages import Prompt, roles_of
from tinyrl.models.tokens import disguised, reads_parts_alike, template_text, token_ids, tokens_behind
from tinyrl.tasks.prompts import (
    ANSWER,
    ASKED,
    Chat,
    PreparedPrompt,
    Rendered,
    asked_messages,
    in_chat,
    open_thinking,
    render_prompt,
    shared_length,
)
from tinyrl.text import first_line, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


# ---- the end of an answer ----


def answer_end(tokenizer: Tokenizer, *, chat: Chat, variables: dict[str, Any]) -> int:
    """Return the token that ends an answer: the one that ends a turn of the chat template if prompts go through it and
    it writes one, else EOS.
    """
    assert isinstance(tokenizer.eos_token_id, int)
    return _turn_end(tokenizer, json.dumps(variables)) if in_chat(tokenizer, chat) else tokenizer.eos_token_id


@lru_cache(maxsize=16)
def _turn_end(tokenizer: Tokenizer, variables: str) -> int:
    tokens = list[int]()
    with suppress(ValueError):
        tokens = token_ids(tokenizer, after_answer(tokenizer, json.loads(variables)))
    return _through_end(tokenizer, tokens, end=tokenizer.eos_token_id)[-1]  # pyright: ignore[reportArgumentType]


def after_answer(tokenizer: Tokenizer, variables: dict[str, Any]) -> str:
    """Return the text that the chat template writes behind an answer. Raises ValueError if it refuses."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
    return template_text(tokenizer, messages, variables=variables).rpartition(ANSWER)[2]


def _through_end(tokenizer: Tokenizer, turn: list[int], *, end: int) -> list[int]:
    """Return a turn through its last special token if only space follows that, and else through an appended `end`."""
    special = special_ids(tokenizer)
    last = next((i for i in reversed(range(len(turn))) if turn[i] in special), None)
    if last is None or str(tokenizer.decode(turn[last + 1 :])).strip():
        return [*turn, end]
    return turn[: last + 1]


def _ended(tokens: list[int], end: int) -> list[int]:
    return tokens if tokens[-1:] == [end] else [*tokens, end]


def as_ended(tokenizer: Tokenizer, sampled: list[int], *, end: int) -> list[int]:
    """Return a completion as a finished answer: `end` replaces another special token that ended it, and is appended to
    one that was cut off or ended with a stop string.
    """
    special = bool(sampled) and sampled[-1] in special_ids(tokenizer)
    return _ended(sampled[:-1] if special else sampled, end)


def template_fault(tokenizer: Tokenizer, ends: set[int], *, chat: Chat, variables: dict[str, Any]) -> str | None:
    """Return what is wrong with the chat template, if prompts go through it: it refuses, or a turn ends with none of
    the `ends`, the tokens that end a completion.
    """
    if not in_chat(tokenizer, chat):
        return None
    try:
        after = after_answer(tokenizer, variables)
    except ValueError as error:
        return first_line(error)
    if not ends & {*token_ids(tokenizer, after)}:
        return f"a turn ends with {truncate(after)!r}, and no token of that ends a completion"
    return None


@lru_cache(maxsize=4)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens, all added ones too; not the one for unknown words, unless that is EOS."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = {*tokenizer.all_special_ids, *added}
    return frozenset(i for i in found if i != tokenizer.unk_token_id or i == tokenizer.eos_token_id)


# ---- answers to learn from ----


def answer_tokens(
    tokenizer: Tokenizer, prompt: Rendered | PreparedPrompt, answer: str, *, chat: Chat, variables: dict[str, Any]
) -> list[int]:
    """Tokenise a text answer as the policy would have sampled it behind a prompt, through `answer_end`. A <think> that
    the prompt has opened is not repeated. Under a chat template markers in the answer are read as text, except its end
    and those that a policy writes itself.
    """
    end = answer_end(tokenizer, chat=chat, variables=variables)
    if prompt.opened and answer.lstrip().startswith("<think>"):
        thoughts, opened = answer.lstrip().removeprefix("<think>"), prompt.opened.removeprefix("<think>")
        answer = thoughts.removeprefix(opened) if thoughts.startswith(opened) else thoughts.lstrip()
    if in_chat(tokenizer, chat):
        written, ending = answer.rstrip(), str(tokenizer.decode([end]))
        answer = written.removesuffix(ending) if written.endswith(ending) else answer
        answer = disguised(tokenizer, answer, own=True)
    return _ended(tokens_behind(tokenizer, prompt.text, answer), end)


def render_answer(
    tokenizer: Tokenizer,
    prompt: Prompt | None,
    answer: Side,
    *,
    chat: Chat,
    system_prompt: str | None,
    variables: dict[str, Any],
    tools: list[Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Return (prompt tokens, target tokens): the prompt of the turn, and the turn to learn.

    A text without a prompt follows a BOS (EOS if there is none), its own or ours, through EOS. A text behind a prompt
    is `answer_tokens`. An answer of one message of the assistant is what the chat template adds to its own rendering of
    the prompt with the generation prompt, through the token that ends the turn (EOS if the template writes none). Both
    renderings are of these messages alone, so a template that strips the thinking of earlier turns does so in both.
    Raises ValueError, quoting the template, if the second does not begin with the first.
    """
    eos = answer_end(tokenizer, chat=False, variables={})
    if isinstance(answer, str):
        if prompt is None:
            start = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else eos
            ends = answer.rstrip().endswith(str(tokenizer.eos_token))
            target = token_ids(tokenizer, answer.rstrip() if ends else answer)
            return [start], _ended(target[1:] if target[:1] == [start] else target, eos)
        how: Any = {"chat": chat, "variables": variables}
        rendered = render_prompt(tokenizer, prompt, system_prompt=system_prompt, **how)
        return rendered.tokens, answer_tokens(tokenizer, rendered, answer, **how)
    if not in_chat(tokenizer, chat):
        why = "task.chat=false" if tokenizer.chat_template else "this model's tokenizer has no chat template"
        raise ValueError(f"the rows are chat messages, but {why}; give prompts and answers as text")
    assert prompt, "a message answers another"
    if [message["role"] for message in answer] != ["assistant"]:
        raise ValueError(f"an answer is one message of the assistant, not {len(answer)} ({roles_of(answer)})")
    options: dict[str, Any] = {"variables": variables, **({"tools": tools} if tools else {})}
    messages = asked_messages(prompt, system_prompt)
    asked = template_text(tokenizer, messages, add_generation_prompt=True, **options)
    whole = template_text(tokenizer, [*messages, *answer], **options)
    if not whole.startswith(asked):
        at = shared_length(asked, whole)
        without, with_it = (text[max(0, at - 30) : at + 40] for text in (asked, whole))
        raise ValueError(
            "the chat template does not continue its own prompt, so the turn to learn is not known: before the turn "
            f"it writes {without!r}, and with the turn {with_it!r}. Where a variable of the template decides "
            "(enable_thinking), set it with task.chat_template_kwargs={NAME: VALUE}"
        )
    target = tokens_behind(tokenizer, asked, whole[len(asked) :])
    if not target:
        raise ValueError(f"the chat template writes nothing for the assistant's turn: {whole[-60:]!r}")
    return token_ids(tokenizer, asked), _through_end(tokenizer, target, end=eos)


# ---- observations: an environment's reply behind the policy's turn ----

REPLY = "environmentanswered"
CHARS_A_TOKEN = 64  # of longer texts only the beginning is tokenised


class ObservationTokens:
    """Tokenise replies, at most `max_tokens` of each reply's own, as the chat template would write them.

    Tokens are appended and never made again from text, so the trained tokens are the sampled ones. After a stop string,
    and without a chat template, a reply is raw text. After the end of a chat turn it is a message of role `tool`: the
    template's text around it has markers, the content has none, so that a reply with "<|im_end|>" ends no turn.

    chat: whether prompts go through the chat template, with `variables` and `tools`; eos: tokens that end a turn.
    role: of a message that replies; end: the token that ends a turn; opened: a <think> that the template opens for the
    next turn. Raises ValueError for a template that has no place for a reply.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat: bool, variables: dict[str, Any], eos: set[int], max_tokens: int
    ) -> None:
        self.tokenizer, self.chat, self.eos, self.max_tokens = tokenizer, chat, eos, max_tokens
        self.end = answer_end(tokenizer, chat=chat, variables=variables)
        self.role, self._around = self._find_role(variables) if chat else ("tool", ("", ""))
        self._before, self._after = (token_ids(tokenizer, text) for text in self._around)
        self.opened = open_thinking(self._around[1])
        self.most = max_tokens + len(self._before) + len(self._after)  # tokens of one observation

    def __call__(self, text: str, *, ended_at: int | None) -> tuple[list[int], str]:
        """Tokenise a reply to a turn that ended with the EOS token `ended_at` (None: at a stop string); return its text
        too, as far as the tokens go.
        """
        tokens, text = self._cut(text)
        before, after = self._around if ended_at is not None else ("", "")
        if ended_at is not None:
            tokens = [*self._before, *tokens, *self._after]
        if not reads_parts_alike(self.tokenizer):
            whole = tokens_behind(self.tokenizer, "\n", f"{before}{disguised(self.tokenizer, text)}{after}")
            tokens = whole if len(whole) <= self.most else tokens
        closes = bool(before) and tokens[0] in self.eos  # the policy has closed its turn itself
        return tokens[closes:], text

    def cut(self, text: str) -> str:
        return self._cut(text)[1]

    def _cut(self, text: str) -> tuple[list[int], str]:
        text = text[: CHARS_A_TOKEN * self.max_tokens]
        content = token_ids(self.tokenizer, disguised(self.tokenizer, text))
        if len(content) <= self.max_tokens:
            return content, text
        return content[: self.max_tokens], str(self.tokenizer.decode(content[: self.max_tokens]))

    def _find_role(self, variables: dict[str, Any]) -> tuple[str, tuple[str, str]]:
        """Return the role of a reply, the template's text between a turn and its reply, and that before the next turn.

        Some templates write every role that they do not know as the assistant, and so a tool's reply as another turn of
        the policy.
        """
        problem, texts = "", dict[str, str]()
        for role in ("assistant", "user", "tool"):
            contents = (("user", ASKED), ("assistant", ANSWER), (role, REPLY))
            messages = [{"role": each, "content": content} for each, content in contents]
            try:
                texts[role] = template_text(self.tokenizer, messages, variables=variables, add_generation_prompt=True)
            except ValueError as error:
                problem = f" ({error})"
        for role in ("tool", "user"):
            text = texts.get(role, "")
            between, reply, after = text.partition(ANSWER)[2].partition(REPLY)
            if reply and REPLY not in after and text != texts.get("assistant"):
                return role, (between, after)
        raise ValueError(
            "the model's chat template has no place for what an environment answers: neither a message of role tool "
            f"nor another of the user's{problem}"
        )
