"""Before a command runs code that a run's configuration names, it says so, once, unless the code is of the folder one
works in.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tinyrl.cli.commands import app
from tinyrl.config.recipe import dump_config
from tinyrl.evaluation.targets import Asked, find, trained_on
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import open_run
from tinyrl.workers import foreign_code
from tinyrl.workers.foreign_code import tell_code

REWARD = "def size(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
TASK = (
    "from tinyrl.tasks import Task\n"
    "TASK = Task(name='mine', rows=lambda split: [{'prompt': f'{split} {n}'} for n in range(8)])\n"
)


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_code, "_told", set())


def run_with(folder: Path, code: Path, **sections: object) -> Path:
    """A run whose reward and task are files in the folder `code`."""
    for place in (code, folder):
        place.mkdir(parents=True, exist_ok=True)
    (code / "rewards.py").write_text(REWARD)
    (code / "mine.py").write_text(TASK)
    functions = [{"use": f"{code / 'rewards.py'}:size"}]
    values = {"method": "grpo", "task": {"name": f"{code / 'mine.py'}:TASK"}, "reward": {"functions": functions}}
    (folder / "config.yaml").write_text(dump_config(config_of(values | sections)))
    line = {"step": 1, "prompts": [[0, "a key", 4, 0]]}
    (folder / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


def tinyrl(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


def notes_of(run: Path, capsys: pytest.CaptureFixture[str], *, sections: tuple[str, ...] | None = None) -> list[str]:
    tell_code(run, open_run(run).read_config(), sections=sections)
    return capsys.readouterr().err.splitlines()


def test_code_of_another_folder_is_named_once_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = run_with(tmp_path / "run", tmp_path / "code")
    [line] = notes_of(run, capsys)
    assert f"task.name={tmp_path / 'code' / 'mine.py'}:TASK" in line
    assert f"{tmp_path / 'code' / 'rewards.py'}:size" in line
    assert notes_of(run, capsys) == []


def test_code_of_the_current_folder_is_not_named_unless_it_came_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert notes_of(run_with(tmp_path / "runs" / "own", tmp_path / "code"), capsys) == []
    packed = run_with(tmp_path / "runs" / "packed", tmp_path / "runs" / "packed" / "code")
    assert len(notes_of(packed, capsys)) == 1


def test_code_of_tinyrl_and_code_that_is_not_there_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    functions = [{"use": "tinyrl.tasks.math_grading:equal_answers"}]
    run = run_with(tmp_path / "run", tmp_path / "code", task={"name": "sort"}, reward={"functions": functions})
    assert notes_of(run, capsys) == []
    run = run_with(tmp_path / "gone", tmp_path / "gone-code")
    shutil.rmtree(tmp_path / "gone-code")
    assert notes_of(run, capsys) == []
    functions = [{"use": "textwrap:dedent"}]  # installed, and not of tinyrl
    run = run_with(tmp_path / "installed", tmp_path / "code", task={"name": "sort"}, reward={"functions": functions})
    assert len(notes_of(run, capsys)) == 1


def test_commands_that_read_run_no_code_and_say_nothing_and_show_prompts_names_the_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = run_with(tmp_path / "run", tmp_path / "code")
    ran = tmp_path / "ran"
    (tmp_path / "code" / "mine.py").write_text(f"open({str(ran)!r}, 'w').close()\n{TASK}")
    for words in (("show",), ("doctor",)):
        assert "note: " not in tinyrl(*words, str(run)).stderr
    assert not ran.exists()
    shown = tinyrl("show", str(run), "--prompts")
    assert ran.exists()
    assert shown.stderr.count("note: ") == 1
    assert "mine.py:TASK" in shown.stderr
    assert "rewards.py" not in shown.stderr


def test_a_resume_and_an_evaluation_name_the_code_before_they_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("resumed", "evaluated", "compared"):
        run_with(tmp_path / name, tmp_path / "code")
    (tmp_path / "code" / "mine.py").write_text(f"raise SystemExit\n{TASK}")
    done = tinyrl("train", "--resume", str(tmp_path / "resumed"))
    assert done.exit_code == 2
    assert f"note: this may run code that {tmp_path / 'resumed'} names" in done.stderr.splitlines()[0]
    find(str(tmp_path / "evaluated"), Asked())
    assert str(tmp_path / "code" / "rewards.py") in capsys.readouterr().err
    with pytest.raises(ValueError, match="SystemExit"):
        trained_on(str(tmp_path / "compared"))
    assert str(tmp_path / "code" / "mine.py") in capsys.readouterr().err
