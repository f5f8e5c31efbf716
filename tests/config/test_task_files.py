"""Which tasks ship, and which of them have replies between turns, by the text of their files."""

from pathlib import Path

import pytest

from tinyrl.config import task_files
from tinyrl.config.task_files import TaskFile, has_turns, searches, shipped_tasks
from tinyrl.tasks import load_task

PLAIN = 'import no_such_module\n\nTASK = Task(\n    name="plain",\n    columns=("q",),\n)\n\nTASK2 = 1 / 0\n'
ASKS = 'TASK = Task(name="asks", respond=lambda prompts, transcripts, **columns: None)\n'
FINDS = 'ENVIRONMENT = "python"\nTASK = Task(name="finds", environment="search")\n'
NONE = "def make():\n    TASK = Task()\n    return TASK\n"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, TaskFile]:
    for place, text in (("starter/plain", PLAIN), ("tasks/asks", ASKS), ("tasks/finds", FINDS), ("tasks/none", NONE)):
        file = tmp_path / f"{place}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"\n{text}")
    monkeypatch.setattr(task_files, "PACKAGE", tmp_path)
    return shipped_tasks.__wrapped__()


def test_a_file_with_a_task_is_one_that_ships_and_is_not_run(shipped: dict[str, TaskFile]) -> None:
    assert [*shipped] == ["plain", "asks", "finds"]
    assert shipped["plain"].module.endswith(".starter.plain")


def test_replies_and_environment_are_those_of_the_call(shipped: dict[str, TaskFile]) -> None:
    found = {name: (task.replies, task.environment) for name, task in shipped.items()}
    assert found == {"plain": (False, None), "asks": (True, None), "finds": (False, "search")}


def test_each_file_says_what_its_task_is_when_it_is_loaded() -> None:
    for name, file in shipped_tasks().items():
        task = load_task(name)
        assert (file.replies, file.environment) == (task.respond is not None, task.environment), name


@pytest.mark.parametrize(
    ("name", "with_turns", "with_search"),
    [
        ("lookup", True, False),
        ("search_qa", True, True),
        ("sums", False, False),
        (None, False, False),
        ("a folder/mine.py:TASK", True, True),  # may be: it is known once it is loaded
    ],
)
def test_settings_of_turns_and_of_search_count_by_task(name: str | None, with_turns: bool, with_search: bool) -> None:
    assert (has_turns(name), searches(name)) == (with_turns, with_search)
