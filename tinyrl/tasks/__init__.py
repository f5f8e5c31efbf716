"""Tasks, and their rows: the task's own or the user's, checked, split and cut to size.

A task is a module here with its TASK, or a person's own as file.py:TASK. Rows of task.data are checked one by one
before anything is trained, so a bad row is reported with its file and line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tinyrl.config.schema import Config
from tinyrl.data.formats import shared_prompt
from tinyrl.data.messages import CONVERSATIONS, Prompt, as_messages, prompt_of
from tinyrl.data.readers import Row, placed_rows
from tinyrl.data.rows import SPLIT_SEED, row_key, rows_needed, train_eval_split
from tinyrl.environments import Reply
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import did_you_mean, first_line, join_truncated

TASKS = (  # each is tinyrl/tasks/<name>.py, with its TASK
    "sort", "sums", "reviews", "lookup", "gsm8k", "countdown", "knights_and_knaves", "search_qa", "reasoning_gym",
    "rows",
)  # fmt: skip
RESERVED_COLUMNS = {"prompts", "completions", "completion_ids"}  # arguments of every reward function
FULL_MARKS = 1.0 - 1e-9  # weighted sums of floats miss 1.0 by a rounding error


def no_rows(split: str) -> list[Row]:
    """Mark a task whose rows are the user's own."""
    raise ValueError("there is no data: give task.data=FILE.jsonl")


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
    gold: Callable[[Row], str | None] = lambda row: None  # an answer that must score full marks; None: there is none
    columns: tuple[str, ...] = ("prompt",)  # columns that every row must have
    summary: str = ""  # one line, for `tinyrl list tasks`
    rows: Callable[[str], list[Row]] = no_rows  # rows("train" | "eval"): its own, the same every time, disjoint
    prompt: Callable[[Row], Prompt] = lambda row: prompt_of(row["prompt"])
    check_reference: Callable[[Row], None] | None = None  # checks what `verify` needs of a row, if it is the reward
    answer: Callable[[str], Hashable | None] | None = None  # a completion's answer (None: none), for majority@k
    can_grade_math: bool = False  # rows have an `answer` that may be compared as mathematics
    respond: Callable[..., list[Reply | str | None]] | None = None  # replies between turns, see environments
    stop: tuple[str, ...] = ()  # texts that end a turn there
    environment: str | None = None  # or the built-in environment that replies
    asking_turn: Callable[[Row], str | None] | None = None  # a turn that `respond` answers, for trials without a model
    generate: Callable[[str | None, str, int], list[Row]] | None = None  # rows from (task.data, split, seed)
    grader: str | None = None  # "module:function" to be used for `verify`, in a process of its own

    @staticmethod
    def is_pass(score: float | None) -> bool:
        """Return whether a score is full marks; None and NaN ("does not apply") are not."""
        return score is not None and score >= FULL_MARKS


def load_task(name: str, *, grading: Literal["task", "math"] = "task") -> Task:
    """Load a task of tinyrl, or a person's own from `file.py:TASK`, with its own verifier or graded as mathematics.

    Raises ValueError for a task that does not exist or cannot be graded so, and if math-verify is missing.
    """
    if ".py:" in name:
        task = _own_task(name)
    elif name in TASKS:
        task = importlib.import_module(f"tinyrl.tasks.{name}").TASK
    else:
        if name.endswith(".py"):
            raise ValueError(f"task.name={name}: add the name of the task in the file, {name}:TASK")
        near = did_you_mean(name, list(TASKS))
        raise ValueError(f"task.name: there is no task '{name}'.{near} Tasks: {', '.join(TASKS)}, or file.py:TASK")
    if grading == "task":
        return task
    if not task.can_grade_math:
        raise ValueError(f"task.grading=math is for the tasks gsm8k and rows; task {name} has a rule of its own")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("task.grading=math needs math-verify: pip install 'tinyrl[math]'")
    return replace(task, grader="tinyrl.tasks.math_grading:equal_answers")


@functools.cache
def _own_task(name: str) -> Task:
    place, _, variable = name.rpartition(":")
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise ValueError(f"task.name={name}: there is no file {file}")
    sys.path.insert(0, str(file.parent))  # it may import files beside it, as long as the process lives
    try:
        task = runpy.run_path(str(file)).get(variable)
    except Exception as error:
        raise ValueError(f"task.name={name}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"task.name={name}: {file} has no {variable} = tinyrl.tasks.Task(...)")
    return task


def load_split(config: Config, split: str) -> list[Row]:
    return load_splits(config, [split])[0]


def load_splits(config: Config, splits: Sequence[str] = ("train", "eval")) -> list[list[Row]]:
    """Load splits of a run's rows: its task's own, or those of task.data and task.eval_data.

    Without eval_data some rows of data are held out (`hold_out`). A file is read once, and no further than max_samples
    needs.
    """
    task, where = load_task(config.task.name or "rows"), config.task
    data, most = where.data, where.max_samples
    if where.columns and data is None and where.eval_data is None:
        raise ValueError("task.columns renames the columns of task.data, and no task.data is given")

    def read(source: str | None, most: int | None) -> list[Row]:
        if source is None:
            need = " and ".join(f"'{name}'" for name in task.columns)
            raise ValueError(
                f"task '{task.name}' has no rows of its own: give task.data=FILE.jsonl with columns {need}"
            )
        rows: list[Row] = []
        for place, row in placed_rows(source, columns=where.columns, revision=where.revision, most=most):
            try:
                rows.append(_completed(row) if "prompt" in task.columns else row)
                check_row(task, rows[-1], verified=config.reward.is_verifier)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        names = list(dict.fromkeys(name for row in rows for name in row))  # rewards get each column as a list
        return [{name: row.get(name) for name in names} for row in rows]

    if data is not None and where.eval_data is None and task.generate is None:
        rows = read(data, rows_needed(most, split=True))
        train, held_out = train_eval_split(rows, prompt=task.prompt, seed=SPLIT_SEED)
        return [(train if split == "train" else held_out)[:most] for split in splits]
    parts = []
    for split in splits:
        source = data if split == "train" else where.eval_data or data
        if task.generate is not None:
            rows = task.generate(source, split, SPLIT_SEED)
        else:
            rows = task.rows(split) if source is None and task.rows is not no_rows else read(source, most)
        parts.append(rows[:most])
    return parts


def check_row(task: Task, row: Row, *, verified: bool) -> None:
    """Raise ValueError for a row that the task cannot use. `verified`: the task's verifier is the reward, so it must
    be able to judge the row.
    """
    for column in task.columns:
        if column not in row:
            near, rename = did_you_mean(column, list(row)), f"Rename one with task.columns.{column}=OLD"
            raise ValueError(
                f"no column '{column}', which task '{task.name}' needs.{near} Columns: {join_truncated(row)}. {rename}"
            )
    for column in RESERVED_COLUMNS & {*row}:
        rename = f"Rename it with task.columns.NEW={column}"
        raise ValueError(f"no column may be called '{column}', an argument of reward functions. {rename}")
    task.prompt(row)
    task.gold(row)
    if verified and task.check_reference is not None:
        task.check_reference(row)


def _completed(row: Row) -> Row:
    """Add a missing `answer` from verl's reward_model.ground_truth, and a missing `prompt` from the beginning of a
    conversation or a preference pair.
    """
    has, inner = {name for name, value in row.items() if value is not None}, row.get("reward_model")
    if "answer" not in has and isinstance(inner, dict) and inner.get("ground_truth") is not None:
        row = {**row, "answer": inner["ground_truth"]}
    if "prompt" not in has and (has & {*CONVERSATIONS} or has >= {"chosen", "rejected"}):
        row = {**row, "prompt": shared_prompt(row)}
    return row


def layout_notes(row: Row) -> list[str]:
    """Return a line if `_completed` has found a row's answer."""
    inner = row.get("reward_model")
    if not isinstance(inner, dict) or row.get("answer") is not inner.get("ground_truth", inner):
        return []
    return ["rows in verl's layout: `answer` is reward_model.ground_truth"]


def row_texts(run: RunDir, keys: dict[int, str], notes: list[str]) -> dict[int, str]:
    """Return the texts (of messages the last) of training prompts by the numbers and keys of a run's prompts.jsonl, of
    rows that still exist. An error in reading rows is added to `notes`.
    """
    try:
        config = run.read_config()
        prompt = load_task(config.task.name or "rows").prompt
        prompts = {row_key(row): prompt(row) for row in load_split(config, "train")}
    except (OSError, ValueError) as error:
        notes.append(f"prompts are shown as far as samples.jsonl has them: {first_line(error)}")
        return {}
    return {i: str(as_messages(prompts[key])[-1]["content"]) for i, key in keys.items() if key in prompts}


def export_rows(config: Config, keys: set[str], file: Path) -> str:
    """Write the training rows with these keys, as task.data of the same task; return a line about it. Raises ValueError
    if the file exists, or no row has one of the keys.
    """
    if file.exists():
        raise ValueError(f"--export-hard: {file} exists; give another name")
    rows = {key: row for row in load_split(config, "train") if (key := row_key(row)) in keys}
    if not rows:
        raise ValueError(f"--export-hard: of {len(keys):,} hard prompts none is in the training rows")
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=True, default=str) + "\n" for row in rows.values())
    found = f"wrote {len(rows):,} of {len(keys):,} hard prompts to {file}"
    return f"{found}; train on them with task.data={file}, and give task.eval_data another file"
