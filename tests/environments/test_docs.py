"""The examples of docs/environments.md, taken from the page and run."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in EXAMPLES.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    shown = re.search(r"with rows such as `(\{.*?\})`", PAGE)
    assert shown is not None
    row = json.loads(shown[1])
    rows = [{**row, "prompt": f"Game {i}. {row['prompt']}", "map": {"Game": "a tree"}} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_function_answers_and_ends_episodes(folder: Path) -> None:
    said = run("env", "test", "game.py:respond", "--data", "rows.jsonl")
    assert re.search(r"^gold +8 +0 +8 +0 ", said, re.MULTILINE)
    assert re.search(r"^nonsense +8 +8 +0 +0 ", said, re.MULTILINE)
    assert "warning" not in said


@pytest.mark.slow
def test_the_tool_knows_its_episode_and_the_model_is_not_told(folder: Path) -> None:
    said = run("env", "test", "tools.py:look", "--tools", "--data", "rows.jsonl")
    assert said.startswith("tools: look(place);")
    assert re.search(r"^call look +8 +8 +0 +0 ", said, re.MULTILINE)
    assert "nothing there" in said
    assert "warning" not in said


def test_the_class_is_played(folder: Path) -> None:
    said = run("env", "test", "guess.py:Guess", "--data", "rows.jsonl")
    assert " It is between 1 and 9." in said
    assert re.search(r"^call guess +8 +8 +0 +0 ", said, re.MULTILINE)
    assert re.search(r"reply:\n  (right|higher)\n", said)
    assert "warning" not in said
