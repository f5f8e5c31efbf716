"""Kinds of rows: what a method makes of rows in any format (formats.py), texts, pairs or labels, and which of them it
leaves out. Prompts of a task are a kind too, in tasks/run_rows.py. Errors are ValueErrors that name the columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from tinyrl.data.formats import (
    KNOWN_COLUMNS,
    Scored,
    TextExample,
    beginning,
    is_empty,
    labelled,
    preference,
    shared_prompt,
    text_examples,
)
from tinyrl.data.images import images_of, with_marks_shown
from tinyrl.data.messages import Message, Prompt, as_messages
from tinyrl.data.readers import Placed, Row
from tinyrl.data.rows import shuffled
from tinyrl.data.turns import MARKS, Side, is_learnt, learnt_turns
from tinyrl.process.signals import watched
from tinyrl.text import join_truncated, one_line

EQUAL = "two equal answers"
EMPTY = "an empty answer"
UNLEARNT = "every answer marked as one not to learn"
MEDIA_COLUMNS = ("video", "videos", "audio", "audios")  # which nothing shows to a model
PLAIN_KEYS = frozenset(("role", "content", "from", "value"))
BESIDE_COLUMNS = ("system", "tools")  # parts of a conversation that some formats have outside of its messages


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
