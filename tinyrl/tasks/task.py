"""The parts of a task: rows, a prompt for each, a verifier, and a gold answer that must score full marks.

Each file tinyrl/tasks/<name>.py ends with `TASK = Task(...)` and is listed in tinyrl/tasks/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments import Reply

FULL_MARKS = 1.0 - 1e-9  # weighted sums of floats miss 1.0 by a rounding error


@dataclass(frozen=True)
class Task:
    """A task; everything here is plain Python and answers without torch.

    `prompt`, `gold` and `check_reference` raise ValueError with a sentence about the row when it is unusable (a wrong
    type, say); the reader of the rows adds the file and the line.
    """

    name: str
    summary: str  # one line, for `tinyrl tasks`
    rows: Callable[[str], list[Row]]  # rows("train" | "eval"): the task's own data, the same every time, disjoint
    prompt: Callable[[Row], Prompt]
    verify: Callable[..., list[float | None]] | None  # verify(prompts, completions, **columns), the whole batch
    gold: Callable[[Row], str | None]  # an answer that must score full marks; None where there is none
    columns: tuple[str, ...]  # columns every row must have
    check_reference: Callable[[Row], None] | None = None  # what `verify` needs of a row, asked where it is the reward
    answer: Callable[[str], Hashable | None] | None = None  # what a completion says (None: nothing), for majority@k
    can_grade_math: bool = False  # rows have an `answer` that may be compared as mathematics
    respond: Callable[..., list[Reply | str | None]] | None = None  # what answers between turns, see environments
    stop: tuple[str, ...] = ()  # texts that end a turn there
    environment: str | None = None  # or the environment of ours that does, by its name in environment.use
    asking_turn: Callable[[Row], str | None] | None = None  # a turn that `respond` answers, for trials without a model
    generate: Callable[[str | None, str, int], list[Row]] | None = None  # rows from (task.data, split, seed)
    grader: str | None = None  # "module:function" to be used for `verify`, in a process of its own

    @staticmethod
    def is_pass(score: float | None) -> bool:
        """True for full marks; None and NaN ("does not apply", dropped) are no pass."""
        return score is not None and score >= FULL_MARKS
