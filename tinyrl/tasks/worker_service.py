"""Services of a user task in its worker process: its rows, prompts, answers, verifier and replies."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tinyrl.data.image_files import ImageFiles
from tinyrl.data.image_rows import placed_prompt
from tinyrl.data.messages import prompt_of
from tinyrl.data.readers import Row
from tinyrl.environments import worker_service
from tinyrl.tasks.task import Task, no_rows
from tinyrl.text import first_line
from tinyrl.workers import protocol
from tinyrl.workers.protocol import ServiceFacts
from tinyrl.workers.values import RowResults
from tinyrl.workers.worker import Service, facts_of, reward

FUNCTIONS = ("verify", "check_reference", "answer", "respond", "asking_turn", "generate")  # which a task may have


@dataclass(frozen=True)
class OwnTaskFacts:
    """Facts about a user task: its fields that are not functions, and which of FUNCTIONS it has."""

    name: str
    summary: str
    columns: list[str]
    compares_with: str
    right_or_wrong: bool
    can_grade_math: bool
    stop: list[str]
    environment: str | None
    grader: str | None
    functions: list[str]
    has_rows: bool

    @classmethod
    def of(cls, task: Task) -> Self:
        return cls(
            name=task.name,
            summary=task.summary,
            columns=[*task.columns],
            compares_with=task.compares_with,
            right_or_wrong=task.right_or_wrong,
            can_grade_math=task.can_grade_math,
            stop=[*task.stop],
            environment=task.environment,
            grader=task.grader,
            functions=[name for name in FUNCTIONS if getattr(task, name) is not None],
            has_rows=task.rows is not no_rows,
        )


def task(objects: list[Any]) -> Service:
    """Make the service of all but the verifier and the replies of a task."""
    found = _only_task(objects)

    def rows(arguments: dict[str, list[Any]], _: int) -> RowResults:
        return RowResults([_plain_rows(found.rows(split)) for split in arguments["split"]])

    def generate(arguments: dict[str, list[Any]], _: int) -> RowResults:
        assert found.generate is not None
        return RowResults([_plain_rows(found.generate(*given)) for given in arguments["given"]])

    def prepare(arguments: dict[str, list[Any]], _: int) -> RowResults:
        pairs = zip(arguments["row"], arguments["folder"], strict=True)
        return RowResults([_prepared(found, row, ImageFiles(base=Path(folder))) for row, folder in pairs])

    def answers(arguments: dict[str, list[Any]], _: int) -> RowResults:
        assert found.answer is not None
        numbers: dict[Any, int] = {}
        answer: Callable[..., Any] = found.answer
        takes_row = _takes_two(answer)
        pairs = zip(arguments["text"], arguments["row"], strict=True)
        given = [answer(text, row) if takes_row else answer(text) for text, row in pairs]
        return RowResults([None if each is None else numbers.setdefault(each, len(numbers)) for each in given])

    def asking_turns(arguments: dict[str, list[Any]], _: int) -> RowResults:
        assert found.asking_turn is not None
        return RowResults([found.asking_turn(row) for row in arguments["row"]])

    calls = {"rows": rows, "generate": generate, "prepare": prepare, "answers": answers, "asking_turns": asking_turns}
    facts = ServiceFacts(whole=["rows", "generate", "answers"], of_host=asdict(OwnTaskFacts.of(found)))
    return Service(calls, facts)


def verifier(objects: list[Any]) -> Service:
    """Make the service of a task's verifier: that of a reward function."""
    return reward([_only_task(objects).verify])


def replies(objects: list[Any]) -> Service:
    """Make the service of a task's replies: that of an environment function. A task whose reward is a verdict has none
    in its replies.
    """
    found = _only_task(objects)
    assert found.respond is not None
    facts = worker_service.EnvironmentFacts(rewards="none" if found.right_or_wrong else "some")
    return worker_service.serve_replies(found.respond, facts, facts_of(found.respond))


def _only_task(objects: list[Any]) -> Task:
    [found] = objects
    if not isinstance(found, Task):
        raise TypeError(f"it is a {type(found).__name__}, not a tinyrl.tasks.Task(...)")
    return found


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function takes two arguments; not one in C without a signature."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _plain_rows(rows: Any) -> list[Row]:
    """Return rows. Raises ValueError for what cannot be a row, or is not JSON."""
    if not isinstance(rows, list):
        raise ValueError(f"rows must be a list, not a {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not row:
            raise ValueError(f"row {number} must be a dict of columns, not {row!r:.40}")
        try:
            protocol.encode(row)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"row {number}: {error}; columns are text, numbers, lists and dicts of these") from error
    return rows


def _prepared(task: Task, row: Row, files: ImageFiles) -> list[Any]:
    """Return a row's prompt and reference answer, and what is wrong with it: for the task, and for the verifier."""
    try:
        prompt = prompt_of(placed_prompt(task.prompt(row), row, files))
        gold = task.gold(row)
        if not isinstance(gold, str | None):
            raise ValueError(f"`gold` returned a {type(gold).__name__}, not text or None")
    except Exception as error:  # noqa: BLE001 user code may raise anything
        return ["", None, _problem(error), ""]
    try:
        if task.check_reference is not None:
            task.check_reference(row)
    except Exception as error:  # noqa: BLE001
        return [prompt, gold, "", _problem(error)]
    return [prompt, gold, "", ""]


def _problem(error: Exception) -> str:
    """Return what is wrong with a row: a ValueError's sentence, or another exception and its line."""
    if isinstance(error, ValueError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename.rpartition('/')[2]}, line {last.lineno})"
