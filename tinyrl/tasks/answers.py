"""Answers as tokens: the turn to learn behind its prompt, and the token that ends it.

Prompts are rendered as they are for sampling (prompts.py), and one token ends an answer wherever it is learnt, sampled
or judged (`answer_end`). Torch is never imported.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tinyrl.data.formats import Side
from tinyrl.data.messages import Prompt, roles_of
from tinyrl.models.templates import template_text
from tinyrl.models.tokens import disguised, markers_of, token_ids, tokens_behind
from tinyrl.tasks.prompts import (
    ANSWER,
    PreparedPrompt,
    Rendered,
    asked_messages,
    in_chat,
    render_prompt,
    rendered_turn,
    shared_length,
)
from tinyrl.text import first_line, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---- the end of an answer ----


def answer_end(tokenizer: PreTrainedTokenizerBase, *, chat: Literal["auto"] | bool, variables: dict[str, Any]) -> int:
    """Return the token that ends an answer: the one that ends a turn of the chat template if prompts go through it and
    it writes one, else EOS.
    """
    if in_chat(tokenizer, chat):
        return _turn_end(tokenizer, json.dumps(tokenizer.chat_template), json.dumps(variables), len(tokenizer))
    return _eos(tokenizer)


@lru_cache(maxsize=16)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str, variables: str, size: int) -> int:
    """Return the token that ends a turn of this chat template under a tokenizer of this size."""
    try:
        tokens = token_ids(tokenizer, _after_answer(tokenizer, json.loads(variables)))
    except ValueError:
        return _eos(tokenizer)
    at = _end_of_turn(tokenizer, tokens)
    return _eos(tokenizer) if at is None else tokens[at]


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id


def ended(tokens: list[int], end: int) -> list[int]:
    """Append `end` to an answer's tokens unless they end with it."""
    return tokens if tokens[-1:] == [end] else [*tokens, end]


def as_ended(tokenizer: PreTrainedTokenizerBase, sampled: list[int], *, end: int) -> list[int]:
    """Return a completion as a finished answer: `end` replaces another special token that ended it, and is appended to
    one that was cut off or ended with a stop string.
    """
    special = bool(sampled) and sampled[-1] in _special_ids(tokenizer, len(tokenizer))
    return ended(sampled[:-1] if special else sampled, end)


def template_fault(
    tokenizer: PreTrainedTokenizerBase, ends: set[int], *, chat: Literal["auto"] | bool, variables: dict[str, Any]
) -> str | None:
    """Return what is wrong with the chat template, where prompts go through it: it refuses, a prompt begins with BOS
    twice, or a turn ends with none of the `ends`, the tokens that end a completion.
    """
    if not in_chat(tokenizer, chat):
        return None
    try:
        prompt = render_prompt(tokenizer, "Hi", variables=variables).tokens
        after = _after_answer(tokenizer, variables)
    except ValueError as error:
        return first_line(error)
    bos = tokenizer.bos_token_id
    if isinstance(bos, int) and bos != tokenizer.eos_token_id and prompt[:2] == [bos, bos]:
        return f"a prompt begins with {tokenizer.bos_token} twice"
    if not ends & {*token_ids(tokenizer, after)}:
        return f"a turn ends with {shortened(after)!r}, and no token of that ends a completion"
    return None


def _after_answer(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> str:
    """Return the text that the chat template writes behind an answer. Raises ValueError if it refuses."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}]
    return template_text(tokenizer, messages, variables=variables).rpartition(ANSWER)[2]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> int | None:
    """Return the place of a turn's last special token; None if more than space follows it."""
    special = _special_ids(tokenizer, len(tokenizer))
    last = next((i for i in reversed(range(len(tokens))) if tokens[i] in special), None)
    return last if last is not None and not str(tokenizer.decode(tokens[last + 1 :])).strip() else None


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    """Return the special tokens, all added ones too; not the one for unknown words, unless that is EOS."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = {*tokenizer.all_special_ids, *added}
    return frozenset(i for i in found if i != tokenizer.unk_token_id or i == tokenizer.eos_token_id)


# ---- answers to learn from ----


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Rendered | PreparedPrompt,
    answer: str,
    *,
    chat: Literal["auto"] | bool,
    variables: dict[str, Any],
) -> list[int]:
    """Tokenise a text answer as the policy would have sampled it behind a prompt, through `answer_end`. What it repeats
    of the prompt is dropped (a BOS, the opening of the turn, an open <think>). Under a chat template its markers are
    read as text, except those that a policy writes itself.
    """
    end, before = answer_end(tokenizer, chat=chat, variables=variables), prompt.text.removesuffix(prompt.opened)
    bos, markers, templated = str(tokenizer.bos_token or ""), markers_of(tokenizer), in_chat(tokenizer, chat)
    if bos not in before[1:]:
        answer = answer.removeprefix(bos)
    if templated:
        opening = before[max((found.start() for found in markers.own.finditer(before)), default=0) :]
        for repeated in (before, opening):
            if repeated.strip() and answer.startswith(repeated.strip()):
                answer = answer.removeprefix(repeated.strip()).removeprefix(repeated[len(repeated.rstrip()) :])
        finished = answer.rstrip()
        if finished.endswith(markers.texts.get(end, "\0")):
            answer = finished.removesuffix(markers.texts[end])
    if prompt.opened and answer.lstrip().startswith("<think>"):
        thoughts, opened = answer.lstrip().removeprefix("<think>"), prompt.opened.removeprefix("<think>")
        answer = thoughts.removeprefix(opened) if thoughts.startswith(opened) else thoughts.lstrip()
    if templated:
        answer = disguised(tokenizer, answer, own=True)
    return ended(tokens_behind(tokenizer, prompt.text, answer), end)


def render_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt | None,
    answer: Side,
    *,
    chat: Literal["auto"] | bool,
    system_prompt: str | None,
    variables: dict[str, Any],
    tools: list[Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Return (prompt tokens, target tokens): the prompt of the turn, and the turn to learn.

    A text without a prompt follows a BOS (EOS if there is none), its own or ours, through EOS. A text behind a prompt
    is `answer_tokens`; if the prompt is rendered already, the text is its continuation. An answer of one message of the
    assistant is what the chat template adds to its own rendering of the prompt with the generation prompt, through the
    token that ends the turn (EOS if the template writes none). Both renderings are of these messages alone, so a
    template that strips the thinking of earlier turns does so in both. Raises ValueError, quoting the template, if the
    second does not begin with the first.
    """
    end, how = _eos(tokenizer), {"chat": chat, "variables": variables}
    if prompt is None and isinstance(answer, str):
        start = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else end
        target = token_ids(tokenizer, answer)
        target = target[1:] if target[:1] == [start] else target
        last = _end_of_turn(tokenizer, target)
        return [start], ended(target if last is None or target[last] != end else target[: last + 1], end)
    if isinstance(answer, str):
        turn = None
        if isinstance(prompt, str) and in_chat(tokenizer, chat):
            turn = rendered_turn(tokenizer, prompt, variables, more=answer)
        asked = f"{prompt}{answer}"[: turn[0]] if turn else prompt
        rendered = render_prompt(tokenizer, asked or "", system_prompt=system_prompt, **how)
        if turn is None:
            return rendered.tokens, answer_tokens(tokenizer, rendered, answer, **how)
        target = _target(tokenizer, rendered.text, f"{prompt}{answer}", end=answer_end(tokenizer, **how))
        return rendered.tokens, target
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
        start = max(0, at - 30)
        raise ValueError(
            "the chat template does not continue its own prompt, so the turn to learn is not known: before the turn "
            f"it writes {asked[start : at + 40]!r}, and with the turn {whole[start : at + 40]!r}. Where a variable of "
            "the template decides (enable_thinking), set it with task.chat_template={NAME: VALUE}"
        )
    return token_ids(tokenizer, asked), _target(tokenizer, asked, whole, end=end)


def _target(tokenizer: PreTrainedTokenizerBase, asked: str, whole: str, *, end: int) -> list[int]:
    """Return the tokens of `whole` behind `asked`, through the last special token if only space follows it, and else
    through an appended `end`.
    """
    prompt, both = token_ids(tokenizer, asked), token_ids(tokenizer, whole)
    together = both[: len(prompt)] == prompt  # else a token lies across the border
    target = both[len(prompt) :] if together else tokens_behind(tokenizer, asked, whole[len(asked) :])
    if not target:
        raise ValueError(f"the chat template writes nothing for the assistant's turn: {whole[-60:]!r}")
    last = _end_of_turn(tokenizer, target)
    return [*target, end] if last is None else target[: last + 1]
