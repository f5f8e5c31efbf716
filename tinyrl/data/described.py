"""What a run says of its rows: what they are taken for, with one example, and which row is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tinyrl.data.messages import CONVERSATIONS, Message, Prompt
from tinyrl.data.readers import Row
from tinyrl.data.shapes import READINGS, TEXT_COLUMNS, RowKind, column_of
from tinyrl.text import one_line

SHOWN = 240  # characters of an example's prompt, and of its answer


def described(rows: list[Row], what: RowKind) -> list[str]:
    """What rows are taken for, in a line, and the first of them as an example, in another."""
    counts = Counter(_form(row, what) for row in rows)
    forms = "; ".join(f"{count:,} of {form}" for form, count in counts.most_common())
    if not rows:
        return ["rows: none"]
    first = READINGS[what](rows[0])
    if what == "text":
        more = f" (the last of {len(first)} of its row)" if len(first) > 1 else ""
        tools = f" (tools: {len(first[-1].tools)})" if first[-1].tools else ""
        example = f"{_shown(first[-1].prompt)}{tools} -> {_shown(first[-1].answer)}{more}"
    elif what == "pairs":
        margin = "" if first.margin is None else f" by {first.margin:g}"
        example = f"{_shown(first.prompt)} -> {_shown(first.chosen)} better{margin} than {_shown(first.rejected)}"
    else:
        prompt = "" if first.prompt is None else f"{_shown(first.prompt)} -> "
        example = f"{prompt}{_shown(first.answer)} is {one_line(repr(first.label), 40)}"
    return [f"rows: {forms}", f"for example: {example}"]


@contextmanager
def quoting(row: Row) -> Iterator[None]:
    """Put the row behind a ValueError that the block raises about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}\n  in the row {beginning(row)}") from error


def beginning(row: Row) -> str:
    """The beginning of a row, in one harmless line."""
    return one_line(str(row)[:500], 100)


def _form(row: Row, what: RowKind) -> str:
    """The columns that a row is read by, as a sentence names them."""
    has_prompt = row.get("prompt") is not None
    if what == "pairs":
        side = "messages" if isinstance(row.get("chosen"), list) else "text"
        where = "behind `prompt`" if has_prompt else "with the prompt inside both"
        return f"`chosen` and `rejected` ({side}) {where}{', with `margin`' if row.get('margin') is not None else ''}"
    column = column_of(row, TEXT_COLUMNS)
    label = "" if what == "text" else " with `label`" if row.get("label") is not None else " with `score`"
    if column in CONVERSATIONS:
        return f"`{column}`{', one example for each turn of the assistant' if what == 'text' else label}"
    return f"`prompt` and `{column}`{label}" if has_prompt else f"`{column}`{label}"


def _shown(side: Prompt | None) -> str:
    """A text or messages in one harmless line; of a long one the beginning and the end."""
    if side is None:
        return "(the beginning)"
    text = repr(side) if isinstance(side, str) else " | ".join(_said(message) for message in side)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return one_line(text, 2 * SHOWN)


def _said(message: Message) -> str:
    calls = f" (calls {json.dumps(message['tool_calls'], default=str)[:80]})" if message.get("tool_calls") else ""
    return f"{message['role']}: {message['content']!r}{calls}"
