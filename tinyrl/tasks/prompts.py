"""Prompt preparation, once before training: rendering through the chat template, tokenisation, length checks.

Torch is never imported: the caller hands the tokenizer over.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tinyrl.data.messages import Message, Prompt, as_messages, prompt_of
from tinyrl.data.readers import Row
from tinyrl.models.tokens import added_around, disguised, markers_of, template_text, token_ids, undisguised
from tinyrl.runs.signals import watched
from tinyrl.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Chat = Literal["auto"] | bool  # task.chat
ASKED, ANSWER = "usersaid", "policysaid"  # contents that are rendered to see what the template writes around them


@dataclass(frozen=True)
class Rendered:
    text: str
    tokens: list[int]
    opened: str  # "<think>..." that the prompt opened at its end and did not close; "" otherwise


@dataclass(frozen=True)
class PreparedPrompt:
    """A row and its prompt: as the data has it, as text, as tokens (the last two with an environment's opening at the
    end). `opened`: a <think> that the template opened.
    """

    index: int  # of the row in its split
    row: Row
    prompt: Prompt
    text: str
    tokens: list[int]
    opened: str


def prepare_prompts(
    task: Task,
    rows: list[Row],
    *,
    tokenizer: Tokenizer,
    chat: Chat,
    system_prompt: str | None,
    variables: dict[str, Any],
    max_prompt_tokens: int,
    on_overlong_prompt: Literal["error", "drop"],
    openings: list[str | None] | None = None,
) -> list[PreparedPrompt]:
    """Render every row, with the environment's opening (if any) at the end of its text or last message. Prompts over
    `max_prompt_tokens` are refused, naming the first, or dropped if asked for.
    """
    prepared: list[PreparedPrompt] = []
    long: list[PreparedPrompt] = []
    for index, row in enumerate(watched(rows)):
        own = prompt = prompt_of(task.prompt(row))
        if openings and (opening := openings[index]) is not None:
            last = own if isinstance(own, str) else own[-1]["content"]
            prompt = last + opening if isinstance(own, str) else [*own[:-1], {**own[-1], "content": last + opening}]
        done = render_prompt(tokenizer, prompt, chat=chat, system_prompt=system_prompt, variables=variables)
        one = PreparedPrompt(index, row, own, done.text, done.tokens, done.opened)
        (long if len(one.tokens) > max_prompt_tokens else prepared).append(one)
    if long and (on_overlong_prompt == "error" or not prepared):
        first, longest = long[0], max(len(one.tokens) for one in long)
        raise ValueError(
            f"{len(long)} of {len(rows)} prompts have more than "
            f"generation.max_prompt_tokens={max_prompt_tokens} tokens "
            f"(first: row {first.index + 1} with {len(first.tokens)}; longest {longest}): {first.text[:60]!r}...\n"
            f"Set generation.max_prompt_tokens={longest}, or leave them out with task.on_overlong_prompt=drop."
        )
    return prepared


def columns_of(prompts: list[PreparedPrompt]) -> dict[str, list[Any]]:
    return row_columns([prompt.row for prompt in prompts])


def row_columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Return the columns of rows as lists (TRL's reward signature); the prompt is an argument of its own."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "prompts", "completions"))
    return {name: [row.get(name) for row in rows] for name in names}


def render_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    chat: Chat = "auto",
    system_prompt: str | None = None,
    variables: dict[str, Any] | None = None,
) -> Rendered:
    """Render and tokenise a prompt, ready for the model to continue.

    With the tokenizer's chat template (`chat` True, or "auto" if it has one) text becomes one user message, the system
    prompt replaces a system message of the data, and messages that end with the assistant are continued; `variables`
    go to the template (enable_thinking). A text that it has rendered already is not rendered once more.
    Without it the text stays as it is, after the system prompt and an empty line; a BOS that the tokenizer adds stays,
    an EOS it appends does not, since nothing follows an EOS. Raises ValueError if that cannot be done.
    """
    prompt, variables = prompt_of(prompt), variables or {}
    has_template = bool(tokenizer.chat_template)
    if chat is True and not has_template:
        raise ValueError("task.chat=true, but this model's tokenizer has no chat template; use task.chat=auto or false")
    if variables and not has_template:
        raise ValueError(f"task.chat_template_kwargs={variables}, but this model's tokenizer has no chat template")
    if not in_chat(tokenizer, chat):
        if not isinstance(prompt, str):
            why = "task.chat=false" if has_template else "this model's tokenizer has no chat template"
            raise ValueError(f"the prompt is a list of chat messages, but {why}; give prompts as text")
        text = f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
        tokens, opened = token_ids(tokenizer, text), re.search(r"<think>\s*\Z", text[-200:])
        if not tokens:
            raise ValueError(f"the prompt {text[:60]!r} has no tokens")
        bos = [] if tokens[0] == tokenizer.bos_token_id else added_around(tokenizer)[0]
        return Rendered(text, bos + tokens, opened.group() if opened else "")
    if isinstance(prompt, str) and (turn := rendered_turn(tokenizer, prompt, variables)) is not None:
        if system_prompt is not None:
            raise ValueError(f"task.system_prompt has no place in a prompt that is rendered already: {prompt[:60]!r}")
        start, bos = turn
        return Rendered(prompt, bos + token_ids(tokenizer, prompt), open_thinking(prompt[start:]))
    messages = asked_messages(prompt, system_prompt)
    goes_on = messages[-1]["role"] == "assistant"
    before = messages[:-1] if goes_on else messages
    last = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    text = template_text(tokenizer, messages, variables=variables, **last)
    asked = template_text(tokenizer, before, variables=variables) if before else ""
    opened = open_thinking(text[shared_length(text, asked) :])  # a <think> of the template's own
    return Rendered(undisguised(tokenizer, text), token_ids(tokenizer, text), undisguised(tokenizer, opened))


def rendered_turn(
    tokenizer: Tokenizer, text: str, variables: dict[str, Any], *, more: str = ""
) -> tuple[int, list[int]] | None:
    """Find the assistant's turn at the end of a text that the chat template has rendered already: the text begins as
    the template does, and no marker follows the last opening of a turn, which may reach into `more`, the text behind.
    Return the position of the turn, and the template's BOS if the text lacks it; None for other texts.
    """
    start, opening = _template_begins(tokenizer, str(tokenizer.chat_template), json.dumps(variables), len(tokenizer))
    words, markers, bos = opening.strip(), markers_of(tokenizer), str(tokenizer.bos_token or "")
    starts, begins = ((each.lstrip(), each.lstrip().removeprefix(bos).lstrip()) for each in (start, text))
    heads = tuple((markers.everywhere.match(s) or [s.partition("user")[0] or s])[0] for s in starts if s)  # of any role
    at = (text + more).rfind(words, 0, len(text) + len(words) - 1 if more else None)
    end = at + len(words)
    begun = any(each.startswith(heads) for each in begins)
    if not words or at < 0 or not begun or markers.own.search(text, end):
        return None
    space = opening[len(opening.rstrip()) :]
    missing = bool(bos) and start.startswith(bos) and not begins[0].startswith(bos)
    return end + len(space) * (text + more).startswith(space, end), [tokenizer.bos_token_id] * missing  # pyright: ignore


@lru_cache(maxsize=16)
def _template_begins(tokenizer: Tokenizer, template: str, variables: str, size: int) -> tuple[str, str]:
    """Return the text before a user's first message, and the one between it and the assistant's turn; "" if refused."""
    user, answer = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}
    how = {"variables": json.loads(variables)}
    try:
        start, _, behind = template_text(tokenizer, [user], add_generation_prompt=True, **how).partition(ASKED)
        answered = template_text(tokenizer, [user, answer], **how).partition(ASKED)[2].partition(ANSWER)[0]
    except ValueError:
        return "", ""
    return start, behind[: shared_length(behind, answered)].partition("<think>")[0]


def marker_notes(tokenizer: Tokenizer, rows: list[Row], *, chat: Chat) -> list[str]:
    """Return a line on how many rows contain markers in what the chat template renders."""
    if not in_chat(tokenizer, chat):
        return []

    def marked(row: Row) -> bool:
        asked = [row.get(name) for name in ("prompt", "messages", "conversations", "tools")]
        answers = [row.get(name) for name in ("completion", "chosen", "rejected")]
        return disguised(tokenizer, asked) != asked or disguised(tokenizer, answers, own=True) != answers

    found = [number for number, row in enumerate(rows, start=1) if marked(row)]
    what = "contain a marker of the model, which is read as plain text (texts that are rendered already: as it is)"
    return [f"{len(found):,} of {len(rows):,} rows (first: row {found[0]}) {what}"] if found else []


def open_thinking(text: str) -> str:
    """Return the end of a text from an unclosed <think> on; "" if there is none."""
    start = text.rfind("<think>")
    return text[start:] if start >= 0 and "</think>" not in text[start:] else ""


def in_chat(tokenizer: Tokenizer, chat: Chat) -> bool:
    """Return whether prompts go through the tokenizer's chat template, by task.chat."""
    return chat is not False and bool(tokenizer.chat_template)


def asked_messages(prompt: Prompt, system_prompt: str | None) -> list[Message]:
    """Return the messages of a prompt as a new list, with a system prompt in place of the data's."""
    messages = as_messages(prompt)
    if system_prompt is None:
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


def shared_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
