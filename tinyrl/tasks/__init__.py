"""Tasks, and their rows: the task's own or the user's, checked, split and cut to size.

A task is a module with its TASK, here or beside the embedded models (starter/), or a person's own as file.py:TASK. Rows
of task.data are checked one by one before anything is trained, so a bad row is reported with its file and line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Hashable
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
from tinyrl.text import first_line, join_truncated

STARTER_TASKS = ("sort", "reviews", "lookup")  # of the embedded models: tinyrl/starter/<name>.py, with its TASK
TASKS = (  # each of the others is tinyrl/tasks/<name>.py, with its TASK
    *STARTER_TASKS, "sums", "gsm8k", "countdown", "knights_and_knaves", "search_qa", "reasoning_gym", "rows",
)  # fmt: skip
RESERVED_COLUMNS = {"prompts", "completions", "completion_ids"}  # arguments of every reward function
HOLD_PROMPTS = {*CONVERSATIONS, "chosen"}  # columns whose beginning is a prompt, if a row has no other
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
        room = "starter" if name in STARTER_TASKS else "tasks"
        task = importlib.import_module(f"tinyrl.{room}.{name}").TASK
    else:
        raise ValueError(f"task.name: there is no task '{name}'. Tasks: {', '.join(TASKS)}, or file.py:TASK")
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
    return load_splits(config)[split == "eval"]


def load_splits(config: Config) -> tuple[list[Row], list[Row]]:
    """Load the training and held-out rows of a run: its task's own, or those of task.data and task.eval_data. Without
    eval_data some rows of data are held out. A file is read once, and no further than max_samples needs.
    """
    task, where = load_task(config.task.name or "rows"), config.task
    data, most = where.data, where.max_samples

    def read(source: str, most: int | None) -> list[Row]:
        rows: list[Row] = []
        for place, row in placed_rows(source, columns=where.columns, revision=where.revision, most=most):
            try:
                if "prompt" in task.columns and row.get("prompt") is None and {*row} & HOLD_PROMPTS:
                    row = {**row, "prompt": shared_prompt(row)}
                check_row(task, row, verified=config.reward.is_verifier)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            rows.append(row)
        names = list(dict.fromkeys(name for row in rows for name in row))  # rewards get each column as a list
        return [{name: row.get(name) for name in names} for row in rows]

    def own(split: str, source: str | None) -> list[Row]:
        if task.generate is not None:
            return task.generate(source, split, SPLIT_SEED)
        return task.rows(split) if source is None else read(source, most)

    if data is not None and where.eval_data is None and task.generate is None:
        rows = read(data, rows_needed(most, split=True))
        train, held_out = train_eval_split(rows, prompt=task.prompt, seed=SPLIT_SEED)
    else:
        train, held_out = own("train", data), own("eval", where.eval_data or data)
    return train[:most], held_out[:most]


def check_row(task: Task, row: Row, *, verified: bool) -> None:
    """Raise ValueError for a row that the task cannot use. `verified`: the task's verifier is the reward, so it must
    be able to judge the row.
    """
    for column in task.columns:
        if column not in row:
            columns = f"Columns: {join_truncated(row)}. Rename one with task.columns.{column}=OLD"
            raise ValueError(f"no column '{column}', which task '{task.name}' needs. {columns}")
    for column in RESERVED_COLUMNS & {*row}:
        rename = f"Rename it with task.columns.NEW={column}"
        raise ValueError(f"no column may be called '{column}', an argument of reward functions. {rename}")
    task.prompt(row)
    task.gold(row)
    if verified and task.check_reference is not None:
        task.check_reference(row)


def row_texts(run: RunDir, keys: dict[int, str], notes: list[str]) -> dict[int, str]:
    """Return the texts (of messages the last) of training prompts by the numbers and keys of a run's prompts.jsonl, of
    rows that still exist. An error in reading rows is added to `notes`.
    """
    try:
        config = run.read_config()
        prompt = load_task(config.task.name or "rows").prompt
        prompts = {row_key(row): prompt(row) for row in load_split(config, "train")}
    except (OSError, ValueError) as error:
        notes.append(f"prompts are shown without their texts: {first_line(error)}")
        return {}
    return {i: str(as_messages(prompts[key])[-1]["content"]) for i, key in keys.items() if key in prompts}


def export_rows(config: Config, keys: set[str], file: Path) -> str:
    """Write the training rows with these keys, as task.data of the same task; return a line about it. Raises ValueError
    if the file exists, or no row has one of the keys.
    """
    rows = {key: row for row in load_split(config, "train") if (key := row_key(row)) in keys}
    if file.exists() or not rows:
        why = f"{file} exists" if file.exists() else f"of {len(keys):,} hard prompts none is in the training rows"
        raise ValueError(f"--export-hard: {why}")
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows.values()), encoding="utf-8")
    found = f"wrote {len(rows):,} of {len(keys):,} hard prompts to {file}"
    return f"{found}; train on them with task.data={file}, and give task.eval_data another file"
