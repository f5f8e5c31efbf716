"""Prompt preparation, once before training: rendering through the chat template, tokenisation, length checks.

Torch is never imported: the caller hands the tokenizer over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinyrl.data.formats import ANSWERED_COLUMNS, ASKED_COLUMNS, beginning
from tinyrl.data.image_rows import images_of
from tinyrl.data.images import IMAGE_MARK, shown_text
from tinyrl.data.messages import Message, Prompt, as_messages, asked_of, prompt_of
from tinyrl.data.readers import Row
from tinyrl.data.turns import MARKS, NOT_CONTENT
from tinyrl.models.tokens import (
    THOUGHTS,
    added_around,
    disguised,
    on_all_cores,
    template_text,
    template_texts,
    thought_markers,
    token_ids_of,
    undisguised,
)
from tinyrl.process.collector import without_collection
from tinyrl.process.counting import counted
from tinyrl.tasks import Task
from tinyrl.text import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from tinyrl.data.images import Image

Chat = Literal["auto"] | bool  # task.chat
BATCH = 1024  # prompts that are rendered and tokenised in one call
SHOWN = 200  # characters of a long prompt that are kept
LEAST_CHARACTERS = 100_000  # of a text that is not tokenised: some tokenizers drop or merge characters
READ_HERE = {"role", "content", "images", "tool_call_id", "id", *MARKS}  # keys of messages that no template reads
ASKED = "usersaid"
ANSWER = "policysaid"  # contents that are rendered to see what the template writes around them


class TokenisesImages(Protocol):
    """Tokenises prompts that the chat template has rendered, each with its images (models/image_inputs.py)."""

    def tokenised(self, texts: Sequence[str], images: Sequence[Sequence[Image]]) -> list[list[int]]: ...


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


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens of a prompt, what gives that limit, and what to set for a prompt of so many."""

    tokens: int
    words: str
    advice: Callable[[int], str]


NO_LIMIT = PromptLimit(tokens=1 << 30, words="", advice=lambda tokens: "")


@dataclass(frozen=True)
class LongPrompt:
    """A prompt over the limit. tokens: None where it has too many characters to be tokenised."""

    index: int
    text: str
    tokens: int | None


def prepare_prompts(
    task: Task,
    rows: list[Row],
    *,
    tokenizer: Tokenizer,
    chat: Chat,
    system_prompt: str | None,
    variables: dict[str, Any],
    on_overlong_prompt: Literal["error", "drop"],
    limit: PromptLimit,
    openings: list[str | None] | None = None,
    images: TokenisesImages | None = None,
) -> list[PreparedPrompt]:
    """Render every row, with the environment's opening (if any) at the end of its text or of the last message that is
    asked. Prompts over the limit are refused, naming the first, or dropped if asked for. images: of a model that reads
    them. Raises ValueError, quoting the row, for one that cannot be rendered.
    """
    prepared: list[PreparedPrompt] = []
    long: list[LongPrompt] = []
    most = most_characters(tokenizer, limit.tokens)
    how: Any = {"chat": chat, "system_prompt": system_prompt, "variables": variables, "images": images}
    parts = range(0, len(rows), BATCH)
    with on_all_cores(), without_collection():
        for start in counted(parts, what="prompts rendered and tokenised", each=BATCH, total=len(rows)):
            own = list[Prompt]()
            shown = list[Prompt]()
            places = list[int]()
            for index in range(start, min(start + BATCH, len(rows))):
                prompt = prompt_of(task.prompt(rows[index]))
                opened = prompt if openings is None else with_opening(prompt, openings[index])
                if characters_of(opened) > most:
                    text = shown_text(as_messages(opened)[0])[:SHOWN]
                    long.append(LongPrompt(index, text, None))
                    continue
                own.append(prompt)
                shown.append(opened)
                places.append(index)
            rendered = _render_rows(tokenizer, shown, places, rows, how)
            for index, prompt, done in zip(places, own, rendered, strict=True):
                if len(done.tokens) > limit.tokens:
                    long.append(LongPrompt(index, done.text[:SHOWN], len(done.tokens)))
                else:
                    prepared.append(PreparedPrompt(index, rows[index], prompt, done.text, done.tokens, done.opened))
    if long and (on_overlong_prompt == "error" or not prepared):
        raise ValueError(_too_long(long, of=len(rows), limit=limit, most_characters=most))
    return prepared


def _render_rows(
    tokenizer: Tokenizer, prompts: list[Prompt], places: list[int], rows: list[Row], how: Any
) -> list[Rendered]:
    """Render prompts of the rows at `places` together; one by one where that fails, to name the row that it fails at.
    Raises ValueError.
    """
    with suppress(ValueError):
        return render_prompts(tokenizer, prompts, **how)
    rendered = list[Rendered]()
    for prompt, index in zip(prompts, places, strict=True):
        try:
            rendered.append(render_prompt(tokenizer, prompt, **how))
        except ValueError as error:
            raise ValueError(f"{error}\n  in row {index + 1}: {beginning(rows[index])}") from error
    return rendered


def _too_long(long: list[LongPrompt], *, of: int, limit: PromptLimit, most_characters: int) -> str:
    """Return the sentence about prompts that have more tokens than the limit, with what to change."""
    first = min(long, key=lambda one: one.index)
    known = [one.tokens for one in long if one.tokens is not None]
    untokenised = len(long) - len(known)
    size = f"more than {most_characters:,} characters" if first.tokens is None else f"{first.tokens} tokens"
    longest = f"; longest {max(known)}" if known and not untokenised else ""
    change = "Leave them out with task.on_overlong_prompt=drop."
    if not untokenised:
        change = f"{limit.advice(max(known))}, or leave them out with task.on_overlong_prompt=drop."
    return (
        f"{len(long)} of {of} prompts have more tokens than {limit.words} "
        f"(first: row {first.index + 1} with {size}{longest}): {first.text[:60]!r}...\n{change}"
    )


class LongText(ValueError):
    """A text with so many characters that it is not tokenised."""


def check_characters(tokenizer: Tokenizer, characters: int, *, tokens: int) -> None:
    """Raise LongText for a text of so many characters where at most `tokens` tokens are allowed."""
    most = most_characters(tokenizer, tokens)
    if characters > most:
        raise LongText(f"it has {characters:,} characters, and {tokens:,} tokens have at most {most:,}")


def with_opening(prompt: Prompt, opening: str | None) -> Prompt:
    """Return a prompt with an environment's opening at the end of its text or of the last message that is asked."""
    if opening is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + opening
    at = len(asked_of(prompt)) - 1
    asked = {**prompt[at], "content": prompt[at]["content"] + opening}
    return [*prompt[:at], asked, *prompt[at + 1 :]]


def characters_of(prompt: Prompt | None) -> int:
    """Return how many characters the contents of a prompt, or of an answer, have."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt or [])


def most_characters(tokenizer: Tokenizer, tokens: int) -> int:
    """Return the most characters of a text that is tokenised where at most `tokens` tokens are allowed: as many as the
    longest tokens have. Tokenising takes memory and time in proportion to the text, however few tokens are wanted.
    """
    return max(LEAST_CHARACTERS, tokens * longest_token(tokenizer))


@lru_cache(maxsize=8)
def longest_token(tokenizer: Tokenizer) -> int:
    """Return the characters of the longest token as the vocabulary spells it, where a byte has one or more."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def most_tokens(prompts: list[PreparedPrompt]) -> int:
    return max((len(prompt.tokens) for prompt in prompts), default=0)


def row_columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Return the columns of rows as lists (TRL's reward signature), images as paths; the prompt is an argument of its
    own.
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "prompts", "completions"))
    columns = {name: [row.get(name) for row in rows] for name in names}
    if any(columns.get("images", ())):
        columns["images"] = [[image["path"] for image in images or ()] for images in columns["images"]]
    return columns


def render_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    chat: Chat = "auto",
    system_prompt: str | None = None,
    variables: dict[str, Any] | None = None,
    tools: list[Any] | None = None,
    images: TokenisesImages | None = None,
) -> Rendered:
    """Render and tokenise a prompt, ready for the model to continue.

    With the tokenizer's chat template (`chat` True, or "auto" if it has one) text becomes one user message, the system
    prompt replaces a system message of the data, and messages that end with the assistant are continued; `variables`
    go to the template (enable_thinking), and `tools` of a row. Without it the text stays as it is, after the system
    prompt and an empty line; a BOS that the tokenizer adds stays, an EOS it appends does not, since nothing follows an
    EOS. images: of a model that reads them. Raises ValueError if that cannot be done, or the template leaves a message
    out, or the prompt has images that nothing reads.
    """
    how: Any = {"chat": chat, "system_prompt": system_prompt, "variables": variables, "tools": tools}
    return render_prompts(tokenizer, [prompt], **how, images=images)[0]


def render_prompts(
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    *,
    chat: Chat = "auto",
    system_prompt: str | None = None,
    variables: dict[str, Any] | None = None,
    tools: list[Any] | None = None,
    images: TokenisesImages | None = None,
) -> list[Rendered]:
    """Render and tokenise prompts as `render_prompt` does, in few calls of the template and the tokenizer."""
    prompts = [prompt_of(prompt) for prompt in prompts]
    variables = variables or {}
    if variables and not tokenizer.chat_template:
        raise ValueError(f"task.chat_template_kwargs={variables}, but this model's tokenizer has no chat template")
    if in_chat(tokenizer, chat):
        conversations = [asked_messages(prompt, system_prompt) for prompt in prompts]
        return _rendered_by_template(tokenizer, conversations, variables, tools=tools, images=images)
    texts = list[str]()
    for prompt in prompts:
        if not isinstance(prompt, str):
            why = "task.chat=false" if tokenizer.chat_template else "this model's tokenizer has no chat template"
            raise ValueError(f"the prompt is a list of chat messages, but {why}; give prompts as text")
        texts.append(f"{system_prompt}\n\n{prompt}" if system_prompt else prompt)
    rendered = list[Rendered]()
    for text, tokens in zip(texts, token_ids_of(tokenizer, texts), strict=True):
        opened = open_thinking(tokenizer, text[-200:])
        bos = [] if tokens[:1] == [tokenizer.bos_token_id] else added_around(tokenizer)[0]
        is_empty = opened.split() == [THOUGHTS[0]]  # in a user's text only one that it opens at its end
        rendered.append(Rendered(text, bos + tokens, opened if is_empty else ""))
    return rendered


def _rendered_by_template(
    tokenizer: Tokenizer,
    conversations: list[list[Message]],
    variables: dict[str, Any],
    *,
    tools: list[Any] | None,
    images: TokenisesImages | None,
) -> list[Rendered]:
    """Render conversations through the chat template, as prompts to continue, and tokenise them."""
    continued = [messages[-1]["role"] == "assistant" for messages in conversations]
    texts = [""] * len(conversations)
    for goes_on in {*continued}:
        places = [place for place, one in enumerate(continued) if one is goes_on]
        last: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        if tools:
            last["tools"] = tools
        part = [conversations[place] for place in places]
        for place, text in zip(places, template_texts(tokenizer, part, variables=variables, **last), strict=True):
            check_written(tokenizer, conversations[place], text, variables=variables, **last)
            texts[place] = text
    thoughts = _opened_by_template(tokenizer, conversations, texts, variables)
    ids = prompt_ids(tokenizer, texts, conversations, images)
    return [
        Rendered(undisguised(tokenizer, text), tokens, undisguised(tokenizer, opened))
        for text, tokens, opened in zip(texts, ids, thoughts, strict=True)
    ]


def prompt_ids(
    tokenizer: Tokenizer, texts: list[str], conversations: list[list[Message]], images: TokenisesImages | None
) -> list[list[int]]:
    """Tokenise renderings of conversations by the chat template, with the ids of their images. Raises ValueError for
    images that nothing reads (`images` is None).
    """
    shown = [images_of(messages) for messages in conversations]
    if images is None:
        if any(shown):
            raise ValueError("the prompt has images, and nothing here shows them to the model")
        return token_ids_of(tokenizer, texts)
    return images.tokenised(texts, shown)


def _opened_by_template(
    tokenizer: Tokenizer, conversations: list[list[Message]], texts: list[str], variables: dict[str, Any]
) -> list[str]:
    """Return of each rendering the beginning of an answer: the message of the assistant that is continued, or the
    <think> that the template has opened and not closed, which is not in the rendering of what was asked.
    """
    opened = [""] * len(texts)
    places = [place for place, text in enumerate(texts) if open_thinking(tokenizer, text)]
    before = dict[int, list[Message]]()
    for place in places:
        messages = conversations[place]
        before[place] = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    asked = dict.fromkeys(places, "")
    rendered = [place for place in places if before[place]]
    parts = template_texts(tokenizer, [before[place] for place in rendered], variables=variables)
    asked.update(zip(rendered, parts, strict=True))
    for place in places:
        opened[place] = open_thinking(tokenizer, texts[place][shared_length(texts[place], asked[place]) :])
    for place, messages in enumerate(conversations):
        if messages[-1]["role"] == "assistant":
            opened[place] = max(opened[place], _begun(tokenizer, texts[place], messages[-1]["content"]), key=len)
    return opened


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
        is_there = all(piece.strip() in shown for piece in content.split(IMAGE_MARK))
        if message["role"] in ("assistant", "tool") or is_there:
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


def open_thinking(tokenizer: Tokenizer, text: str) -> str:
    """Return the end of a text from an unclosed thought on, which begins with <think> whatever opens the model's; "" if
    there is none.
    """
    for opening, closing in (THOUGHTS, *thought_markers(tokenizer).texts):
        _, found, behind = text.rpartition(opening)
        if found and closing not in behind:
            return THOUGHTS[0] + behind
    return ""


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
