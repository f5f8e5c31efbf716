"""The first row as the model reads it; for `tinyrl check --quick` by the files of its tokenizer, without transformers.

A template or tokenizer that a start would refuse is refused here by the same sentence. Where only a start can read the
tokenizer, a line says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.formats import TextExample, beginning
from tinyrl.data.images import Image, is_image_id
from tinyrl.data.kinds import Examples, RowKind
from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.data.turns import goes_on, joined
from tinyrl.models.folder_tokenizer import TOKENIZER_FILE, FolderTokenizer
from tinyrl.models.reading import reading_tokenizer, resolve_model_path, tokenizer_folder
from tinyrl.models.tokens import template_text, token_ids, token_ids_of, undisguised
from tinyrl.models.trial import try_folder
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import NO_LIMIT, asked_messages, in_chat, prepare_prompts, render_prompt
from tinyrl.text import first_line

LAST = 12  # tokens that are shown one by one


@dataclass(frozen=True)
class FirstRow:
    """Lines about what a row becomes, and the number of its tokens (None: only a start can tell)."""

    lines: list[str]
    tokens: int | None = None


def lines_of(tokenizer: Any, text: str, tokens: list[int]) -> list[str]:
    """Show a text, and its last tokens one by one."""
    pieces = ["[image]" if is_image_id(token) else str(tokenizer.decode([token])) for token in tokens[-LAST:]]
    return [f"as the model reads it: {text!r}", f"its last tokens: {pieces}"]


class ImagesAsMarks:
    """Tokenises prompts as the template has written them: without a processor, an image is its mark alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokenised(self, texts: Sequence[str], images: Sequence[Sequence[Image]]) -> list[list[int]]:
        return token_ids_of(self.tokenizer, [*texts])


def read_first_row(config: Config, task: Task, kind: RowKind, row: Row) -> FirstRow:
    """Render and tokenise a row. Raises ValueError where a start would refuse template, tokenizer or row."""
    tokenizer = _tokenizer_or_why(config)
    if isinstance(tokenizer, str):
        return FirstRow([f"its tokens are not counted: {tokenizer}"])
    text, tokens = _rendered(tokenizer, config, task, kind, row)
    lines = lines_of(tokenizer, text, tokens)
    if row.get("images"):
        return FirstRow([*lines, "the tokens of images are not counted: that takes the model's processor (no --quick)"])
    return FirstRow([*lines, f"it has {len(tokens):,} tokens"], len(tokens))


def tokens_with_environment(
    config: Config, task: Task, row: Row, *, schemas: list[dict[str, Any]] | None, opening: str | None
) -> int | None:
    """Count the tokens of a row's prompt with what an environment adds, its tools and its opening; None where it adds
    nothing, and where only a start can tell.
    """
    if not (schemas or opening) or row.get("images"):
        return None
    tokenizer = _tokenizer_or_why(config)
    if isinstance(tokenizer, str):
        return None
    added = {"tools": schemas} if schemas else {}
    return len(_prompt(tokenizer, config, task, row, added=added, opening=opening)[1])


def _tokenizer_or_why(config: Config) -> Any:
    """Return the model's tokenizer by its files, or a text that says why there is none before a start."""
    resolved = resolve_model_path(config.model.path)
    try:
        folder = tokenizer_folder(resolved, revision=config.model.revision)
    except (OSError, ValueError) as error:  # of the hub
        return first_line(error)
    tokenizer = _tokenizer(config, folder, resolved)
    return f"there is no {TOKENIZER_FILE}, which a start makes" if tokenizer is None else tokenizer


def _tokenizer(config: Config, folder: Path, resolved: str) -> FolderTokenizer | None:
    """Read the tokenizer of a folder, after a trial of files that are not ours; None where there is no tokenizer.json.
    Raises ValueError for damaged files.
    """
    with reading_tokenizer(config.model.path, resolved):
        if starter_path(config.model.path) is None:
            try_folder(folder)
        if not (folder / TOKENIZER_FILE).is_file():
            return None
        tokenizer = FolderTokenizer(folder, name=resolved)
        tokenizer("a b")  # which reads the file
    return tokenizer


def _rendered(tokenizer: Any, config: Config, task: Task, kind: RowKind, row: Row) -> tuple[str, list[int]]:
    """Return a row as text and tokens: its prompt, or of a row to learn from its first answer too."""
    if not isinstance(kind, Examples):
        return _prompt(tokenizer, config, task, row)
    try:
        return _example(tokenizer, config, kind, row)
    except ValueError as error:
        raise ValueError(f"{error}\n  in the row {beginning(row)}") from error


def _prompt(
    tokenizer: Any,
    config: Config,
    task: Task,
    row: Row,
    *,
    added: dict[str, Any] | None = None,
    opening: str | None = None,
) -> tuple[str, list[int]]:
    """Return a row's prompt as text and tokens. added: variables of the chat template; opening: text at its end."""
    section = config.task
    [prompt] = prepare_prompts(
        task,
        [row],
        tokenizer=tokenizer,
        chat=section.chat,
        system_prompt=None if config.environment.agent is not None else section.system_prompt,
        variables={**section.chat_template_kwargs, **(added or {})},
        on_overlong_prompt="error",
        limit=NO_LIMIT,
        openings=None if opening is None else [opening],
        images=ImagesAsMarks(tokenizer),
    )
    return prompt.text, prompt.tokens


def _example(tokenizer: Any, config: Config, kind: Examples, row: Row) -> tuple[str, list[int]]:
    """Return a row with its first answer as text and tokens: the conversation, or the prompt before an answer that is
    text. Where nothing goes through the chat template, the texts behind each other.
    """
    section = config.task
    example = kind.first_example(row)
    is_text = isinstance(example, TextExample)
    answer = example.answer if is_text else example.answers[0]
    prompt = example.prompt
    tools = example.tools if is_text else None
    how: dict[str, Any] = {"variables": section.chat_template_kwargs, **({"tools": tools} if tools else {})}
    if prompt is None or not in_chat(tokenizer, section.chat):
        texts = [str(message["content"]) for message in as_messages(prompt)]
        texts += [answer] if isinstance(answer, str) else [str(message["content"]) for message in answer]
        text = "\n".join(texts)
        return text, token_ids(tokenizer, text)
    if isinstance(answer, str):
        how |= {"chat": section.chat, "system_prompt": section.system_prompt}
        rendered = render_prompt(tokenizer, prompt, images=ImagesAsMarks(tokenizer), **how)
        return rendered.text, rendered.tokens
    before: Sequence[Any] = asked_messages(prompt, section.system_prompt)
    messages = joined([*before], answer) if goes_on(prompt, answer) else [*before, *answer]
    text = template_text(tokenizer, messages, **how)
    return undisguised(tokenizer, text), token_ids(tokenizer, text)
