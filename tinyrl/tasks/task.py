"""What a task is: its rows, prompts, reference answers, verifier, and replies between turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyrl.data.messages import Prompt, prompt_of
from tinyrl.data.readers import Row
from tinyrl.environments import Reply

if TYPE_CHECKING:
    from tinyrl.workers.calls import WorkerFunction

FULL_MARKS = 1.0 - 1e-9  # weighted sums of floats miss 1.0 by a rounding error


def no_rows(split: str) -> list[Row]:
    raise ValueError("task.data is missing: the task has no rows of its own; give task.data=FILE.jsonl")


def text_in(row: Row, column: str) -> str:
    """Return the text in a column, without spaces around it. Raises ValueError for another value, and an empty one."""
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"'{column}' must be text, not {value!r:.60}")
    return value.strip()


@dataclass(frozen=True)
class Task:
    """A task; everything here is plain Python and needs no torch.

    `prompt`, `gold` and `check_reference` raise ValueError with a sentence about an unusable row (a wrong type, say);
    the reader of the rows adds the file and the line.
    """

    name: str
    verify: Callable[..., list[float | None]] | None = None  # verify(prompts, completions, **columns), the whole batch
    right_or_wrong: bool = False  # `verify` scores 1 or 0 and nothing between, so that means of scores are shares
    gold: Callable[[Row], str | None] = lambda row: None  # an answer that must score full marks; None: there is none
    columns: tuple[str, ...] = ("prompt",)  # columns that every row must have
    summary: str = ""  # one line, for `tinyrl list tasks`
    rows: Callable[[str], list[Row]] = no_rows  # rows("train" | "eval"): its own, the same every time, disjoint
    prompt: Callable[[Row], Prompt] = lambda row: prompt_of(row["prompt"])
    compares_with: str = ""  # optional column that `verify` needs to give a row a score
    check_reference: Callable[[Row], None] | None = None  # checks what `verify` needs of a row, if it is the reward
    answer: Callable[[str, Row], Hashable | None] | None = None  # a completion's answer (None: none), for majority@k
    equal_by_verdict: bool = False  # right completions of a row have one answer, however `answer` spells theirs
    can_grade_math: bool = False  # rows have an `answer` that may be compared as mathematics
    respond: Callable[..., list[Reply | str | None]] | None = None  # replies between turns, see environments
    stop: tuple[str, ...] = ()  # texts that end a turn there
    environment: str | None = None  # or the built-in environment that replies
    asking_turn: Callable[[Row], str | None] | None = None  # a turn that `respond` answers, for trials without a model
    generate: Callable[[str | None, str, int], list[Row]] | None = None  # rows from (task.data, split, seed)
    grader: str | None = None  # "module:function" to be used for `verify`, in a process of its own

    @property
    def has_verifier(self) -> bool:
        return self.verify is not None

    @property
    def has_replies(self) -> bool:
        """Return whether it replies between turns by a function of its own."""
        return self.respond is not None

    @property
    def has_turns(self) -> bool:
        return self.has_replies or self.environment is not None

    def prepare(self, rows: list[Row]) -> None:
        """Find prompts and reference answers of rows at once, where finding them one by one takes long."""

    def answers(self, texts: list[str], rows: list[Row]) -> list[Hashable | None] | None:
        """Return the answers in completions of rows, of which equal ones are the same (None: no answer); None if the
        task does not know how.
        """
        if self.answer is None:
            return None
        return [self.answer(text, row) for text, row in zip(texts, rows, strict=True)]

    def replies_worker(self, *, timeout_s: float) -> WorkerFunction | None:
        """Return the worker that calls `respond` of a user task; None where `respond` is called here."""
        return None

    @staticmethod
    def is_pass(score: float | None) -> bool:
        """Return whether a score is full marks; None and NaN ("does not apply") are not."""
        return score is not None and score >= FULL_MARKS
