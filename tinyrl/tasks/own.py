"""A user task, FILE.py:TASK: its code runs in a worker process, and the run has its rows and their prompts."""

from __future__ import annotations

import atexit
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tinyrl.data.image_files import ImageFiles
from tinyrl.data.images import images_of
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.data.rows import row_key
from tinyrl.data.sources import row_with_images
from tinyrl.tasks.task import Task, no_rows
from tinyrl.tasks.worker_service import OwnTaskFacts
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.values import is_text

SETTING = "task.name"
HOST = "tinyrl.tasks.worker_service"  # in the worker process
ROWS_TIMEOUT_S = 600.0  # to generate or download the rows of a split
CALL_TIMEOUT_S = 60.0  # for prompts of CALL_ROWS rows, and for the answers of an evaluation
CALL_ROWS = 4096


@dataclass(frozen=True)
class PreparedRow:
    """What a task's code makes of a row; problem: why it cannot be used, reference_problem: why it cannot be judged."""

    prompt: Prompt
    gold: str | None
    problem: str = ""
    reference_problem: str = ""


class OwnCode:
    """The code of a task in a worker process. State: the worker; prompts and reference answers of its rows so far.

    use: FILE.py:TASK, with an absolute path.
    """

    verifier_host = f"{HOST}:verifier"

    def __init__(self, use: str) -> None:
        self.use = use
        self.folder = str(Path(use.rpartition(":")[0]).parent)  # which paths of images are relative to
        source = parse_use(use, setting=SETTING)
        host = f"{HOST}:task"
        name = Path(use).name.partition(".py:")[0]
        self.worker = WorkerFunction([source], setting=SETTING, timeout_s=CALL_TIMEOUT_S, host=host, name=name)
        self._prepared: dict[str, PreparedRow] = {}

    @cached_property
    def facts(self) -> OwnTaskFacts:
        """Load the task and return its facts. Raises ValueError if its code does not load."""
        return self.worker.host_facts(OwnTaskFacts)

    def prompt(self, row: Row) -> Prompt:
        return self._of(row).prompt

    def gold(self, row: Row) -> str | None:
        return self._of(row).gold

    def rows(self, split: str) -> list[Row]:
        """Return the task's own rows. Raises ValueError for one that cannot be used."""
        return self._read("rows", {"split": [split]}, split)

    def generate(self, source: str | None, split: str, seed: int) -> list[Row]:
        """Return rows by task.data. Raises ValueError for one that cannot be used."""
        return self._read("generate", {"given": [[source, split, seed]]}, split)

    def _read(self, call: str, arguments: dict[str, list[Any]], split: str) -> list[Row]:
        results = self.worker.rows(arguments, 1, call=call, is_valid=_are_rows, timeout_s=ROWS_TIMEOUT_S)
        for failure in results.failures:
            raise ValueError(f"{SETTING}={self.use}: `{call}({split!r})`: {failure.reason}")
        [found] = results.values
        place = f"{SETTING}={self.use}: {split} row"
        files = ImageFiles(base=Path(self.folder))
        rows = [row_with_images(row, files, f"{place} {number}") for number, row in enumerate(found, start=1)]
        self.prepare(rows)
        for number, row in enumerate(rows, start=1):
            try:
                self._of(row)
            except ValueError as error:
                raise ValueError(f"{place} {number}: {error}") from error
        return self.with_shown_images(rows)

    def with_shown_images(self, rows: list[Row]) -> list[Row]:
        """Return rows with the images that the task's code puts into their prompts, as other rows have theirs: they are
        in the fingerprint of the rows, and a reward may ask for them.
        """
        found = list[Row]()
        for row in rows:
            images = [] if row.get("images") else images_of(self._of(row).prompt)
            found.append({**row, "images": [image.entry for image in images]} if images else row)
        self.prepare([row for row in found if row.get("images")])
        return found

    def prepare(self, rows: list[Row]) -> None:
        """Find prompts and reference answers of rows, many in a call; `prompt` and `gold` raise what is wrong with
        one.
        """
        unknown = {key: row for row in rows if (key := row_key(row)) not in self._prepared}
        keys = [*unknown]
        for start in range(0, len(keys), CALL_ROWS):
            part = keys[start : start + CALL_ROWS]
            given = {"row": [unknown[key] for key in part], "folder": [self.folder] * len(part)}
            results = self.worker.rows(given, len(part), call="prepare", is_valid=_is_prepared)
            for key, value in zip(part, results.values, strict=True):
                if value is not None:
                    self._prepared[key] = PreparedRow(*value)
            for failure in results.failures:
                self._prepared[part[failure.row]] = PreparedRow("", None, problem=failure.reason)

    def check_reference(self, row: Row) -> None:
        """Raise ValueError if the verifier cannot judge a row."""
        if problem := self._of(row).reference_problem:
            raise ValueError(problem)

    def answers(self, texts: list[str], rows: list[Row]) -> list[Hashable | None] | None:
        """Return the answers in completions of rows as numbers, equal ones as the same; None if the task does not know
        how, or if finding them failed, which is logged with the output of its code.
        """
        if "answer" not in self.facts.functions:
            return None
        results = self.worker.rows({"text": texts, "row": rows}, len(texts), call="answers", is_valid=_is_number)
        if results.failures:
            self.worker.printed.add(f"answers: {results.failures[0].reason}\n".encode(errors="replace"))
            return None
        return results.values

    def replies(self, *, timeout_s: float) -> WorkerFunction:
        """Return the task's replies between turns, in a worker of their own, as those of an environment function."""
        source = parse_use(self.use, setting=SETTING)
        host = f"{HOST}:replies"
        return WorkerFunction([source], setting=SETTING, timeout_s=timeout_s, host=host, name=self.facts.name)

    def asking_turn(self, row: Row) -> str | None:
        results = self.worker.rows({"row": [row]}, 1, call="asking_turns", is_valid=is_text)
        return results.values[0]

    def _of(self, row: Row) -> PreparedRow:
        """Return what was made of a row. Raises ValueError if it cannot be used."""
        key = row_key(row)
        if key not in self._prepared:
            self.prepare([row])
        found = self._prepared[key]
        if found.problem:
            raise ValueError(found.problem)
        return found


@dataclass(frozen=True)
class OwnTask(Task):
    """A user task: `code` calls its functions in the worker, so `verify`, `respond` and `answer` are None here."""

    code: OwnCode = field(kw_only=True)

    @classmethod
    def of(cls, code: OwnCode) -> Self:
        """Load the task of a file. Raises ValueError if its code does not load."""
        facts = code.facts
        return cls(
            name=facts.name,
            summary=facts.summary,
            columns=tuple(facts.columns),
            compares_with=facts.compares_with,
            right_or_wrong=facts.right_or_wrong,
            can_grade_math=facts.can_grade_math,
            stop=tuple(facts.stop),
            environment=facts.environment,
            grader=facts.grader,
            prompt=code.prompt,
            gold=code.gold,
            rows=code.rows if facts.has_rows else no_rows,
            generate=code.generate if "generate" in facts.functions else None,
            check_reference=code.check_reference if "check_reference" in facts.functions else None,
            asking_turn=code.asking_turn if "asking_turn" in facts.functions else None,
            code=code,
        )

    @property
    def has_verifier(self) -> bool:
        return "verify" in self.code.facts.functions

    @property
    def has_replies(self) -> bool:
        return "respond" in self.code.facts.functions

    def prepare(self, rows: list[Row]) -> None:
        self.code.prepare(rows)

    def answers(self, texts: list[str], rows: list[Row]) -> list[Hashable | None] | None:
        return self.code.answers(texts, rows)

    def replies_worker(self, *, timeout_s: float) -> WorkerFunction | None:
        return self.code.replies(timeout_s=timeout_s) if self.has_replies else None


_loaded: dict[str, OwnTask] = {}  # by FILE.py:TASK


def own_task(name: str) -> OwnTask:
    """Load a user task from FILE.py:TASK, anew where its file, or one that it imports, has changed.

    Raises ValueError if it is not there or does not load.
    """
    source = parse_use(name, setting=SETTING)
    assert source.file is not None, name
    use = f"{source.file.absolute()}:{source.function}"
    known = _loaded.get(use)
    if known is not None and known.code.worker.code.edited_file() is None:
        return known
    if known is not None:
        known.code.worker.close()
    _loaded[use] = OwnTask.of(OwnCode(use))
    return _loaded[use]


@atexit.register
def close_workers() -> None:
    """End the workers of the tasks that were loaded here, and forget the tasks with the prompts of their rows.

    Prompts may depend on files that no import names. A task that somebody still holds gets another worker when called.
    """
    for known in _loaded.values():
        known.code.worker.close()
    _loaded.clear()


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _is_prepared(value: Any) -> bool:
    match value:
        case [str() | list(), str() | None, str(), str()]:
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | None)
