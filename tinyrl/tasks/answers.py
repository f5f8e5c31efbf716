"""Answers to learn from: what the model reads before its turn, and the turn, as tokens.

Prompts are rendered as they are for sampling (prompts.py). Torch is never imported.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tinyrl.data.messages import Prompt
from tinyrl.data.shapes import Side
from tinyrl.models.templates import template_text
from tinyrl.tasks.prompts import asked_messages, render_prompt, token_ids
from tinyrl.text import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """(prompt tokens, target tokens): what the model reads before its turn, and the turn that is learnt.

    An answer in text is tokenised as it stands behind the rendered prompt (None: behind a BOS, or EOS where there is no
    BOS), and EOS ends it. An answer of one message of the assistant is what the chat template adds to its own rendering
    of the prompt with the generation prompt, as far as the token that ends the turn; EOS where the template writes
    none. The two renderings are of these messages alone, so a template that strips the thinking of earlier turns does
    so in both. Raises ValueError, quoting the template, where the prompt's rendering is no beginning of the other.
    """
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    if isinstance(answer, str):
        target = [*token_ids(tokenizer, answer), end]
        if prompt is None:
            return [tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else end], target
        rendered = render_prompt(tokenizer, prompt, chat=chat, system_prompt=system_prompt, variables=variables)
        return rendered.tokens, target
    if chat is False or not tokenizer.chat_template:
        why = "task.chat=false" if tokenizer.chat_template else "this model's tokenizer has no chat template"
        raise ValueError(f"the rows are chat messages, but {why}; give prompts and answers as text")
    assert prompt, "a message answers another"
    if [message["role"] for message in answer] != ["assistant"]:
        said = listed(message["role"] for message in answer)
        raise ValueError(f"an answer is one message of the assistant, not {len(answer)} ({said})")
    options: dict[str, Any] = {"variables": variables, **({"tools": tools} if tools else {})}
    messages = asked_messages(prompt, system_prompt)
    asked = template_text(tokenizer, messages, add_generation_prompt=True, **options)
    whole = template_text(tokenizer, [*messages, *answer], **options)
    if not whole.startswith(asked):
        raise _no_beginning(asked, whole)
    return _split_tokens(tokenizer, asked, whole, end=end)


def _no_beginning(asked: str, whole: str) -> ValueError:
    """A sentence with the place where the template's two renderings part."""
    both = zip(asked, whole, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(asked), len(whole)))
    start = max(0, at - 30)
    return ValueError(
        "the chat template does not continue its own prompt, so it cannot be told what the turn is: before the turn "
        f"it writes {asked[start : at + 40]!r}, and with the turn {whole[start : at + 40]!r}. Where a variable of the "
        "template decides (enable_thinking), set it with task.chat_template={NAME: VALUE}"
    )


def _split_tokens(
    tokenizer: PreTrainedTokenizerBase, asked: str, whole: str, *, end: int
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt as it is sampled from, and of what follows it, through the last special token where only
    space comes after that, and else through an `end` put behind it.
    """
    prompt, both = token_ids(tokenizer, asked), token_ids(tokenizer, whole)
    together = both[: len(prompt)] == prompt  # else a token lies across the border
    target = both[len(prompt) :] if together else token_ids(tokenizer, whole[len(asked) :])
    if not target:
        raise ValueError(f"the chat template writes nothing for the assistant's turn: {whole[-60:]!r}")
    special = _special_ids(tokenizer, len(tokenizer))
    last = next((i for i in reversed(range(len(target))) if target[i] in special), None)
    if last is not None and not str(tokenizer.decode(target[last + 1 :])).strip():
        return prompt, target[: last + 1]
    return prompt, [*target, end]


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    """The special tokens of a tokenizer of this size, also those that are neither its EOS nor its BOS."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *added))
