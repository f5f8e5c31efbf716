"""References in the README and docs/: the tests of what survives, commands and files exist."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SURVIVES = (ROOT / "docs" / "survives.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.py)`", SURVIVES))))
def test_a_fault_is_tested_where_the_table_says(file: str) -> None:
    assert re.search(r"^def test_", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_file_of_faults_is_in_the_table() -> None:
    files = {f"faults/{path.name}" for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert files <= set(re.findall(r"`([\w/]+\.py)`", SURVIVES))


def test_no_placeholder_was_left() -> None:
    assert not re.findall(r"@\w+@|TODO|not yet filled", README)


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"tinyrl (eval|report|checkpoints|recipes|reward|tasks|train)\b", README)))
)
def test_a_command_is_there(command: str) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_a_linked_file_is_there(link: str) -> None:
    assert (ROOT / link).is_file()


def test_the_tree_has_a_line_for_each_room() -> None:
    tree = README.partition("## Where things are")[2].partition("\n## ")[0]
    named = {name.rstrip("/") for name in re.findall(r"^      ([\w/.]+(?: [\w.]+\.py)?) ", tree, re.MULTILINE)}
    rooms = {path.name for path in (ROOT / "tinyrl").iterdir() if not path.name.startswith("__")}
    assert {word for name in named for word in name.split()} == rooms
