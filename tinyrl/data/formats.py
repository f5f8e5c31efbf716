"""Formats of rows: how a row holds a prompt and an answer, by the columns that people have; what methods make of rows
in any format is in kinds.py.

To add a format, write its class and name it in ANSWERS and PROMPTS. A column that is null counts as absent. Errors are
ValueErrors that name the columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tinyrl.config.methods import or_list
from tinyrl.config.sections import LARGEST
from tinyrl.data.images import with_marks_shown, without_paths
from tinyrl.data.messages import (
    Message,
    Prompt,
    as_messages,
    conversation,
    messages_of,
    prompt_of,
    roles_of,
    tools_of,
)
from tinyrl.data.readers import Row
from tinyrl.data.turns import MARKS, Side, first_answer, goes_on, joined, learnt_turns
from tinyrl.text import join_truncated, one_line, truncate


@dataclass(frozen=True)
class TextExample:
    """An answer to learn behind a prompt (None: at the beginning of a text). An answer of chat data is one message of
    the assistant; `tools` are the definitions that the chat template shows.
    """

    prompt: Prompt | None
    answer: Side
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Scored:
    """A prompt (None: the answer is a text alone), and either (chosen, rejected) with their margin, or one answer with
    its label. continues: answers in messages go on with the last message of the prompt.
    """

    prompt: Prompt | None
    answers: tuple[Side, ...]
    value: float = 0.0
    continues: bool = False


# ---- formats ----


class Format:
    """A way to hold answers in a row. `column` has them, and a row that has it is in this format.

    asked, answered: columns that a chat template renders, as turns of others and as the assistant's.
    begins_with_prompt: the answer begins with the prompt, where there is no column `prompt`.
    """

    column: str
    asked: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    begins_with_prompt = False

    @property
    def columns(self) -> list[str]:
        return [*dict.fromkeys((self.column, *self.asked, *self.answered))]

    def is_in(self, row: Row) -> bool:
        return row.get(self.column) is not None

    def prompt(self, row: Row) -> Any:
        """Return the grouping key of a row without a column `prompt`."""
        return row[self.column]

    def read(self, row: Row) -> tuple[Prompt | None, Side]:
        """Return the prompt before the answer (None: there is none, or the answer has it), and the answer."""
        return _prompt(row), _side(row, self.column)


class Completion(Format):
    """A `prompt`, and its `completion` as text or messages."""

    column = "completion"
    answered = ("completion",)


class Conversation(Format):
    """A list of chat messages with the turns of the assistant, also in ShareGPT's form."""

    begins_with_prompt = True

    def __init__(self, column: str) -> None:
        self.column = column
        self.asked = (column,)

    def prompt(self, row: Row) -> Any:
        """Return the messages before the first turn of the assistant that answers something."""
        messages = conversation(row, self.column)
        return messages[: first_answer(messages)]

    def read(self, row: Row) -> tuple[Prompt | None, Side]:
        return None, conversation(row, self.column)


class PlainText(Format):
    """A `text`, which may have a `prompt` before it."""

    column = "text"


class Pair(Format):
    """A `chosen` and a `rejected` answer, behind a `prompt` or the beginning that they share (see `preference`)."""

    column = "chosen"
    answered = ("chosen", "rejected")
    begins_with_prompt = True

    def is_in(self, row: Row) -> bool:
        return row.get("chosen") is not None and row.get("rejected") is not None

    def prompt(self, row: Row) -> Any:
        return preference(row).prompt


COMPLETION = Completion()
MESSAGES = Conversation("messages")
CONVERSATIONS = Conversation("conversations")
TEXT = PlainText()
PAIR = Pair()
ANSWERS: tuple[Format, ...] = (COMPLETION, MESSAGES, CONVERSATIONS, TEXT)  # one answer; a row is read by the first
PROMPTS: tuple[Format, ...] = (TEXT, MESSAGES, CONVERSATIONS, PAIR, COMPLETION)  # a prompt is taken of the first
ASKED_COLUMNS = ("prompt", "tools", *(name for each in PROMPTS for name in each.asked))
ANSWERED_COLUMNS = tuple(name for each in PROMPTS for name in each.answered)
KNOWN_COLUMNS = ("prompt", *(name for each in (*ANSWERS, PAIR) for name in each.columns), "margin", "label", "tools")


def shared_prompt(row: Row) -> Any:
    """Return the prompt as grouping key; a held-out split keeps rows with the same key together. It is the prompt, the
    messages before the first turn of the assistant, the common beginning of a pair, or the text.
    """
    if row.get("prompt") is not None:
        return row["prompt"]
    return next((each.prompt(row) for each in PROMPTS if each.is_in(row)), None)


def with_prompt(row: Row) -> Row:
    """Return a row with a prompt: the beginning of its conversation, if it has no other. Raises ValueError for a
    conversation that cannot be parsed.
    """
    begins = any(each.begins_with_prompt and each.column in row for each in PROMPTS)
    return {**row, "prompt": shared_prompt(row)} if begins and row.get("prompt") is None else row


# ---- texts and conversations ----


def is_empty(answer: Side) -> bool:
    """Return whether the last message of an answer is blank; one with tool calls or thoughts is not."""
    last = {"content": answer} if isinstance(answer, str) else answer[-1]
    return {*last} - MARKS <= {"role", "content"} and not last["content"].strip()


def text_examples(row: Row) -> list[TextExample]:
    """Return the examples of a row: its text, its completion, or each assistant turn behind the messages before it.

    Tool and user turns are context, as are a greeting of the assistant, and a turn that is marked as one not to learn
    (`is_learnt`). There is no example where every turn is. Behind a prompt that ends with the assistant's message, the
    first message of a completion is the rest of that one.
    """
    prompt, answer = answer_format(row).read(row)
    if isinstance(answer, str):
        return [TextExample(prompt, answer)]
    if prompt is None:
        first = first_answer(answer)
        before = answer[:first]
        answer = [] if first is None else answer[first:]
    else:
        before = as_messages(prompt)
    if not any(message["role"] == "assistant" for message in answer):
        messages = [*before, *answer]
        raise ValueError(f"there is no turn of the assistant with a message before it, only {roles_of(messages)}")
    tools = tools_of(row.get("tools"))
    turns = learnt_turns(before, answer, continues=prompt is not None and goes_on(prompt, answer))
    return [TextExample(turn.prompt, turn.answer, tools) for turn in turns]


def answer_format(row: Row) -> Format:
    """Return the format that a row's answer is read by. Raises ValueError for a row in none."""
    column = _column_of(row, *(each.column for each in ANSWERS))
    return next(each for each in ANSWERS if each.column == column)


# ---- pairs and labels ----


def labelled(row: Row) -> Scored:
    """Parse a text with its `label`. A conversation is judged by its last message, which must be the assistant's."""
    value = _number(row[_column_of(row, "label")], "label")
    found = answer_format(row)
    prompt, answer = found.read(row)
    if isinstance(answer, str):
        return Scored(prompt, (answer,), value)
    continues = goes_on(prompt, answer)
    if continues and len(answer) == 1:
        return Scored(prompt, (answer,), value, continues=True)
    before = as_messages(prompt)
    messages = joined(before, answer) if continues else [*before, *answer]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(f"'{found.column}' must end with an answer of the assistant, not {roles_of(messages)}")
    return Scored(messages[:-1], (messages[-1:],), value)


def two_labels(values: Iterable[float]) -> tuple[float, float]:
    """Return (lower, higher) label of some rows; the higher one is the good one. Raises ValueError for other counts."""
    labels = sorted(set(values))
    if len(labels) != 2:
        shown = join_truncated((f"{value:g}" for value in labels), most=5)
        raise ValueError(f"the rows have {len(labels)} different labels ({shown}), and a reward model learns from two")
    return labels[0], labels[1]


def preference(row: Row) -> Scored:
    """Parse a row's `chosen` and `rejected` behind their prompt: the column `prompt`, and their common beginning.

    Messages share whole messages, and each side keeps one at least. Sides that begin with a turn of the assistant are
    answers to `prompt`; others are whole conversations, which have to begin with it (a system turn may be in either).
    Texts behind a `prompt` share nothing more. The shared beginning of others ends after the last "Assistant:" of a
    transcript, or else before the word in which they differ. Sides that are empty (null, []) or equal need not hold a
    prompt. Behind a `prompt` that ends with the assistant's message, sides go on with that one.
    """
    for column in ("chosen", "rejected"):
        if column not in row:
            _column_of(row, column)
    chosen, rejected = (_side(row, c) if row[c] not in (None, []) else "" for c in ("chosen", "rejected"))
    margin = 0.0 if row.get("margin") is None else _number(row["margin"], "margin")
    given = _prompt(row)
    if any(isinstance(side, str) and not side.strip() for side in (chosen, rejected)):
        return Scored(given, (chosen, rejected), margin)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if given is not None or chosen == rejected:
            return Scored(given, (chosen, rejected), margin)
        at = _shared_text(chosen, rejected)
        return Scored(prompt_of(chosen[:at]), (chosen[at:], rejected[at:]), margin)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("`chosen` and `rejected` must both be text or both be chat messages")
    most = min(len(chosen), len(rejected)) - 1
    at = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    shared = chosen[:at]
    are_answers = chosen[0]["role"] == rejected[0]["role"] == "assistant"
    prompt: Prompt
    continues = given is not None and are_answers and goes_on(given, chosen)
    if given is not None and are_answers:
        before = as_messages(given)
        prompt = given if not shared else joined(before, shared) if continues else [*before, *shared]
    elif shared:
        prompt = shared if given is None else _as_begun(as_messages(given), shared)
    else:
        raise ValueError("`chosen` and `rejected` have no first message in common, which would be their prompt")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must end with a turn of the assistant, not {roles_of(side[at:])}")
    return Scored(prompt, (chosen[at:], rejected[at:]), margin, continues=continues and not shared)


def _as_begun(prompt: list[Message], shared: list[Message]) -> list[Message]:
    """Return the common beginning of two conversations, with the system turn of `prompt` if only that has one. Raises
    ValueError unless the conversations begin with `prompt`, system turns apart.
    """
    system, asked = _system_apart(prompt)
    own_system, begun = _system_apart(shared)
    ours = _texts([*(system or own_system), *asked])
    theirs = _texts([*(own_system or system), *begun])
    if ours != theirs[: len(ours)]:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        there = f"{theirs[at][1]!r:.60}" if at < len(theirs) else "nothing that both have"
        raise ValueError(
            f"`prompt` has {ours[at][1]!r:.60} where `chosen` and `rejected` have {there}; they are to begin with it "
            "(task.columns.unused=prompt leaves the column out)"
        )
    return [*(own_system or system), *begun]


def _system_apart(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split messages into a first system turn, if there is one, and the others."""
    count = int(bool(messages) and messages[0]["role"] == "system")
    return messages[:count], messages[count:]


def _texts(messages: list[Message]) -> list[tuple[str, str, Any, Any]]:
    """Return messages in a normal form: equal for two ways to write the same conversation."""
    return [
        (message["role"], message["content"].strip(), message.get("tool_calls"), without_paths(message.get("images")))
        for message in messages
    ]


def _shared_text(chosen: str, rejected: str) -> int:
    """Return the length of the prompt that both texts begin with."""
    both = zip(chosen, rejected, strict=False)
    most = min(len(chosen), len(rejected)) - 1
    shared = chosen[: next((i for i, (a, b) in enumerate(both) if a != b), most)]
    before, assistant, after = shared.rpartition("\n\nAssistant:")  # as HH-RLHF writes transcripts
    if assistant and "\n\nHuman:" not in after:
        return len(before + assistant)
    words = [match.start() for match in re.finditer(r"(?<=\S)\s+", shared)]
    if not words:
        raise ValueError(
            f"`chosen` and `rejected` have no first word in common, and there is no `prompt`: {truncate(chosen, 60)!r}"
        )
    return words[-1]


# ---- columns ----


def _column_of(row: Row, *names: str) -> str:
    """Return the first of some columns that is there and not null. Raises ValueError if there is none."""
    for name in names:
        if row.get(name) is not None:
            return name
    if null := next((name for name in names if name in row), None):
        raise ValueError(f"'{null}' is null")
    either = or_list([f"'{name}'" for name in names])
    rename = f"task.columns.{names[0]}=OLD"
    raise ValueError(f"no column {either}. Columns: {join_truncated(row)}. Rename one (of task.data: {rename})")


def _side(row: Row, column: str) -> Side:
    value = row[column]
    if isinstance(value, list) and column != "text":
        return messages_of(value, column)
    if not isinstance(value, str):
        raise ValueError(f"'{column}' must be text{'' if column == 'text' else ' or messages'}, not {value!r:.60}")
    return value


def _prompt(row: Row) -> Prompt | None:
    return None if row.get("prompt") is None else prompt_of(row["prompt"])


def _number(value: Any, column: str) -> float:
    """Parse a label or margin; a .csv has them as text."""
    text = str(value).strip().lower()
    found = math.nan
    with suppress(ValueError):
        found = float({"true": 1, "false": 0}.get(text, text))
    if abs(found) <= LARGEST:
        return found
    raise ValueError(f"'{column}' must be a number (at most {LARGEST:,}), true or false, not {value!r:.60}")


def beginning(row: Row) -> str:
    """Return the first characters of a row on one line, to quote it in an error."""
    text = str(row)[:500]
    return one_line(with_marks_shown(text) if row.get("images") else text, 100)
