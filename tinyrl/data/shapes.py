"""Shapes of row contents as people have them: prompts, texts, conversations, preference pairs, labels and ratings.

A row is read by its columns; a column that is null counts as absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tinyrl.config.methods import or_list
from tinyrl.data.messages import (
    CONVERSATIONS,
    Message,
    Prompt,
    as_messages,
    check_prompt,
    conversation,
    messages_of,
    parsed,
    roles_of,
)
from tinyrl.data.readers import Row
from tinyrl.text import did_you_mean, listed, shortened

Side = str | list[Message]  # what follows a prompt

TEXT_COLUMNS = ("completion", "messages", "conversations", "text")  # the first that a row has is the one it is read by
ASSISTANT_OF_HH, HUMAN_OF_HH = "\n\nAssistant:", "\n\nHuman:"  # turns of transcripts written as one text


@dataclass(frozen=True)
class TextExample:
    """What is learnt behind a prompt (None: at the beginning of a text). An answer of chat data is one message of the
    assistant; `tools` are the definitions that the chat template shows.
    """

    prompt: Prompt | None
    answer: Side
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Preference:
    """Two continuations of one prompt, and by how much the chosen one is better where the row says so."""

    prompt: Prompt
    chosen: Side
    rejected: Side
    margin: float | None = None


@dataclass(frozen=True)
class Labelled:
    """A text, or a prompt and its continuation, with a label or a rating."""

    prompt: Prompt | None
    answer: Side
    label: bool | int | float | str


# ---- the three readings of a row ----


def text_examples(row: Row) -> list[TextExample]:
    """What a row teaches: its text, its completion, or of chat data each assistant turn behind the messages before it.

    Tool and user turns are context, as is an assistant turn with nothing before it. Raises ValueError, naming the
    columns, for a row that is none of `completion`, `messages`, `conversations`, `text`.
    """
    column = column_of(row, TEXT_COLUMNS)
    if column in CONVERSATIONS:
        return _turns(conversation(row, column), behind=1, tools=_tools(row))
    prompt = None if row.get("prompt") is None else _prompt(row["prompt"])
    answer = _side(row, column)
    if isinstance(answer, str):
        return [TextExample(prompt, answer)]
    before = as_messages(prompt)
    return _turns([*before, *answer], behind=max(1, len(before)), tools=_tools(row))


def preference(row: Row) -> Preference:
    """A row's `chosen` and `rejected` behind their prompt: the column `prompt`, or what both begin with.

    Messages share whole messages, and each side keeps one. Of texts the shared beginning ends after the last
    "Assistant:" of a transcript, or else before the word in which they differ. Raises ValueError, naming the columns.
    """
    for column in ("chosen", "rejected"):
        column_of(row, (column,))
    chosen, rejected = _side(row, "chosen"), _side(row, "rejected")
    if isinstance(chosen, str) is not isinstance(rejected, str):
        raise ValueError("`chosen` and `rejected` must both be text or both be chat messages")
    margin = None if row.get("margin") is None else _number(row["margin"], "margin")
    given = None if row.get("prompt") is None else _prompt(row["prompt"])
    if isinstance(chosen, str) or isinstance(rejected, str):
        assert isinstance(chosen, str)
        assert isinstance(rejected, str)
        if given is not None:
            return Preference(given, chosen, rejected, margin)
        at = _shared_text(chosen, rejected)
        return Preference(_prompt(chosen[:at]), chosen[at:], rejected[at:], margin)
    return Preference(*_message_pair(given, chosen, rejected), margin)


def labelled(row: Row) -> Labelled:
    """A row's text with its `label`, or its `score` (a number) where it has no label.

    A conversation is judged by its last message, which must be the assistant's. Raises ValueError, naming the columns.
    """
    column = column_of(row, ("label", "score"))
    label = row[column]
    if column == "score":
        label = _number(label, "score")
    elif not isinstance(label, bool | int | float | str) or (isinstance(label, float) and not math.isfinite(label)):
        raise ValueError(f"'label' must be true, false, a number or text, not {label!r:.60}")
    of_text = column_of(row, TEXT_COLUMNS)
    prompt = None if row.get("prompt") is None else _prompt(row["prompt"])
    answer = conversation(row, of_text) if of_text in CONVERSATIONS else _side(row, of_text)
    if isinstance(answer, str):
        return Labelled(prompt, answer, label)
    messages = answer if of_text in CONVERSATIONS else [*as_messages(prompt), *answer]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(f"'{of_text}' must end with an answer of the assistant, not {roles_of(messages)}")
    return Labelled(messages[:-1], messages[-1:], label)


RowKind = Literal["text", "pairs", "labels"]
READINGS: dict[RowKind, Callable[[Row], Any]] = {"text": text_examples, "pairs": preference, "labels": labelled}


def shared_prompt(row: Row) -> Any:
    """What rows of the same prompt have in common, so that they stay on one side of a held-out split: the prompt, the
    messages before the first turn of the assistant, what both sides of a pair begin with, or the text itself.
    """
    for column in ("prompt", "text"):
        if row.get(column) is not None:
            return row[column]
    for column in CONVERSATIONS:
        if row.get(column) is not None:
            messages = conversation(row, column)
            first = next((i for i, m in enumerate(messages) if i and m["role"] == "assistant"), len(messages))
            return messages[:first]
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return preference(row).prompt
    return row.get("completion")


# ---- columns ----


def column_of(row: Row, wanted: tuple[str, ...]) -> str:
    """The first of some columns that a row has and that is not null."""
    there = next((name for name in wanted if row.get(name) is not None), None)
    if there is not None:
        return there
    null = next((name for name in wanted if name in row), None)
    if null is not None:
        raise ValueError(f"'{null}' is null")
    near = next((meant for name in wanted if (meant := did_you_mean(name, list(row)))), "")
    either = or_list([f"'{name}'" for name in wanted])
    rename = f"Rename one (of task.data: task.columns.{wanted[0]}=OLD)"  # rows of another setting are as they are
    raise ValueError(f"no column {either}.{near} Columns: {listed(row)}. {rename}")


def _side(row: Row, column: str) -> Side:
    value = row[column]
    if isinstance(value, list) and column != "text":
        return messages_of(value, column)
    if not isinstance(value, str):
        raise ValueError(f"'{column}' must be text{'' if column == 'text' else ' or messages'}, not {value!r:.60}")
    return value


def _prompt(value: Any) -> Prompt:
    prompt = messages_of(value, "prompt") if isinstance(value, list) and value else value
    check_prompt(prompt)
    return prompt


def _number(value: Any, column: str) -> float:
    """A finite number; those of a .csv are texts."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"'{column}' must be a number, not {value!r:.60}")
    return found


def _tools(row: Row) -> list[Any] | None:
    """The definitions of tools, a list or one as JSON text; None where there are none."""
    tools = parsed(row.get("tools"), "tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"'tools' must be a list of tool definitions, not {tools!r:.60}")
    return tools or None


def _turns(messages: list[Message], *, behind: int, tools: list[Any] | None) -> list[TextExample]:
    """An example for each turn of the assistant, from message `behind` on."""
    turns = [i for i, message in enumerate(messages) if i >= behind and message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"there is no turn of the assistant with a message before it, only {roles_of(messages)}")
    return [TextExample(messages[:i], [messages[i]], tools) for i in turns]


# ---- pairs that hold their prompt ----


def _message_pair(
    given: Prompt | None, chosen: list[Message], rejected: list[Message]
) -> tuple[Prompt, list[Message], list[Message]]:
    """(prompt, chosen, rejected) of messages, the prompt given, inside both, or both at once."""
    if given is not None and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt, sides = given, (chosen, rejected)
    else:
        most = min(len(chosen), len(rejected)) - 1
        at = next((i for i in range(most) if chosen[i] != rejected[i]), most)
        if not at:
            raise ValueError("`chosen` and `rejected` have no first message in common, which would be their prompt")
        prompt, sides = chosen[:at], (chosen[at:], rejected[at:])
        if given is not None and as_messages(given) != prompt and given not in [m["content"] for m in prompt]:
            raise ValueError(
                f"`chosen` and `rejected` begin with {roles_of(prompt)}, which is not what `prompt` says: {given!r:.60}"
            )
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if side[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must end with a turn of the assistant, not {roles_of(side)}")
    return prompt, sides[0], sides[1]


def _shared_text(chosen: str, rejected: str) -> int:
    """Where the beginning that two texts share ends."""
    both = zip(chosen, rejected, strict=False)
    most = min(len(chosen), len(rejected)) - 1
    shared = chosen[: next((i for i, (a, b) in enumerate(both) if a != b), most)]
    assistant = shared.rfind(ASSISTANT_OF_HH)
    if assistant >= 0 and HUMAN_OF_HH not in shared[assistant:]:
        return assistant + len(ASSISTANT_OF_HH)
    words = [match.start() for match in re.finditer(r"(?<=\S)\s+", shared)]
    if chosen == rejected or not words:
        same = "are the same text" if chosen == rejected else "have no first word in common"
        raise ValueError(f"`chosen` and `rejected` {same}, and there is no `prompt`: {shortened(chosen, 60)!r}")
    return words[-1]
