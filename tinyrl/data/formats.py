"""Formats of rows: texts, conversations, preference pairs and labelled answers, by the columns that people have.

A column that is null counts as absent. Errors are ValueErrors that name the columns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from tinyrl.config.methods import or_list
from tinyrl.config.sections import LARGEST
from tinyrl.data.messages import (
    CONVERSATIONS,
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
from tinyrl.text import join_truncated, one_line, truncate

Side = str | list[Message]  # an answer to a prompt
Objective = Literal["pairs", "labels"]

TEXT_COLUMNS = ("completion", "messages", "conversations", "text")  # a row is read by the first one that it has
KNOWN_COLUMNS = ("prompt", *TEXT_COLUMNS, "chosen", "rejected", "margin", "label", "tools")
EQUAL = "two equal answers"


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
    its label.
    """

    prompt: Prompt | None
    answers: tuple[Side, ...]
    value: float = 0.0


# ---- usable rows ----


def is_empty(answer: Side) -> bool:
    """Return whether the last message of an answer is blank; one with tool calls or thoughts is not."""
    last = {"content": answer} if isinstance(answer, str) else answer[-1]
    return {*last} <= {"role", "content"} and not last["content"].strip()


def unusable(row: Row, what: Literal["text"] | Objective, *, prompts_count: bool = False) -> str | None:
    """Return why no method can learn from a row; None if one can. `prompts_count`: prompts of texts are learnt too.
    Raises ValueError for a row that cannot be parsed.
    """
    if what == "text":
        learnt = any(not is_empty(each.answer) or (prompts_count and each.prompt) for each in text_examples(row))
        return None if learnt else "an empty answer"
    answers = judged(row, what).answers
    if any(map(is_empty, answers)):
        return "an empty answer"
    return EQUAL if len(answers) > 1 and answers[0] == answers[1] else None


def leave_out(rows: list[Row], reasons: list[str | None], notes: list[str]) -> None:
    """Note how many rows have a reason to be left out, and the first of them. Raises ValueError if none is left."""
    why = Counter(filter(None, reasons))
    if why:
        counts = ", ".join(f"{count:,} with {reason}" for reason, count in why.items())
        what = f"{why.total():,} of {len(rows):,} rows ({counts})"
        if why.total() == len(rows):
            raise ValueError(f"no usable rows: {what}")
        first = next(row for row, reason in zip(rows, reasons, strict=True) if reason)
        notes.append(f"warning: {what} are left out; the first is {beginning(first)}")


def described(rows: list[Row], what: Literal["text"] | Objective) -> list[str]:
    """Return a line that counts rows by their columns, and one with what the first row becomes."""
    kinds = Counter(", ".join(f"`{name}`" for name in KNOWN_COLUMNS if row.get(name) is not None) for row in rows)
    first = text_examples(rows[0])[-1] if what == "text" else judged(rows[0], what)
    answers = [first.answer] if isinstance(first, TextExample) else first.answers

    def shown(side: Side | None) -> str:
        text = side if isinstance(side, str) else " ".join(f"[{m['role']}] {m['content']}" for m in side or [])
        return repr(one_line(text, 120))

    value = f", {first.value:g}" if isinstance(first, Scored) and first.value else ""
    return [
        f"rows: {'; '.join(f'{count:,} with {kind}' for kind, count in kinds.most_common())}",
        f"for example: {shown(first.prompt)} -> {' over '.join(map(shown, answers))}{value}",
    ]


def beginning(row: Row) -> str:
    """Return the first characters of a row on one line, to quote it in an error."""
    return one_line(str(row)[:500], 100)


# ---- texts and conversations ----


def text_examples(row: Row) -> list[TextExample]:
    """Return the examples of a row: its text, its completion, or each assistant turn behind the messages before it.

    Tool and user turns are context, as is an assistant turn with nothing before it.
    """
    _, prompt, answer = _text_of(row)
    if isinstance(answer, str):
        return [TextExample(prompt, answer)]
    before = as_messages(prompt)
    messages = [*before, *answer]
    start = max(1, len(before))
    tools = tools_of(row.get("tools"))
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"there is no turn of the assistant with a message before it, only {roles_of(messages)}")
    return [TextExample(messages[:i], [messages[i]], tools) for i in turns]


def shared_prompt(row: Row) -> Any:
    """Return what rows of the same prompt have in common, so that a held-out split keeps them together: the prompt, the
    messages before the first turn of the assistant, the common beginning of a pair, or the text.
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


def _text_of(row: Row) -> tuple[str, Prompt | None, Side]:
    """Return the column that a row is read by, the prompt before it, and its value (a conversation has both)."""
    column = _column_of(row, *TEXT_COLUMNS)
    if column in CONVERSATIONS:
        return column, None, conversation(row, column)
    return column, _prompt(row), _side(row, column)


# ---- pairs and labels ----


def objective_of(row: Row) -> Objective:
    """Return the objective by a row's columns: pairs (`chosen`, `rejected`) or labels (`label`)."""
    has = {name for name, value in row.items() if value is not None}
    if has & {"chosen", "rejected", "label"}:
        return "pairs" if has & {"chosen", "rejected"} else "labels"
    raise ValueError(
        "a reward model learns from pairs (`chosen`, `rejected`) or from labels (`label`); "
        f"this row has {join_truncated(row)}. Rename columns with task.columns.NEW=OLD"
    )


def judged(row: Row, objective: Objective) -> Scored:
    """Parse a row for a reward model: a pair, or a text with its `label`. A conversation is judged by its last message,
    which must be the assistant's.
    """
    if objective == "pairs":
        return preference(row)
    value = _number(row[_column_of(row, "label")], "label")
    column, prompt, answer = _text_of(row)
    if isinstance(answer, str):
        return Scored(prompt, (answer,), value)
    messages = [*as_messages(prompt), *answer]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(f"'{column}' must end with an answer of the assistant, not {roles_of(messages)}")
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
    prompt.
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
    if given is not None and are_answers:
        prompt = [*as_messages(given), *shared] if shared else given
    elif shared:
        prompt = shared if given is None else _as_begun(as_messages(given), shared)
    else:
        raise ValueError("`chosen` and `rejected` have no first message in common, which would be their prompt")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must end with a turn of the assistant, not {roles_of(side[at:])}")
    return Scored(prompt, (chosen[at:], rejected[at:]), margin)


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


def _texts(messages: list[Message]) -> list[tuple[str, str, Any]]:
    """Return what two ways to write the same messages have in common."""
    return [(message["role"], message["content"].strip(), message.get("tool_calls")) for message in messages]


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
