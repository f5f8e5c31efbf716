"""Formats of rows: texts, conversations, preference pairs and labelled answers, in the columns that people have.

A column that is null counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from tinyrl.text import did_you_mean, listed, one_line, shortened

Side = str | list[Message]  # an answer: what follows a prompt
Objective = Literal["pairs", "labels"]

TEXT_COLUMNS = ("completion", "messages", "conversations", "text")  # the first that a row has is the one it is read by
ASSISTANT_OF_HH, HUMAN_OF_HH = "\n\nAssistant:", "\n\nHuman:"  # turns of transcripts written as one text
EQUAL = "two equal answers"
SHOWN = 240  # characters of an example's prompt, and of its answer
MOST_SHOWN = 5  # labels in an error


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

    @property
    def unusable(self) -> str | None:
        """Why nothing can be learnt from it; None where something can."""
        if any(map(is_empty, self.answers)):
            return "an empty answer"
        return EQUAL if len(self.answers) > 1 and self.answers[0] == self.answers[1] else None


def is_empty(answer: Side) -> bool:
    """Return whether the last message of an answer is blank; one with tool calls or thoughts is not."""
    last = {"content": answer} if isinstance(answer, str) else answer[-1]
    return {*last} <= {"role", "content"} and not last["content"].strip()


def unusable(row: Row, what: Literal["text"] | Objective, *, prompts_count: bool = False) -> str | None:
    """Return why no method can learn from a row; None if one can. `prompts_count`: the prompts of texts are learnt too.
    Raises ValueError for one that cannot be read.
    """
    if what != "text":
        return judged(row, what).unusable
    learnt = (not is_empty(each.answer) or (prompts_count and each.prompt) for each in text_examples(row))
    return None if any(learnt) else "an empty answer"


def leave_out(rows: list[Row], reasons: list[str | None], notes: list[str]) -> None:
    """Count the rows with a reason to be left out, in a note that quotes the first. Raises ValueError where none is
    left.
    """
    why = Counter(filter(None, reasons))
    what = f"{why.total():,} of {len(rows):,} rows ({', '.join(f'{n:,} with {reason}' for reason, n in why.items())})"
    if why and why.total() == len(rows):
        raise ValueError(f"no usable rows: {what}")
    if why:
        first = next(row for row, reason in zip(rows, reasons, strict=True) if reason)
        notes.append(f"warning: {what} are left out; the first is {beginning(first)}")


# ---- texts and conversations ----


def text_examples(row: Row) -> list[TextExample]:
    """Return the examples of a row: its text, its completion, or each assistant turn behind the messages before it.

    Tool and user turns are context, as is an assistant turn with nothing before it. Raises ValueError, naming the
    columns, for a row without `completion`, `messages`, `conversations` and `text`.
    """
    _, prompt, answer = _text_of(row)
    if isinstance(answer, str):
        return [TextExample(prompt, answer)]
    before = as_messages(prompt)
    messages, start = [*before, *answer], max(1, len(before))
    tools = tools_of(row.get("tools"))
    turns = [i for i, message in enumerate(messages) if i >= start and message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"there is no turn of the assistant with a message before it, only {roles_of(messages)}")
    return [TextExample(messages[:i], [messages[i]], tools) for i in turns]


def shared_prompt(row: Row) -> Any:
    """Return what rows of the same prompt have in common, so that they stay on one side of a held-out split: the
    prompt, the messages before the first turn of the assistant, what both sides of a pair begin with, or the text.
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
    """The column that a row is read by, the prompt before it, and its value; a conversation holds its prompt."""
    column = column_of(row, TEXT_COLUMNS)
    if column in CONVERSATIONS:
        return column, None, conversation(row, column)
    prompt = "" if row.get("prompt") == "" else _prompt(row)  # a text may stand alone, behind an empty prompt
    return column, prompt, _side(row, column)


# ---- pairs and labels ----


def objective_of(row: Row) -> Objective:
    """Return the objective that a row's columns tell: pairs (`chosen`, `rejected`) or labels (`label`).
    Raises ValueError where they tell none.
    """
    for names in ({name for name, value in row.items() if value is not None}, {*row}):
        if names & {"chosen", "rejected"}:
            return "pairs"
        if "label" in names:
            return "labels"
    raise ValueError(
        "a reward model learns from pairs (`chosen`, `rejected`) or from labels (`label`); "
        f"this row has {listed(row)}. Rename columns with task.columns.NEW=OLD"
    )


def judged(row: Row, objective: Objective) -> Scored:
    """Read a row for a reward model: a pair, or a text with its `label`. A conversation is judged by its last message,
    which must be the assistant's. Raises ValueError, naming the columns.
    """
    if objective == "pairs":
        return preference(row)
    value = _number(row[column_of(row, ("label",))], "label")
    column, prompt, answer = _text_of(row)
    if isinstance(answer, str):
        return Scored(prompt, (answer,), value)
    messages = [*as_messages(prompt), *answer]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(f"'{column}' must end with an answer of the assistant, not {roles_of(messages)}")
    return Scored(messages[:-1], (messages[-1:],), value)


def two_labels(values: Iterable[float]) -> tuple[float, float]:
    """Return (lower, higher) label of some rows; the higher one is the good one. Raises ValueError unless there are
    two: one score ranks answers, and cannot tell several kinds apart.
    """
    there = sorted(set(values))
    if len(there) == 2:
        return there[0], there[1]
    shown = ", ".join(f"{value:g}" for value in there[:MOST_SHOWN]) + (", ..." if len(there) > MOST_SHOWN else "")
    if len(there) < 2:
        raise ValueError(f"every row to train on has the label {shown}: there is nothing to tell apart")
    raise ValueError(
        f"the rows have {len(there)} different labels ({shown}), and a reward model's one score tells two apart. Of "
        "ratings, make pairs (`chosen`, `rejected`, `margin`) or labels of 0 and 1"
    )


def preference(row: Row) -> Scored:
    """Read a row's `chosen` and `rejected` behind their prompt: the column `prompt`, or their common beginning.

    Messages share whole messages, and each side keeps one. Of texts the shared beginning ends after the last
    "Assistant:" of a transcript, or else before the word in which they differ. Sides that are empty (null, []) or equal
    need not hold a prompt. Raises ValueError, naming the columns.
    """
    for column in ("chosen", "rejected"):
        if column not in row:
            column_of(row, (column,))
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
    return Scored(*_message_pair(given, chosen, rejected), margin)


def _message_pair(
    given: Prompt | None, chosen: list[Message], rejected: list[Message]
) -> tuple[Prompt, tuple[Side, Side]]:
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
                f"`chosen` and `rejected` begin with {roles_of(prompt)}, which differs from `prompt`: {given!r:.60}"
            )
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if side[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must end with a turn of the assistant, not {roles_of(side)}")
    return prompt, sides


def _shared_text(chosen: str, rejected: str) -> int:
    """The length of the prompt that both texts begin with."""
    both = zip(chosen, rejected, strict=False)
    most = min(len(chosen), len(rejected)) - 1
    shared = chosen[: next((i for i, (a, b) in enumerate(both) if a != b), most)]
    assistant = shared.rfind(ASSISTANT_OF_HH)
    if assistant >= 0 and HUMAN_OF_HH not in shared[assistant:]:
        return assistant + len(ASSISTANT_OF_HH)
    words = [match.start() for match in re.finditer(r"(?<=\S)\s+", shared)]
    if not words:
        raise ValueError(
            f"`chosen` and `rejected` have no first word in common, and there is no `prompt`: {shortened(chosen, 60)!r}"
        )
    prompt = shared[: words[-1]]
    thought = prompt.rfind("<think>")
    if thought > prompt.rfind("</think>"):  # a prompt does not end in the middle of thinking
        words = [word for word in words if word <= thought] or [thought]
    return words[-1]


# ---- columns ----


def column_of(row: Row, wanted: tuple[str, ...]) -> str:
    """Return the first of some columns that a row has and that is not null. Raises ValueError where there is none."""
    for name in wanted:
        if row.get(name) is not None:
            return name
    for name in wanted:
        if name in row:
            raise ValueError(f"'{name}' is null")
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


def _prompt(row: Row) -> Prompt | None:
    return None if row.get("prompt") is None else prompt_of(row["prompt"])


def _number(value: Any, column: str) -> float:
    """A label or margin as a number; a .csv has them as text, and only a label may be true or false."""
    found = math.nan
    try:
        if column == "label":
            text = str(value).strip().lower()
            found = float({"true": 1, "false": 0}.get(text, text))
        elif not isinstance(value, bool):
            found = float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    if abs(found) <= LARGEST:
        return found
    what = "true, false or a number" if column == "label" else "a number"
    raise ValueError(f"'{column}' must be {what}, not {value!r:.60} (at most {LARGEST:,})")


# ---- notes and errors about rows ----


def described(rows: list[Row], what: Literal["text"] | Objective) -> list[str]:
    """Return a line that counts the formats of rows, and one with the first row as an example."""
    if not rows:
        return ["rows: none"]
    counts = Counter(_format(row, what) for row in rows)
    formats = "; ".join(f"{count:,} of {name}" for name, count in counts.most_common())
    if what == "text":
        *others, last = text_examples(rows[0])
        more = f" (the last of {1 + len(others)} of its row)" if others else ""
        tools = f" (tools: {len(last.tools)})" if last.tools else ""
        prompt = "(the beginning)" if last.prompt is None else _shown(last.prompt)
        example = f"{prompt}{tools} -> {_shown(last.answer)}{more}"
    else:
        first = judged(rows[0], what)
        example = "" if first.prompt is None else f"{_shown(first.prompt)} -> "
        answer, *rejected = map(_shown, first.answers)
        by = f" by {first.value:g}" if first.value else ""
        example += f"{answer} better{by} than {rejected[0]}" if rejected else f"{answer} is {first.value:g}"
    return [f"rows: {formats}", f"for example: {example}"]


def _format(row: Row, what: Literal["text"] | Objective) -> str:
    has_prompt = row.get("prompt") is not None
    if what == "pairs":
        side = "messages" if isinstance(row.get("chosen"), list) else "text"
        where = "behind `prompt`" if has_prompt else "with the prompt inside both"
        return f"`chosen` and `rejected` ({side}) {where}{', with `margin`' if row.get('margin') is not None else ''}"
    column, label = column_of(row, TEXT_COLUMNS), "" if what == "text" else " with `label`"
    if column in CONVERSATIONS:
        return f"`{column}`{', one example for each turn of the assistant' if what == 'text' else label}"
    return f"`prompt` and `{column}`{label}" if has_prompt else f"`{column}`{label}"


def _shown(side: Side) -> str:
    def message_text(message: Message) -> str:
        calls = f" (calls {json.dumps(message['tool_calls'], default=str)[:80]})" if message.get("tool_calls") else ""
        return f"{message['role']}: {message['content']!r}{calls}"

    text = repr(side) if isinstance(side, str) else " | ".join(map(message_text, side))
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return one_line(text, 2 * SHOWN)


@contextmanager
def quoting(row: Row) -> Iterator[None]:
    """Put the row behind a ValueError that the block raises about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}\n  in the row {beginning(row)}") from error


def beginning(row: Row) -> str:
    return one_line(str(row)[:500], 100)
