"""Tasks, and their rows: the task's own or the user's, checked, split and cut to size.

A task is a module with its TASK, here or beside the embedded models (starter/), or a person's own as file.py:TASK. Rows
of task.data are checked one by one before anything is trained, so a bad row is reported with its file and line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tinyrl.config.schema import Config
from tinyrl.data.formats import shared_prompt
from tinyrl.data.messages import CONVERSATIONS, Prompt, as_messages, prompt_of
from tinyrl.data.readers import Placed, Row, hub_name, placed_rows
from tinyrl.data.rows import SPLIT_SEED, example_rows, row_key, rows_needed, train_eval_split
from tinyrl.environments import Reply
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import first_line, join_truncated, truncate

if TYPE_CHECKING:
    from tinyrl.tasks.own import OwnCode
    from tinyrl.workers.calls import WorkerFunction

STARTER_TASKS = ("sort", "reviews", "lookup")  # of the embedded models: tinyrl/starter/<name>.py, with its TASK
TASKS = (  # each of the others is tinyrl/tasks/<name>.py, with its TASK
    *STARTER_TASKS, "sums", "gsm8k", "countdown", "knights_and_knaves", "search_qa", "reasoning_gym", "rows",
)  # fmt: skip
RESERVED_COLUMNS = {"prompts", "completions", "completion_ids"}  # arguments of every reward function
HOLD_PROMPTS = {*CONVERSATIONS, "chosen"}  # columns whose beginning is a prompt, if a row has no other
FULL_MARKS = 1.0 - 1e-9  # weighted sums of floats miss 1.0 by a rounding error


def no_rows(split: str) -> list[Row]:
    """Raise ValueError: a task without rows of its own needs task.data."""
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
    own: OwnCode | None = None  # of a person's own task: its file, whose functions run in a worker process

    def answers(self, texts: list[str]) -> list[Hashable | None] | None:
        """Return the answers in completions, of which equal ones are the same (None: no answer); None if the task does
        not know how.
        """
        if self.own is not None:
            return self.own.answers(texts)
        return None if self.answer is None else [self.answer(text) for text in texts]

    def replies_worker(self, *, timeout_s: float) -> WorkerFunction | None:
        """Return the worker that calls `respond` of a person's own task; None where `respond` is called here."""
        return None if self.own is None or self.respond is None else self.own.replies(timeout_s=timeout_s)

    @staticmethod
    def is_pass(score: float | None) -> bool:
        """Return whether a score is full marks; None and NaN ("does not apply") are not."""
        return score is not None and score >= FULL_MARKS


def load_task(name: str, *, grading: Literal["task", "math"] = "task") -> Task:
    """Load a task of tinyrl, or a person's own from `file.py:TASK`, with its own verifier or graded as mathematics.

    Raises ValueError for a task that does not exist or cannot be graded so, and if math-verify is missing.
    """
    if ".py:" in name:
        from tinyrl.tasks.own import own_task

        task = own_task(name)
    elif name in TASKS:
        room = "starter" if name in STARTER_TASKS else "tasks"
        task = importlib.import_module(f"tinyrl.{room}.{name}").TASK
    else:
        raise ValueError(f"task.name: there is no task '{truncate(name)}'. Tasks: {', '.join(TASKS)}, or file.py:TASK")
    if grading == "task":
        return task
    if not task.can_grade_math:
        raise ValueError(f"task.grading=math is for the tasks gsm8k and rows; task {name} has a rule of its own")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("task.grading=math needs math-verify: pip install 'tinyrl[math]'")
    return replace(task, grader="tinyrl.tasks.math_grading:equal_answers")


@dataclass(frozen=True)
class ReadRows:
    """The rows that a run learns from: notes about those that were left out; text of ppo.ptx_data."""

    train: list[Row]
    held_out: list[Row]
    notes: list[str]
    text: Placed


_read_ahead: dict[str, ReadRows] = {}  # until a run takes them


def read_ahead(config: Config) -> None:
    """Read and check a person's own rows, of files or of a task, before torch is imported, and keep them for
    `take_rows`; the hub is not asked yet. Raises ValueError for a bad one.
    """
    _read_ahead.clear()
    sources = [path for path in (config.task.data, config.task.eval_data, config.ppo.ptx_data) if path is not None]
    is_own = bool(sources) or load_task(config.task.name or "rows").own is not None
    if is_own and not any(map(hub_name, sources)):
        _read_ahead[_rows_key(config)] = rows_of_run(config)


def take_rows(config: Config) -> ReadRows:
    """Return the rows of a run: those that were read ahead by the same settings, once, or else read now."""
    return _read_ahead.pop(_rows_key(config), None) or rows_of_run(config)


def rows_of_run(config: Config) -> ReadRows:
    """Read and check the rows of a run. Raises ValueError for a bad one, with its place."""
    notes = list[str]()
    text = placed_rows(config.ppo.ptx_data) if config.method == "ppo" and config.ppo.ptx_data else []
    train, held_out = load_splits(config) if config.samples else example_rows(config, notes)
    return ReadRows(train, held_out, notes, text)


def _rows_key(config: Config) -> str:
    """Return the settings that rows depend on, as text; of files the absolute paths."""
    where = config.task
    paths = (where.name, where.data, where.eval_data, config.ppo.ptx_data)
    files = [path and os.path.abspath(os.path.expanduser(path)) for path in paths]
    others = [where.revision, where.columns, where.max_samples, config.reward.is_verifier, config.sft.loss_on]
    return json.dumps([config.method, *files, *others])


def load_split(config: Config, split: str) -> list[Row]:
    """Read the rows of a split, `train` or `eval`. Raises ValueError, with its place, for a bad row."""
    return load_splits(config)[split == "eval"]


def load_splits(config: Config) -> tuple[list[Row], list[Row]]:
    """Load the training and held-out rows of a run: its task's own, or those of task.data and task.eval_data. Without
    eval_data some rows of data are held out. A file is read once, and no further than max_samples needs.
    """
    task = load_task(config.task.name or "rows")
    where = config.task
    data = where.data
    most = where.max_samples

    def read(source: str, most: int | None) -> list[Row]:
        placed = placed_rows(source, columns=where.columns, revision=where.revision, most=most)
        if "prompt" in task.columns:
            placed = [(place, _with_prompt(row, place)) for place, row in placed]
        if task.own is not None:
            task.own.prepare([row for _, row in placed])
        for place, row in placed:
            try:
                check_row(task, row, verified=config.reward.is_verifier)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        names = list(dict.fromkeys(name for _, row in placed for name in row))  # rewards get each column as a list
        rows = [{name: row.get(name) for name in names} for _, row in placed]
        if task.own is not None:
            task.own.prepare(rows)  # those that have got another column
        return rows

    def own(split: str, source: str | None) -> list[Row]:
        if task.generate is not None:
            return task.generate(source, split, SPLIT_SEED)
        return task.rows(split) if source is None else read(source, most)

    if data is not None and where.eval_data is None and task.generate is None:
        rows = read(data, rows_needed(most, split=True))
        train, held_out = train_eval_split(rows, prompt=task.prompt, seed=SPLIT_SEED)
    else:
        train = own("train", data)
        held_out = own("eval", where.eval_data or data)
    return train[:most], held_out[:most]


def _with_prompt(row: Row, place: str) -> Row:
    """Return a row with a prompt: the beginning of its conversation, if it has no other."""
    if row.get("prompt") is not None or not {*row} & HOLD_PROMPTS:
        return row
    try:
        return {**row, "prompt": shared_prompt(row)}
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


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
