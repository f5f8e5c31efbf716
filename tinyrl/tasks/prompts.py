"""Prompt preparation, once before training: rendering through the chat template, tokenisation, length checks.

Torch is never imported: the caller hands the tokenizer over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinyrl.data.formats import ANSWERED_COLUMNS, ASKED_COLUMNS, beginning
from tinyrl.data.messages import Message, Prompt, as_messages, asked_of, prompt_of
from tinyrl.data.readers import Row
from tinyrl.data.turns import MARKS, NOT_CONTENT
from tinyrl.models.tokens import added_around, disguised, template_text, token_ids, undisguised
from tinyrl.runs.signals import watched
from tinyrl.tasks import Task
from tinyrl.text import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Chat = Literal["auto"] | bool  # task.chat
READ_HERE = {"role", "content", "tool_call_id", "id", *MARKS}  # keys of messages that are read without a template
ASKED = "usersaid"
ANSWER = "policysaid"  # contents that are rendered to see what the template writes around them


@dataclass(frozen=True)
class Rendered:
    text: str
    tokens: list[int]
    opened: (
        str  # the beginning of the answer at its end: "<think>..." that is not closed, the assistant's message; or ""
    )


@dataclass(frozen=True)
class PreparedPrompt:
    """A row and its prompt: as the data has it, and rendered (with an environment's opening at the end). Whoever reads
    a completion as text reads `opened` and the sampled tokens' text behind it; the tokens are those sampled.
    """

    index: int  # of the row in its split
    row: Row
    prompt: Prompt
    text: str
    tokens: list[int]
    opened: str

    @property
    def question(self) -> Prompt:
        """Return the prompt as rewards and environments get it (`asked_of`)."""
        return asked_of(self.prompt)

    def rest_of(self, answer: str) -> str:
        """Return what is left to write of a whole answer, such as a gold one, behind the beginning that is there."""
        return answer.removeprefix(self.opened)


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
    """Render every row, with the environment's opening (if any) at the end of its text or of the last message that is
    asked. Prompts over `max_prompt_tokens` are refused, naming the first, or dropped if asked for. Raises ValueError,
    quoting the row, for one that cannot be rendered.
    """
    prepared: list[PreparedPrompt] = []
    long: list[PreparedPrompt] = []
    for index, row in enumerate(watched(rows)):
        own = prompt = prompt_of(task.prompt(row))
        if openings and (opening := openings[index]) is not None:
            prompt = _with_opening(own, opening)
        try:
            done = render_prompt(tokenizer, prompt, chat=chat, system_prompt=system_prompt, variables=variables)
        except ValueError as error:
            raise ValueError(f"{error}\n  in row {index + 1}: {beginning(row)}") from error
        one = PreparedPrompt(index, row, own, done.text, done.tokens, done.opened)
        (long if len(one.tokens) > max_prompt_tokens else prepared).append(one)
    if long and (on_overlong_prompt == "error" or not prepared):
        first = long[0]
        longest = max(len(one.tokens) for one in long)
        raise ValueError(
            f"{len(long)} of {len(rows)} prompts have more than "
            f"generation.max_prompt_tokens={max_prompt_tokens} tokens "
            f"(first: row {first.index + 1} with {len(first.tokens)}; longest {longest}): {first.text[:60]!r}...\n"
            f"Set generation.max_prompt_tokens={longest}, or leave them out with task.on_overlong_prompt=drop."
        )
    return prepared


def _with_opening(prompt: Prompt, opening: str) -> Prompt:
    """Return a prompt with a text at the end of what is asked, before the beginning of an answer."""
    if isinstance(prompt, str):
        return prompt + opening
    at = len(asked_of(prompt)) - 1
    asked = {**prompt[at], "content": prompt[at]["content"] + opening}
    return [*prompt[:at], asked, *prompt[at + 1 :]]


def most_tokens(prompts: list[PreparedPrompt]) -> int:
    return max((len(prompt.tokens) for prompt in prompts), default=0)


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
    tools: list[Any] | None = None,
) -> Rendered:
    """Render and tokenise a prompt, ready for the model to continue.

    With the tokenizer's chat template (`chat` True, or "auto" if it has one) text becomes one user message, the system
    prompt replaces a system message of the data, and messages that end with the assistant are continued; `variables`
    go to the template (enable_thinking), and `tools` of a row. Without it the text stays as it is, after the system
    prompt and an empty line; a BOS that the tokenizer adds stays, an EOS it appends does not, since nothing follows an
    EOS. Raises ValueError if that cannot be done, or the template leaves a message out.
    """
    prompt = prompt_of(prompt)
    variables = variables or {}
    if variables and not tokenizer.chat_template:
        raise ValueError(f"task.chat_template_kwargs={variables}, but this model's tokenizer has no chat template")
    if not in_chat(tokenizer, chat):
        if not isinstance(prompt, str):
            why = "task.chat=false" if tokenizer.chat_template else "this model's tokenizer has no chat template"
            raise ValueError(f"the prompt is a list of chat messages, but {why}; give prompts as text")
        text = f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
        tokens = token_ids(tokenizer, text)
        opened = re.search(r"<think>\s*\Z", text[-200:])
        bos = [] if tokens[:1] == [tokenizer.bos_token_id] else added_around(tokenizer)[0]
        return Rendered(text, bos + tokens, opened.group() if opened else "")
    messages = asked_messages(prompt, system_prompt)
    goes_on = messages[-1]["role"] == "assistant"
    before = messages[:-1] if goes_on else messages
    last: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    if tools:
        last["tools"] = tools
    text = template_text(tokenizer, messages, variables=variables, **last)
    check_written(tokenizer, messages, text, variables=variables, **last)
    asked = template_text(tokenizer, before, variables=variables) if before else ""
    opened = open_thinking(text[shared_length(text, asked) :])  # a <think> of the template's own
    if goes_on:
        opened = max(opened, _begun(tokenizer, text, messages[-1]["content"]), key=len)
    return Rendered(undisguised(tokenizer, text), token_ids(tokenizer, text), undisguised(tokenizer, opened))


def _begun(tokenizer: Tokenizer, text: str, content: str) -> str:
    """Return the content of a prompt's last message as the template wrote it at the end of `text`, which may be without
    the spaces around it.
    """
    written = disguised(tokenizer, content, own=True)
    start = text.rfind(written.rstrip())
    return text[start if start >= 0 else text.rfind(written.strip()) :]


def check_written(
    tokenizer: Tokenizer, messages: list[Message], text: str, *, variables: dict[str, Any], **options: Any
) -> None:
    """Raise ValueError for a message that the chat template leaves out of `text`, its rendering of `messages`: of a
    role that it does not know, or a system message that it has no place for.

    A content may be rewritten, so one that is not in the text as it is counts as written if a word behind it is. Turns
    of the assistant and results of tools are not looked for: templates drop thoughts, and write results as JSON.
    """
    shown = undisguised(tokenizer, text)
    for place, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] in ("assistant", "tool") or content in shown:
            continue
        longer = [*messages[:place], {**message, "content": f"{content} {ASKED}"}, *messages[place + 1 :]]
        if ASKED not in template_text(tokenizer, longer, variables=variables, **options):
            raise ValueError(
                f"the model's chat template leaves out the message of the role '{truncate(message['role'])}': "
                f"{truncate(content, 60)!r}. Templates know the roles system, user, assistant and tool; of a system "
                "message (task.system_prompt) that a template has no place for, write the text into the user's message"
            )


def marker_notes(tokenizer: Tokenizer, rows: list[Row], *, chat: Chat) -> list[str]:
    """Return a line on how many rows contain markers in what the chat template renders."""
    if not in_chat(tokenizer, chat):
        return []

    def marked(row: Row) -> bool:
        asked = [row.get(name) for name in ASKED_COLUMNS]
        answers = [row.get(name) for name in ANSWERED_COLUMNS]
        return disguised(tokenizer, asked) != asked or disguised(tokenizer, answers, own=True) != answers

    found = [number for number, row in enumerate(rows, start=1) if marked(row)]
    what = "contain a marker of the model, which is read as plain text; if it is rendered already, set task.chat=false"
    return [f"{len(found):,} of {len(rows):,} rows (first: row {found[0]}) {what}"] if found else []


def unread_key_notes(
    tokenizer: Tokenizer, conversations: Iterable[list[Message]], *, chat: Chat, variables: dict[str, Any]
) -> list[str]:
    """Return a line for each key of messages without which the chat template writes the same. It is tried on the first
    message of each shape: a role, and the keys that hold something.
    """
    if not in_chat(tokenizer, chat):
        return []
    unread = dict[tuple[str, tuple[str, ...]], list[str]]()
    counts = Counter[tuple[str, str]]()
    for messages in conversations:
        for place, message in enumerate(messages):
            names = tuple(sorted(name for name, value in message.items() if value not in ("", [], {})))
            shape = (message["role"], names)
            if shape not in unread:
                unread[shape] = _unread_keys(tokenizer, messages[: place + 1], names, variables=variables)
            counts.update((message["role"], name) for name in unread[shape])
    notes = list[str]()
    for (role, name), count in counts.items():
        what = f"`{truncate(name)}` of {count:,} messages of the role {truncate(role)} is not shown to the model"
        kind = "warning: " if name in NOT_CONTENT else ""
        notes.append(f"{kind}{what}: its chat template writes the same without it")
    return notes


def _unread_keys(
    tokenizer: Tokenizer, messages: list[Message], names: Iterable[str], *, variables: dict[str, Any]
) -> list[str]:
    """Return which keys of the last message change nothing in the rendering, of those that the template alone reads."""
    tried = [name for name in names if name not in READ_HERE]
    *before, last = messages
    unread = list[str]()
    with suppress(ValueError):  # a template that does not write such a message refuses the row itself
        whole = template_text(tokenizer, messages, variables=variables) if tried else ""
        for name in tried:
            without = {key: value for key, value in last.items() if key != name}
            if template_text(tokenizer, [*before, without], variables=variables) == whole:
                unread.append(name)
    return unread


def open_thinking(text: str) -> str:
    """Return the end of a text from an unclosed <think> on; "" if there is none."""
    start = text.rfind("<think>")
    return text[start:] if start >= 0 and "</think>" not in text[start:] else ""


def in_chat(tokenizer: Tokenizer, chat: Chat) -> bool:
    """Return whether prompts go through the tokenizer's chat template, by task.chat. Raises ValueError without one."""
    if chat is True and not tokenizer.chat_template:
        raise ValueError("task.chat=true, but this model's tokenizer has no chat template; use task.chat=auto or false")
    return chat is not False and bool(tokenizer.chat_template)


def shows_tools(tokenizer: Tokenizer, chat: Chat) -> bool:
    """Return whether prompts go through a chat template that writes tools."""
    return in_chat(tokenizer, chat) and "tools" in str(tokenizer.chat_template)


def asked_messages(prompt: Prompt, system_prompt: str | None) -> list[Message]:
    """Return the messages of a prompt as a new list, with a system prompt in place of the data's."""
    messages = as_messages(prompt)
    if system_prompt is None:
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


def shared_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
