"""Read the rows of a run (its task's, or task.data), convert them for its method, check and split them.

Rows are checked one by one before anything is trained, so a bad one is reported with its file and line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinyrl.config.conflicts import check_data_given
from tinyrl.config.schema import Config
from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS
from tinyrl.data.criteria import criteria_in
from tinyrl.data.formats import COMPLETION, KNOWN_COLUMNS, with_prompt
from tinyrl.data.image_rows import markdown_image, unshown_columns, written_place
from tinyrl.data.images import images_of, shown_text
from tinyrl.data.kinds import Judged, Pairs, RowKind, Texts, at_place, given_beside, has_system, refuse_media
from tinyrl.data.messages import Prompt, as_messages, prompt_of
from tinyrl.data.readers import Placed, Row
from tinyrl.data.rows import (
    HELD_OUT_SHARE,
    SPLIT_SEED,
    prompt_key,
    row_key,
    rows_needed,
    train_eval_split,
    trained_on_too,
)
from tinyrl.data.sources import placed_rows
from tinyrl.process.collector import without_collection
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks import task_of
from tinyrl.tasks.own import OwnTask
from tinyrl.tasks.task import Task
from tinyrl.text import first_line, join_truncated, truncate

INSTEAD = {
    "system": "write it as the first message, with the role system, or set task.system_prompt",
    "tools": "only sft shows them, with messages; describe them in a message",
}  # of columns that nothing reads
RESERVED_COLUMNS = {"prompts", "completions", "completion_ids"}  # arguments of every reward function


@dataclass(frozen=True)
class RunRows:
    """The rows that a run learns from. kind: what its method makes of them; notes: of rows that were left out and
    columns that nothing reads; text: of ppo.ptx_data.
    """

    train: list[Row]
    held_out: list[Row]
    kind: RowKind
    notes: list[str]
    text: Placed = field(default_factory=list)

    @property
    def has_images(self) -> bool:
        """Return whether a prompt or a text has an image, so that a model with a vision tower reads them."""
        return any(row.get("images") for row in self._all())

    def _all(self) -> list[Row]:
        return distinct([*self.train, *self.held_out, *(row for _, row in self.text)])

    def unshown_places(self) -> list[str]:
        """Return a sentence on rows without images whose prompts have a place of one; other tasks than `rows` may make
        their prompts of other columns.
        """
        if isinstance(self.kind, Prompts) and self.kind.task.name != "rows":
            return []
        rows = self._all()
        places = [place for row in rows if not row.get("images") and (place := written_place(row)) is not None]
        count = f"{len(places):,} of {len(rows):,} rows"
        return [f"{count} have a place of an image in a prompt ({truncate(places[0])}), and no image"] if places else []

    def images_as_text(self) -> list[str]:
        """Return sentences on prompts in which an image in Markdown, or <image> beside images in parts, is text."""
        if isinstance(self.kind, Prompts) and self.kind.task.name != "rows":
            return []
        rows = self._all()
        names = [name for row in rows if (name := markdown_image(row)) is not None]
        tags = [tag for row in rows if row.get("images") and (tag := written_place(row)) is not None]
        found = list[str]()
        if names:
            what = f"have an image in Markdown in a prompt, ![]({truncate(names[0])})"
            found.append(f"{len(names):,} of {len(rows):,} rows {what}: the model reads it as text")
        if tags:
            what = f"have {tags[0]} in a text beside images with parts of their own"
            found.append(f"{len(tags):,} of {len(rows):,} rows {what}: the model reads it as text")
        return found

    def unshown_columns(self) -> list[str]:
        """Return a sentence on each column of images that no prompt shows, where no row has other images."""
        if self.has_images:
            return []
        rows = self._all()
        counts = Counter[str]()
        for row in rows:
            counts.update(unshown_columns(row))
        return [
            f"the column `{truncate(name)}` of {count:,} of {len(rows):,} rows names images, and no prompt shows them "
            f"(task.columns.images={truncate(name)} does)"
            for name, count in counts.items()
        ]


def rows_of_run(config: Config, task: Task) -> RunRows:
    """Return the rows of a run. task: the configuration's (`task_of`).

    1. Read those of task.data and task.eval_data, each with its file and line; a task may have rows of its own.
    2. Make them rows of the kind that the method learns from, and check each (`usable`).
    3. Without rows for evaluation, hold out a tenth of the prompts.
    4. Cut both splits to task.max_samples.

    No more of a file is read than the last step needs, but where rows are shuffled first. Raises ValueError for a bad
    row, with its place.
    """
    with without_collection():
        return _rows_of_run(config, task)


def _rows_of_run(config: Config, task: Task) -> RunRows:
    where = config.task
    kind = row_kind(config, task)
    is_split = where.data is not None and where.eval_data is None and not kind.has_own_rows
    most = rows_needed(where.max_samples, split=is_split)
    notes = list[str]()
    train = kind.own_rows("train", where.data)
    if train is None:
        placed = _placed(config, where.data, most=None if kind.is_shuffled else most)
        kind = kind.by_columns(placed[0][1])
        train = kind.usable(placed if kind.is_shuffled else placed[:most], notes)
    if is_split:
        usable = train
        train, held_out = _hold_out(usable, kind, system_prompt=where.system_prompt)
        notes += repeats_note(usable, train=train, held_out=held_out)
    else:
        held_out = kind.own_rows("eval", where.eval_data or where.data)
    if held_out is None:
        placed = _placed(config, where.eval_data, most=None if kind.is_shuffled else most)
        held_out = kind.usable(placed, notes)
    cut = where.max_samples
    train = train[:cut]
    held_out = held_out[:cut]
    notes += unread_notes(distinct(train + held_out), kind, config)
    notes += promptless_notes(train, kind)
    return RunRows(train=train, held_out=held_out, kind=kind, notes=notes)


def distinct(rows: list[Row]) -> list[Row]:
    """Return rows without those that are there again, as evaluation has those of training where none are held out."""
    return [*{id(row): row for row in rows}.values()]


def unread_notes(rows: list[Row], kind: RowKind, config: Config) -> list[str]:
    """Warn of columns `system` and `tools` that nothing shows to the model. An agent has the whole row, and
    task.system_prompt replaces a system message anyway.
    """
    if config.environment.agent is not None:
        return []
    counts = Counter[str]()
    for row in rows:
        counts.update(kind.unread(row))
    if config.task.system_prompt is not None:
        del counts["system"]
    return [
        f"warning: the column `{name}` of {count:,} of {len(rows):,} rows is not shown to the model; {INSTEAD[name]}"
        for name, count in counts.items()
    ]


def promptless_notes(rows: list[Row], kind: RowKind) -> list[str]:
    """Warn of completions without a prompt, beside other texts, one of which may be meant as the prompt."""
    if not isinstance(kind, Texts):
        return []
    bare = [row for row in rows if COMPLETION.is_in(row) and row.get("prompt") is None]
    others = {name for row in bare for name, value in row.items() if isinstance(value, str)} - {*KNOWN_COLUMNS}
    if not others:
        return []
    what = f"{len(bare):,} of {len(rows):,} rows have a `completion` and no `prompt`, so nothing stands before it"
    return [f"warning: {what}; not read: {join_truncated(sorted(others))} (task.columns.prompt=OLD)"]


def hidden_tools(rows: list[Row], kind: RowKind) -> list[str]:
    """Warn of rows whose tools a method reads, for a chat template that does not write them."""
    count = sum("tools" in given_beside(row) and "tools" not in kind.unread(row) for row in rows)
    if not count:
        return []
    what = f"the tools of {count:,} of {len(rows):,} rows are not shown to the model: its chat template writes none"
    return [f"warning: {what}; describe them in a message"]


def row_kind(config: Config, task: Task) -> RowKind:
    """Return the kind of rows that a method learns from; of a reward model the columns of the first row decide. Raises
    ValueError if it needs task.data, and has none.
    """
    match config.trains.rows:
        case "prompts":
            judges = config.reward.functions
            return Prompts(
                task,
                verified=config.reward.is_verifier,
                columns_are_read=code_reads_columns(config, task),
                criteria_columns=[one.criteria_column for one in judges if one.criteria_column is not None],
            )
        case "text":
            kind = Texts(learns_prompts=config.sft.loss_on == "all")
        case "pairs":
            kind = Pairs()
        case "judged":
            kind = Judged()
    check_data_given(config)
    return kind


def code_reads_columns(config: Config, task: Task) -> bool:
    """Return whether user code gets all columns of a row: a task, a reward function, an environment, tools,
    or an agent.
    """
    environment = config.environment
    functions = [function for function in config.reward.functions if not function.is_judge]
    has_environment = environment.name is not None and environment.name not in BUILT_IN_ENVIRONMENTS
    is_own = isinstance(task, OwnTask)
    return bool(is_own or functions or has_environment or environment.tools or environment.agent)


def _placed(config: Config, source: str | None, *, most: int | None) -> Placed:
    assert source is not None
    task = config.task
    return placed_rows(source, columns=task.columns, revision=task.revision, most=most, fetch_images=task.fetch_images)


def _hold_out(rows: list[Row], kind: RowKind, *, system_prompt: str | None) -> tuple[list[Row], list[Row]]:
    """Split rows of one file into (train, held-out) by their prompts."""
    prompt = row_key if splits_by_row(rows, kind, system_prompt=system_prompt) else kind.prompt
    return train_eval_split(
        rows, prompt=prompt, seed=SPLIT_SEED, repeat=kind.keeps_repeats, system_prompt=system_prompt
    )


def repeats_note(rows: list[Row], *, train: list[Row], held_out: list[Row]) -> list[str]:
    """Return a line on how many rows are on neither side of a split: all but the last of each held-out prompt."""
    count = len(rows) - len(train) - len(held_out)
    if count <= 0:  # fewer, where nothing is held out and both sides have the same rows
        return []
    what = f"{count:,} of {len(rows):,} rows repeat a held-out prompt and are left out"
    return [f"{what}: they are not trained on, and evaluation has each prompt once"]


def keys_of(rows: list[Row], kind: RowKind, *, system_prompt: str | None) -> list[str]:
    """Return the key of each row's prompt. system_prompt: task.system_prompt of the run."""
    return [prompt_key(kind.prompt(row), system_prompt=system_prompt) for row in rows]


def splits_by_row(rows: list[Row], kind: RowKind, *, system_prompt: str | None) -> bool:
    """Return whether single rows are held out, as given answers have too few prompts."""
    return kind.holds_out_rows and len({*keys_of(rows, kind, system_prompt=system_prompt)}) < HELD_OUT_SHARE


def shared_by_splits(train: list[Row], held_out: list[Row], kind: RowKind, *, system_prompt: str | None) -> list[str]:
    """Warn if held-out prompts are trained on, or rows where these are what is held out."""
    if splits_by_row(train, kind, system_prompt=system_prompt):
        return trained_on_too(map(row_key, train), map(row_key, held_out), what="rows")
    return trained_on_too(
        keys_of(train, kind, system_prompt=system_prompt), keys_of(held_out, kind, system_prompt=system_prompt)
    )


# ---- prompts of a task ----


class Prompts(RowKind):
    """Prompts of a task, to sample answers to. verified: the task's verifier is the reward, so that it must be able to
    judge each row. columns_are_read: user code may read any column. criteria_columns: those that judges read.
    """

    def __init__(
        self, task: Task, *, verified: bool, columns_are_read: bool = False, criteria_columns: Sequence[str] = ()
    ) -> None:
        self.task = task
        self.verified = verified
        self.columns_are_read = columns_are_read
        self.criteria_columns = criteria_columns
        self.has_own_rows = task.generate is not None

    def prompt(self, row: Row) -> Prompt:
        return self.task.prompt(row)

    def unread(self, row: Row) -> list[str]:
        """Return the columns that no prompt shows; other tasks than `rows` may make their prompts of them."""
        given = given_beside(row)
        if not given or self.task.name != "rows":
            return []
        is_read = has_system(prompt_of(self.task.prompt(row)))
        return [name for name in given if name != "system" or not is_read]

    def own_rows(self, split: str, source: str | None) -> list[Row] | None:
        if self.task.generate is not None:
            return self.task.generate(source, split, SPLIT_SEED)
        return self.task.rows(split) if source is None else None

    def usable(self, placed: Placed, notes: list[str]) -> list[Row]:
        """Return rows of the same columns, as rewards get each column as a list. Raises ValueError for a row that the
        task cannot use, with its place.
        """
        task = self.task
        if "prompt" in task.columns:
            placed = [(place, at_place(place, with_prompt, row)) for place, row in placed]
        task.prepare([row for _, row in placed])
        for place, row in placed:
            at_place(place, self.check, row)
        names = list(dict.fromkeys(name for _, row in placed for name in row))
        rows = [{name: row.get(name) for name in names} for _, row in placed]
        task.prepare(rows)  # those that have got another column
        if isinstance(task, OwnTask):
            rows = task.code.with_shown_images(rows)
        return rows

    def check(self, row: Row) -> None:
        """Raise ValueError for a row that the task cannot use."""
        task = self.task
        for column in task.columns:
            if column not in row:
                columns = f"Columns: {join_truncated(row)}. Rename one with task.columns.{column}=OLD"
                raise ValueError(f"no column '{column}', which task '{task.name}' needs. {columns}")
        for column in RESERVED_COLUMNS & {*row}:
            rename = f"Rename it with task.columns.NEW={column}"
            raise ValueError(f"no column may be called '{column}', an argument of reward functions. {rename}")
        if not self.columns_are_read:
            refuse_media(row)
        if row.get("images") and not images_of(task.prompt(row)):
            raise ValueError(
                f"the row has images, and the prompt of task '{task.name}' shows none of them "
                "(task.columns.unused=images leaves their column out)"
            )
        task.prompt(row)
        task.gold(row)
        for column in self.criteria_columns:
            criteria_in(row, column)
        if self.verified and task.check_reference is not None:
            task.check_reference(row)


def text_rows(config: Config) -> Placed:
    """Read the rows of text that PPO learns beside its samples (ppo.ptx_data)."""
    if config.method != "ppo" or not config.ppo.ptx_data:
        return []
    placed = placed_rows(config.ppo.ptx_data, fetch_images=config.task.fetch_images)
    for place, row in placed:
        at_place(place, refuse_media, row)
        at_place(place, Texts().check_images, row)
    return placed


# ---- for `tinyrl show` ----


def row_texts(run: RunDir, keys: dict[int, str], notes: list[str]) -> dict[int, str]:
    """Return the texts (of messages the last) of training prompts by the numbers and keys of a run's prompts.jsonl, of
    rows that still exist. An error in reading rows is added to `notes`.
    """
    try:
        config = run.read_config()
        rows = rows_of_run(config, task_of(config))
        prompts = {row_key(row): rows.kind.prompt(row) for row in rows.train}
    except (OSError, ValueError) as error:
        notes.append(f"prompts are shown without their texts: {first_line(error)}")
        return {}
    return {i: shown_text(as_messages(prompts[key])[-1]) for i, key in keys.items() if key in prompts}


def export_rows(config: Config, keys: set[str], file: Path) -> str:
    """Write the training rows with these keys, as task.data of the same task; return a line about it. Raises ValueError
    if the file exists, or no row has one of the keys.
    """
    rows = {key: row for row in rows_of_run(config, task_of(config)).train if (key := row_key(row)) in keys}
    if file.exists() or not rows:
        why = f"{file} exists" if file.exists() else f"of {len(keys):,} hard prompts none is in the training rows"
        raise ValueError(f"--export-hard: {why}")
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows.values()), encoding="utf-8")
    found = f"wrote {len(rows):,} of {len(keys):,} hard prompts to {file}"
    return f"{found}; train on them with task.data={file}, and give task.eval_data another file"
