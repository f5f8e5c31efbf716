"""Answers and observations as tokens: the turn to learn behind its prompt, the token that ends it, and replies.

Each is the difference of two renderings by the chat template, with the turn and without it; prompts are rendered as
they are for sampling (prompts.py). One token ends an answer wherever it is learnt, sampled or judged (`answer_end`).
Torch is never imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinyrl.data.messages import Prompt, roles_of
from tinyrl.data.turns import Side
from tinyrl.models.tokens import (
    disguised,
    template_text,
    thought_openings,
    token_ids,
    tokens_behind,
)
from tinyrl.tasks.prompts import (
    ANSWER,
    ASKED,
    Chat,
    PreparedPrompt,
    Rendered,
    TokenisesImages,
    asked_messages,
    check_written,
    in_chat,
    open_thinking,
    prompt_ids,
    render_prompt,
    shared_length,
)
from tinyrl.text import first_line, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

REPLACEMENT = "\ufffd"  # which decoding writes for part of a character


# ---- the end of an answer ----


def answer_end(tokenizer: Tokenizer, *, chat: Chat, variables: dict[str, Any]) -> int:
    """Return the token that ends an answer: the one that ends a turn of the chat template if prompts go through it and
    it writes one, else EOS.
    """
    assert isinstance(tokenizer.eos_token_id, int)
    closing = turn_closing(tokenizer, variables) if in_chat(tokenizer, chat) else ""
    return token_ids(tokenizer, closing)[-1] if closing else tokenizer.eos_token_id


def turn_closing(tokenizer: Tokenizer, variables: dict[str, Any]) -> str:
    """Return the text with which the chat template closes an answer, through the special token that ends it:
    `<|im_end|>`, or ` </s>` with a space of the template. Return "" where no special token ends it, as in templates
    whose turns end with the next role's marker, and where the template refuses.
    """
    return _turn_closing(tokenizer, json.dumps(variables))


@lru_cache(maxsize=16)
def _turn_closing(tokenizer: Tokenizer, variables: str) -> str:
    after = ""
    with suppress(ValueError):
        after = after_answer(tokenizer, json.loads(variables))
    tokens = token_ids(tokenizer, after)
    last = _ending_special(tokenizer, tokens)
    if last is None:
        return ""
    before, end, _ = after.rpartition(str(tokenizer.decode([tokens[last]])))
    return before + end


def after_answer(tokenizer: Tokenizer, variables: dict[str, Any]) -> str:
    """Return the text that the chat template writes behind an answer. Raises ValueError if it refuses."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
    return template_text(tokenizer, messages, variables=variables).rpartition(ANSWER)[2]


def left_to_write(tokenizer: Tokenizer, behind: str, *, ended_at: int, closing: str) -> str:
    """Return what is left of `behind`, the template's text behind an answer, after a policy that ended it with the
    token `ended_at`.

    Where the template closes turns (`closing`), any token that ends a completion stands for all of that. Otherwise the
    text begins with the next role's marker, which the policy has written only if it is the token that it ended with.
    """
    if closing and behind.startswith(closing):
        return behind.removeprefix(closing)
    before, _, rest = behind.partition(str(tokenizer.decode([ended_at])))
    return behind if before.strip() else rest


def _ending_special(tokenizer: Tokenizer, turn: list[int]) -> int | None:
    """Return the place of a turn's last special token if only space follows that, else None."""
    special = special_ids(tokenizer)
    last = next((i for i in reversed(range(len(turn))) if turn[i] in special), None)
    if last is None or str(tokenizer.decode(turn[last + 1 :])).strip():
        return None
    return last


def _through_end(tokenizer: Tokenizer, turn: list[int], *, end: int) -> list[int]:
    """Return a turn through its last special token if only space follows that, and else through an appended `end`."""
    last = _ending_special(tokenizer, turn)
    return [*turn, end] if last is None else turn[: last + 1]


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
    the `ends`, the tokens that end a completion. A turn behind which the template writes nothing is learnt through EOS.
    """
    if not in_chat(tokenizer, chat):
        return None
    try:
        after = after_answer(tokenizer, variables)
    except ValueError as error:
        return first_line(error)
    if not after.strip() and tokenizer.eos_token_id in ends:
        return None
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


class NotContinuedError(ValueError):
    """The chat template does not continue its own prompt with an answer."""


def thinking_variables(tokenizer: Tokenizer, variables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variables with each switch of thinking that the chat template names (enable_thinking, thinking) and
    that they do not set, on and off. A name that is not a variable of the template changes nothing.
    """
    names = dict.fromkeys(re.findall(r"[A-Za-z_]*think(?:ing)?\b", str(tokenizer.chat_template)))
    switches = [name for name in names if name not in ("think", *variables)]
    return [{**variables, name: value} for name in switches for value in (True, False)]


def answer_tokens(
    tokenizer: Tokenizer, prompt: Rendered | PreparedPrompt, answer: str, *, chat: Chat, variables: dict[str, Any]
) -> list[int]:
    """Tokenise a text answer as the policy would have sampled it behind a prompt, through `answer_end`. A <think> that
    the prompt has opened is not repeated, nor a BOS that the prompt begins with. Under a chat template the answer is
    closed as the template closes a turn, and markers in it are read as text, except its end and those that a policy
    writes itself.
    """
    end = answer_end(tokenizer, chat=chat, variables=variables)
    bos = str(tokenizer.bos_token or "")
    if bos and prompt.tokens[:1] == [tokenizer.bos_token_id] and answer.lstrip().startswith(bos):
        answer = answer.lstrip().removeprefix(bos)
    begun = next((text for text in thought_openings(tokenizer) if answer.lstrip().startswith(text)), "")
    if prompt.opened and begun:
        thoughts = answer.lstrip().removeprefix(begun)
        opened = prompt.opened.removeprefix("<think>")
        answer = thoughts.removeprefix(opened) if thoughts.startswith(opened) else thoughts.lstrip()
    if in_chat(tokenizer, chat):
        closing = turn_closing(tokenizer, variables)
        for ending in (closing, str(tokenizer.decode([end]))):
            if ending and answer.rstrip().endswith(ending):
                answer = answer.rstrip().removesuffix(ending)
                break
        answer = disguised(tokenizer, answer, own=True) + closing
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
    images: TokenisesImages | None = None,
) -> tuple[list[int], list[int]]:
    """Return (prompt tokens, target tokens): the prompt of the turn, and the turn to learn.

    A text without a prompt follows a BOS (EOS if there is none), its own or ours, through EOS. A text behind a prompt
    is `answer_tokens`. An answer of one message of the assistant is what the chat template adds to its own rendering of
    the prompt with the generation prompt, through the token that ends the turn (EOS if the template writes none). Both
    renderings are of these messages alone, so a template that strips the thinking of earlier turns does so in both.
    images: of a model that reads them in prompts. Raises NotContinuedError, quoting the template, if the second does
    not begin with the first, and ValueError for a message of the prompt that the template leaves out.
    """
    eos = answer_end(tokenizer, chat=False, variables={})
    if isinstance(answer, str):
        if prompt is None:
            start = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else eos
            ends = answer.rstrip().endswith(str(tokenizer.eos_token))
            target = token_ids(tokenizer, answer.rstrip() if ends else answer)
            return [start], _ended(target[1:] if target[:1] == [start] else target, eos)
        how: Any = {"chat": chat, "variables": variables}
        rendered = render_prompt(tokenizer, prompt, system_prompt=system_prompt, tools=tools, images=images, **how)
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
    check_written(tokenizer, messages, asked, add_generation_prompt=True, **options)
    whole = template_text(tokenizer, [*messages, *answer], **options)
    if not whole.startswith(asked):
        at = shared_length(asked, whole)
        without, with_it = (text[max(0, at - 30) : at + 40] for text in (asked, whole))
        raise NotContinuedError(
            "the chat template does not continue its own prompt, so the turn to learn is not known: before the turn "
            f"it writes {without!r}, and with the turn {with_it!r}. Where a variable of the template decides "
            "(enable_thinking), set it with task.chat_template_kwargs={NAME: VALUE}"
        )
    target = tokens_behind(tokenizer, asked, whole[len(asked) :])
    if not target:
        raise ValueError(f"the chat template writes nothing for the assistant's turn: {whole[-60:]!r}")
    [prompt_tokens] = prompt_ids(tokenizer, [asked], [messages], images)
    return prompt_tokens, _through_end(tokenizer, target, end=eos)


# ---- observations: an environment's reply behind the policy's turn ----

REPLY = "environmentanswered"
NEXT_REPLY = "environmentwenton"  # contents that are rendered, as ASKED and ANSWER


@dataclass(frozen=True)
class Observation:
    """What the policy reads of a reply: its tokens, the contents of its messages, and whether any of them was cut."""

    tokens: list[int]
    texts: list[str]
    cut: bool


@dataclass(frozen=True)
class Surroundings:
    """The chat template's text around replies of a role: behind a turn, between two replies (None: the template has no
    place for a second one), and before the next turn.
    """

    role: str
    before: str
    between: str | None
    after: str


CHARS_A_TOKEN = 64  # of a reply that is tokenised: tokens are shorter


class ObservationTokens:
    """Tokenise replies, at most `max_tokens` of a reply's own, as the chat template would write them.

    Tokens are appended and never made again from text, so the trained tokens are the sampled ones. After a stop string,
    and without a chat template, a reply is raw text. After the end of a chat turn each result is a message of role
    `tool`: the template's text around it has markers, the content has none, so that a reply with "<|im_end|>" ends no
    turn. Of the template's text behind the turn it begins with what the policy has not written itself (left_to_write).

    chat: whether prompts go through the chat template, with `variables` and `tools`. role: of a message that replies;
    end: the token that ends a turn; opened: a <think> that the template opens for the next turn. Raises ValueError for
    a template that has no place for a reply.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, variables: dict[str, Any], max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.max_tokens = max_tokens
        self.end = answer_end(tokenizer, chat=chat, variables=variables)
        around = _surroundings(tokenizer, variables) if chat else Surroundings("tool", "", None, "")
        self._around = around
        self.role = around.role
        self.opened = open_thinking(tokenizer, around.after)
        self._closing = turn_closing(tokenizer, variables) if chat else ""
        # tokens of one observation
        self.most = max_tokens + len(token_ids(tokenizer, around.before)) + len(token_ids(tokenizer, around.after))

    def __call__(self, results: Sequence[str], *, ended_at: int | None) -> Observation:
        """Tokenise the results of a turn that ended with the EOS token `ended_at` (None: at a stop string). Where they
        cannot be messages of their own they are one, a result below the other.
        """
        as_messages = self.chat and ended_at is not None
        between = self._around.between if as_messages else None
        texts, cut = self.fitted(results, between=between)
        context = "\n"
        before = ""
        after = ""
        if as_messages:
            assert ended_at is not None
            context = str(self.tokenizer.decode([ended_at]))
            after = self._around.after
            before = left_to_write(self.tokenizer, self._around.before, ended_at=ended_at, closing=self._closing)
        contents = (between or "").join(disguised(self.tokenizer, text) for text in texts)
        tokens = tokens_behind(self.tokenizer, context, f"{before}{contents}{after}")
        if len(tokens) > (self.most if as_messages else self.max_tokens):
            tokens = [token for piece in (before, contents, after) for token in token_ids(self.tokenizer, piece)]
        return Observation(tokens, texts, cut)

    def fitted(self, results: Sequence[str], *, between: str | None = None) -> tuple[list[str], bool]:
        """Return the contents of a reply's messages in `max_tokens` together, with the text `between` two of them, and
        whether any was cut. Short ones stay whole, and long ones are cut to the same length. Without `between`, and
        where that alone takes all tokens, it is one message.
        """
        given = [*results]
        results = [self._bounded(text) for text in given]
        separators = (len(results) - 1) * len(token_ids(self.tokenizer, between or ""))
        room = self.max_tokens - separators
        if between is None or room < len(results):
            shown = self._shortened("\n".join(results), self.max_tokens)
            return [shown], shown != "\n".join(given)
        sizes = [len(token_ids(self.tokenizer, disguised(self.tokenizer, text))) for text in results]
        share = room
        for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
            share = room // count
            if size > share:
                break
            room -= size
        shown = [
            text if size <= share else self._shortened(text, share) for text, size in zip(results, sizes, strict=True)
        ]
        return shown, shown != given

    def _bounded(self, text: str) -> str:
        """Cut the middle out of a text that has more characters than `max_tokens` tokens of usual length: a megabyte is
        not tokenised, nor shown whole where it is one token.
        """
        half = CHARS_A_TOKEN * self.max_tokens // 2
        if len(text) <= 2 * half:
            return text
        return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"

    def _shortened(self, text: str, most: int) -> str:
        """Cut the middle out of a text of more than `most` tokens, between whole characters, and put a line there that
        says how many tokens were left out; where that line does not fit, return the beginning alone.
        """
        tokens = token_ids(self.tokenizer, disguised(self.tokenizer, text))
        if len(tokens) <= most:
            return text
        kept = most - len(token_ids(self.tokenizer, _left_out(len(tokens))))
        while kept > 1:
            head = self._whole_characters(tokens[: (kept + 1) // 2], text, at_end=False)
            tail = self._whole_characters(tokens[-(kept // 2) :], text, at_end=True)
            left_out = len(tokens) - len(head) - len(tail)
            shown = f"{self.tokenizer.decode(head)}{_left_out(left_out)}{self.tokenizer.decode(tail)}"
            excess = len(token_ids(self.tokenizer, disguised(self.tokenizer, shown))) - most
            if excess <= 0:
                return shown
            kept -= excess
        return str(self.tokenizer.decode(self._whole_characters(tokens[:most], text, at_end=False)))

    def _whole_characters(self, tokens: list[int], text: str, *, at_end: bool) -> list[int]:
        """Return tokens at the beginning (or at the end) of a text without those that are part of a character."""
        while tokens:
            piece = str(self.tokenizer.decode(tokens))
            whole = text.endswith(piece) if at_end else text.startswith(piece)
            broken = piece.startswith(REPLACEMENT) if at_end else piece.endswith(REPLACEMENT)
            if whole or not broken:
                break
            tokens = tokens[1:] if at_end else tokens[:-1]
        return tokens


def _left_out(count: int) -> str:
    return f"\n[{count} tokens left out]\n"


def _surroundings(tokenizer: Tokenizer, variables: dict[str, Any]) -> Surroundings:
    """Return what the chat template writes around replies, as messages of the role `tool`, else of the user.

    Some templates write every role that they do not know as the assistant, and so a tool's reply as another turn of
    the policy. Raises ValueError for a template that has no place for a reply.
    """
    problem = ""
    texts = dict[str, str]()
    for role in ("assistant", "user", "tool"):
        try:
            texts[role] = _behind_answer(tokenizer, variables, role, [REPLY])
        except ValueError as error:
            problem = f" ({error})"
    for role in ("tool", "user"):
        text = texts.get(role, "")
        before, reply, after = text.partition(REPLY)
        if reply and REPLY not in after and text != texts.get("assistant"):
            between = _between_replies(tokenizer, variables, before, after) if role == "tool" else None
            return Surroundings(role, before, between, after)
    raise ValueError(
        "the model's chat template has no place for what an environment answers: neither a message of role tool "
        f"nor another of the user's{problem}"
    )


def _between_replies(tokenizer: Tokenizer, variables: dict[str, Any], before: str, after: str) -> str | None:
    """Return the template's text between two messages of the role `tool`; None where it has no place for a second."""
    try:
        text = _behind_answer(tokenizer, variables, "tool", [REPLY, NEXT_REPLY])
    except ValueError:
        return None
    start = before + REPLY
    end = NEXT_REPLY + after
    is_surrounded = text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end)
    return text[len(start) : len(text) - len(end)] if is_surrounded else None


def _behind_answer(tokenizer: Tokenizer, variables: dict[str, Any], role: str, replies: list[str]) -> str:
    """Return what the template writes behind an answer that is followed by these replies of a role."""
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]
    messages += [{"role": role, "content": reply} for reply in replies]
    return template_text(tokenizer, messages, variables=variables, add_generation_prompt=True).partition(ANSWER)[2]
