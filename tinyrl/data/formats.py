"""Formats of rows, by the columns that people have, and the kinds of rows that methods learn from.

    a format     how a row holds an answer: a class with its columns, its prompt and its answer (ANSWERS, PROMPTS)
    a kind       what a method makes of rows in any format: texts, pairs, labels (RowKind); prompts of a task are a kind
                 too, in tasks/run_rows.py

To add a format, write its class and name it in ANSWERS and PROMPTS. A column that is null counts as absent. Errors are
ValueErrors that name the columns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tinyrl.config.methods import or_list
from tinyrl.config.sections import LARGEST
from tinyrl.data.images import images_of, with_marks_shown, without_paths
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
from tinyrl.data.readers import Placed, Row
from tinyrl.data.rows import shuffled
from tinyrl.data.turns import MARKS, Side, first_answer, goes_on, is_learnt, joined, learnt_turns
from tinyrl.process.signals import watched
from tinyrl.text import join_truncated, one_line, truncate

EQUAL = "two equal answers"
EMPTY = "an empty answer"
UNLEARNT = "every answer marked as one not to learn"


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
MEDIA_COLUMNS = ("video", "videos", "audio", "audios")  # which nothing shows to a model
PLAIN_KEYS = frozenset(("role", "content", "from", "value"))
BESIDE_COLUMNS = ("system", "tools")  # parts of a conversation that some formats have outside of its messages
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


# ---- kinds of rows ----


class RowKind:
    """What a method learns from, and how it is read from task.data (tasks/run_rows.py)."""

    has_own_rows = False  # whether both splits are made, whatever task.data is, so that none is split
    is_shuffled = False  # rows are all read and shuffled before some are taken, as such files are often sorted by label
    keeps_repeats = False  # all rows of a held-out prompt are kept, instead of the last
    holds_out_rows = False  # single rows are held out where there are too few prompts
    has_labels = False  # of one answer, instead of two answers of which one is better

    def by_columns(self, first: Row) -> RowKind:
        """Return the kind, which may depend on the columns of the first row to train on."""
        return self

    def own_rows(self, split: str, source: str | None) -> list[Row] | None:
        """Return rows that need not be read; None: they are those of `source`."""
        return None

    def usable(self, placed: Placed, notes: list[str]) -> list[Row]:
        """Return the rows that can be used; those that are left out are counted in `notes`. Raises ValueError, with the
        place, for a row that cannot be parsed.
        """
        raise NotImplementedError

    def prompt(self, row: Row) -> Any:
        """Return the prompt as grouping key."""
        return shared_prompt(row)

    def unread(self, row: Row) -> list[str]:
        """Return those of BESIDE_COLUMNS that hold something and that nothing reads, of a usable row."""
        return []

    def conversations(self, row: Row) -> list[list[Message]]:
        """Return the messages that a row holds, with its answers."""
        return []

    def described(self, rows: list[Row]) -> list[str]:
        """Return lines about rows, for the log."""
        return []


class Examples(RowKind):
    """Rows of given answers. A subclass parses a row, and gives the reason for which nothing can be learnt from it."""

    holds_out_rows = True

    def first_example(self, row: Row) -> TextExample | Scored:
        raise NotImplementedError

    def problem(self, row: Row) -> str | None:
        """Return why nothing can be learnt from a row; None if something can. Raises ValueError for a row that cannot
        be parsed.
        """
        raise NotImplementedError

    def usable(self, placed: Placed, notes: list[str]) -> list[Row]:
        reasons = [at_place(place, self._checked, row) for place, row in watched(placed)]
        leave_out([row for _, row in placed], reasons, notes)
        rows = [row for (_, row), reason in zip(placed, reasons, strict=True) if reason is None]
        return shuffled(rows) if self.is_shuffled else rows

    def check_images(self, row: Row) -> None:
        """Raise ValueError for a row with images elsewhere than in the prompt of its answers."""
        if not row.get("images"):
            return
        first = self.first_example(row)
        answers = [first.answer] if isinstance(first, TextExample) else first.answers
        if any(images_of(answer) for answer in answers):
            raise ValueError("an answer has an image, and a model writes text only")
        if not images_of(first.prompt):
            raise ValueError("the row has images, and its prompt shows none of them")

    def _checked(self, row: Row) -> str | None:
        refuse_media(row)
        reason = self.problem(row)
        if reason is None:
            self.check_images(row)
        return reason

    def unread(self, row: Row) -> list[str]:
        given = given_beside(row)
        if not given:
            return []
        first = self.first_example(row)
        read = {"system"} if has_system(first.prompt) else set[str]()
        if isinstance(first, TextExample) and first.tools:
            read.add("tools")
        return [name for name in given if name not in read]

    def conversations(self, row: Row) -> list[list[Message]]:
        if not any(map(_may_hold_more, row.values())):
            return []
        first = self.first_example(row)
        answers = [first.answer] if isinstance(first, TextExample) else first.answers
        before = as_messages(first.prompt)
        return [before if isinstance(answer, str) else [*before, *answer] for answer in answers]

    def described(self, rows: list[Row]) -> list[str]:
        """Return a line that counts rows by their columns, and one with what the first row becomes."""
        kinds = Counter(", ".join(f"`{name}`" for name in KNOWN_COLUMNS if row.get(name) is not None) for row in rows)
        first = self.first_example(rows[0])
        answers = [first.answer] if isinstance(first, TextExample) else first.answers
        value = f", {first.value:g}" if isinstance(first, Scored) and first.value else ""
        counts = "; ".join(f"{count:,} with {kind}" for kind, count in kinds.most_common())
        return [
            f"rows: {counts}",
            f"for example: {_shown(first.prompt)} -> {' over '.join(map(_shown, answers))}{value}",
        ]


class Texts(Examples):
    """Texts and conversations. learns_prompts: prompts are learnt too, so a row with an empty answer has something."""

    def __init__(self, *, learns_prompts: bool = False) -> None:
        self.learns_prompts = learns_prompts

    def first_example(self, row: Row) -> TextExample:
        return text_examples(row)[-1]

    def check_images(self, row: Row) -> None:
        """Raise ValueError for a row with images elsewhere than in what is before an answer."""
        if not row.get("images"):
            return
        if self.learns_prompts:
            raise ValueError(
                "the row has images, and sft.loss_on=all learns prompts too; images are read, never learnt"
            )
        examples = text_examples(row)
        if any(images_of(example.answer) for example in examples):
            raise ValueError("an answer to learn has an image, and a model writes text only")
        if examples and not images_of(examples[-1].prompt):
            raise ValueError("the row has images, and none of them is before an answer, in `prompt` or messages")

    def problem(self, row: Row) -> str | None:
        examples = text_examples(row)
        if not examples:
            return UNLEARNT
        if self.learns_prompts:
            for message in as_messages(examples[-1].prompt):
                if message["role"] == "assistant" and not is_learnt(message):
                    marks = ", ".join(f"{name}={message[name]}" for name in sorted(MARKS & {*message}))
                    raise ValueError(f"a turn has {marks}, and sft.loss_on=all learns all of a conversation")
        for example in examples:
            if not is_empty(example.answer) or (self.learns_prompts and example.prompt):
                return None
        return EMPTY


class Pairs(Examples):
    """Two answers to a prompt, of which one is better. by_turns: the turns of an answer are learnt one by one, instead
    of a score of the whole.
    """

    def __init__(self, *, by_turns: bool = True) -> None:
        self.by_turns = by_turns

    def first_example(self, row: Row) -> Scored:
        return preference(row)

    def problem(self, row: Row) -> str | None:
        pair = preference(row)
        chosen, rejected = pair.answers
        if is_empty(chosen) or is_empty(rejected):
            return EMPTY
        if chosen == rejected:
            return EQUAL
        for side in pair.answers:
            if isinstance(side, str):
                continue
            learnt = learnt_turns(pair.prompt, side, continues=pair.continues)
            if not learnt or not (self.by_turns or is_learnt(side[-1])):
                return UNLEARNT
        return None


class Labels(Examples):
    """An answer and its label. Files are often sorted by label, and a prompt has answers of both."""

    is_shuffled = True
    keeps_repeats = True
    has_labels = True

    def first_example(self, row: Row) -> Scored:
        return labelled(row)

    def problem(self, row: Row) -> str | None:
        (answer,) = labelled(row).answers
        if is_empty(answer):
            return EMPTY
        return None if isinstance(answer, str) or is_learnt(answer[-1]) else UNLEARNT


class Judged(RowKind):
    """What a reward model learns from, by the columns of the first row: pairs (`chosen`, `rejected`), or labels
    (`label`).
    """

    is_shuffled = True

    def by_columns(self, first: Row) -> Examples:
        if first.get("chosen") is not None or first.get("rejected") is not None:
            return Pairs(by_turns=False)
        if first.get("label") is not None:
            return Labels()
        raise ValueError(
            "a reward model learns from pairs (`chosen`, `rejected`) or from labels (`label`); "
            f"this row has {join_truncated(first)}. Rename columns with task.columns.NEW=OLD"
        )


def refuse_media(row: Row) -> None:
    """Raise ValueError for a row with a video or a sound, which nothing shows to the model."""
    for name in MEDIA_COLUMNS:
        if row.get(name) not in (None, "", [], {}):
            raise ValueError(
                f"the column '{name}' holds {row[name]!r:.60}, and only text and images are read "
                f"(task.columns.unused={name} leaves the column out)"
            )


def _may_hold_more(column: Any) -> bool:
    """Return whether a column may have messages with more than a role and a content."""
    if isinstance(column, str):  # JSON of a .csv
        return column.lstrip().startswith("[")
    if not isinstance(column, list):
        return False
    return any(isinstance(message, dict) and not PLAIN_KEYS.issuperset(message) for message in column)


def given_beside(row: Row) -> list[str]:
    """Return those of BESIDE_COLUMNS that hold something in a row."""
    return [name for name in BESIDE_COLUMNS if str(row.get(name) or "").strip() not in ("", "[]", "null")]


def has_system(prompt: Prompt | None) -> bool:
    return any(message["role"] == "system" for message in as_messages(prompt))


def is_empty(answer: Side) -> bool:
    """Return whether the last message of an answer is blank; one with tool calls or thoughts is not."""
    last = {"content": answer} if isinstance(answer, str) else answer[-1]
    return {*last} - MARKS <= {"role", "content"} and not last["content"].strip()


Made = TypeVar("Made")


def at_place(place: str, make: Callable[[Row], Made], row: Row) -> Made:
    """Call a function with a row; its ValueError gets the row's place."""
    try:
        return make(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


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


def _shown(side: Side | None) -> str:
    text = side if isinstance(side, str) else " ".join(f"[{m['role']}] {m['content']}" for m in side or [])
    return repr(one_line(with_marks_shown(text), 120))


def beginning(row: Row) -> str:
    """Return the first characters of a row on one line, to quote it in an error."""
    text = str(row)[:500]
    return one_line(with_marks_shown(text) if row.get("images") else text, 100)


# ---- texts and conversations ----


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
