"""The table of tasks, and the rows of one: its own or the user's, checked, split and cut to size.

Tasks are modules, imported when asked for. Rows of task.data are checked one by one against the task before anything is
trained, so a bad row is reported with its file and line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tinyrl.config.schema import Config
from tinyrl.config.sections import TaskConfig
from tinyrl.data.formats import shared_prompt
from tinyrl.data.messages import CONVERSATIONS, Prompt, as_messages, prompt_of
from tinyrl.data.readers import Placed, Row, placed_rows
from tinyrl.data.rows import SPLIT_SEED, hold_out, row_key, rows_needed
from tinyrl.environments import Reply
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import did_you_mean, first_line, listed

TASKS = (  # each is tinyrl/tasks/<name>.py, with its TASK
    "sort", "sums", "reviews", "lookup", "gsm8k", "countdown", "knights_and_knaves", "search_qa", "reasoning_gym",
    "rows",
)  # fmt: skip
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")  # a reward function gets these from us
Grading = Literal["task", "math"]
MATH_GRADER = "tinyrl.tasks.math_grading:equal_answers"
FULL_MARKS = 1.0 - 1e-9  # weighted sums of floats miss 1.0 by a rounding error


def own_prompt(row: Row) -> Prompt:
    return prompt_of(row["prompt"])


def no_rows(split: str) -> list[Row]:
    """Of a task whose data is the user's own."""
    raise ValueError("there is no data: give task.data=FILE.jsonl")


@dataclass(frozen=True)
class Task:
    """A task; everything here is plain Python and answers without torch.

    `prompt`, `gold` and `check_reference` raise ValueError with a sentence about the row when it is unusable (a wrong
    type, say); the reader of the rows adds the file and the line.
    """

    name: str
    summary: str  # one line, for `tinyrl list tasks`
    verify: Callable[..., list[float | None]] | None  # verify(prompts, completions, **columns), the whole batch
    gold: Callable[[Row], str | None]  # an answer that must score full marks; None where there is none
    columns: tuple[str, ...]  # columns every row must have
    rows: Callable[[str], list[Row]] = no_rows  # rows("train" | "eval"): its own, the same every time, disjoint
    prompt: Callable[[Row], Prompt] = own_prompt
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


def load_task(name: str, *, grading: Grading = "task") -> Task:
    """The task called `name`, with its own verifier or graded as mathematics.

    ValueError where there is none of that name (lists the names), it cannot be graded so, or math-verify is missing.
    """
    if name not in TASKS:
        meant = did_you_mean(name, list(TASKS))
        raise ValueError(f"task.name: there is no task '{name}'.{meant} Tasks: {', '.join(TASKS)}")
    task: Task = importlib.import_module(f"tinyrl.tasks.{name}").TASK
    if grading == "task":
        return task
    if not task.can_grade_math:
        raise ValueError(
            f"task.grading=math compares a column 'answer', and task {name} has a rule of its own; "
            "it is for the tasks gsm8k and rows"
        )
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("task.grading=math needs math-verify: pip install 'tinyrl[math]'")
    return replace(task, grader=MATH_GRADER)


def load_splits(config: Config, splits: Sequence[str] = ("train", "eval")) -> list[list[Row]]:
    """Return the rows of a run by splits."""
    task = load_task(config.task.name or "rows")
    return read_splits(task, config.task, splits, verified=config.reward.is_verifier)


def load_split(config: Config, split: str) -> list[Row]:
    return load_splits(config, [split])[0]


def load_rows(task: Task, split: str, *, verified: bool = True, **settings: Any) -> list[Row]:
    """Return the rows of "train" or "eval" of a task by `settings` of the section task."""
    return read_splits(task, TaskConfig(**settings), [split], verified=verified)[0]


def read_splits(task: Task, where: TaskConfig, splits: Sequence[str], *, verified: bool) -> list[list[Row]]:
    """Read splits of a task: its own rows, or those of task.data and task.eval_data.

    Without eval_data some rows of data are held out (`hold_out`), and it is read once. No more is read than max_samples
    takes. `verified`: the task's verifier is the reward, so every row must be one that it can judge.
    """
    data, eval_data, most = where.data, where.eval_data, where.max_samples
    if where.columns and data is None and eval_data is None:
        raise ValueError("task.columns renames the columns of task.data, and no task.data is given")

    def read(source: str, most: int | None) -> list[Row]:
        placed = placed_rows(source, columns=where.columns, revision=where.revision, most=most)
        return _usable(task, placed, verified=verified)

    def rows_of(split: str) -> list[Row]:
        source = data if split == "train" else eval_data or data
        if task.generate is not None:
            return task.generate(source, split, SPLIT_SEED)
        return task.rows(split) if source is None else read(source, most)

    if data is None and eval_data is None and task.rows is no_rows and task.generate is None:
        needed = " and ".join(f"'{name}'" for name in task.columns)
        raise ValueError(f"task '{task.name}' has no data of its own: give task.data=FILE.jsonl with a column {needed}")
    if data is not None and eval_data is None and task.generate is None:
        rows = read(data, rows_needed(most, split=True))
        train, held_out = hold_out(rows, prompt=task.prompt, seed=SPLIT_SEED)
        found = {"train": train, "eval": held_out}
    else:
        found = {split: rows_of(split) for split in splits}
    return [found[split][:most] for split in splits]


def _usable(task: Task, placed: Placed, *, verified: bool) -> list[Row]:
    """Return rows for a task, all with the same columns, since rewards get each as a list. Raises ValueError, with the
    place, for the first that it cannot use.
    """
    rows: list[Row] = []
    for place, row in placed:
        try:
            rows.append(_with_prompt(_with_answer(row)) if "prompt" in task.columns else row)
            check_row(task, rows[-1], verified=verified)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def check_row(task: Task, row: Row, *, verified: bool) -> None:
    """Raise ValueError for a row that the task cannot use."""
    for column in task.columns:
        if column not in row:
            meant = did_you_mean(column, list(row))
            raise ValueError(
                f"no column '{column}', which task '{task.name}' needs.{meant} "
                f"Columns: {listed(row)}. Rename one with task.columns.{column}=OLD"
                + (", or say that the rows are your own: task.name=rows" if task.name != "rows" else "")
            )
    for column in RESERVED_COLUMNS:
        if column in row:
            raise ValueError(
                f"no column may be called '{column}', reward functions get an argument of that name. "
                f"Rename it with task.columns.NEW={column}"
            )
    task.prompt(row)
    task.gold(row)
    if verified and task.check_reference is not None:
        task.check_reference(row)


def _with_answer(row: Row) -> Row:
    """Add verl's `reward_model.ground_truth` as the `answer` of a row without one."""
    inner = row.get("reward_model")
    if row.get("answer") is not None or not isinstance(inner, dict) or inner.get("ground_truth") is None:
        return row
    return {**row, "answer": inner["ground_truth"]}


def layout_notes(row: Row) -> list[str]:
    """Return a line where `_with_answer` has found a row's answer."""
    inner = row.get("reward_model")
    if not isinstance(inner, dict) or row.get("answer") is not inner.get("ground_truth", inner):
        return []
    return ["rows in verl's layout: `answer` is reward_model.ground_truth"]


def _with_prompt(row: Row) -> Row:
    """Add the prompt that a conversation or a preference pair begins with to a row without a `prompt`."""
    has = {name for name, value in row.items() if value is not None}
    if "prompt" in has or not (has & {*CONVERSATIONS} or has >= {"chosen", "rejected"}):
        return row
    return {**row, "prompt": shared_prompt(row)}


def row_texts(run: RunDir, keys: dict[int, str], notes: list[str]) -> dict[int, str]:
    """Return the texts of training prompts by the numbers and keys of a run's prompts.jsonl, of messages the last, as
    far as the rows are still there. An error in reading rows is added to `notes`.
    """
    try:
        config = run.read_config()
        prompt = load_task(config.task.name or "rows").prompt
        prompts = {row_key(row): prompt(row) for row in load_split(config, "train")}
    except (OSError, ValueError) as error:
        notes.append(f"prompts are shown as far as samples.jsonl has them: {first_line(error)}")
        return {}
    found = {index: as_messages(prompts[key]) for index, key in keys.items() if key in prompts}
    return {index: str(messages[-1]["content"]) for index, messages in found.items()}


def export_rows(config: Config, keys: set[str], file: Path) -> str:
    """Write the training rows with these keys, as task.data of the same task; return a line about it. Raises ValueError
    where the file exists, or no row has one of the keys.
    """
    if file.exists():
        raise ValueError(f"--export-hard: {file} exists; give another name")
    rows = {key: row for row in load_split(config, "train") if (key := row_key(row)) in keys}
    if not rows:
        why = "no prompt is hard" if not keys else "none of them is in the training rows any more"
        raise ValueError(f"--export-hard: {why}, so there is nothing to write")
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=True, default=str) + "\n" for row in rows.values())
    gone = len(keys) - len(rows)
    left = f"; {gone:,} are not in the training rows any more" if gone else ""
    return f"{len(rows):,} rows in {file}, to train on: task.data={file}, with a task.eval_data of its own{left}"
