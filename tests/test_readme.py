"""The README: its tree is the package's, and what survives is tested."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny_models import tiny_model
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


@pytest.mark.slow
def test_the_lines_for_your_data_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = README.partition("## Your data and your reward")[2].partition("\n## ")[0]
    code = re.findall(r"^```python\n# (\S+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    model = tiny_model(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    for name, source in code:
        Path(name).write_text(source, encoding="utf-8")
    lines = [
        line.strip().replace("model.path=DIR", f"model.path={model}") for line in re.findall(r"^    \S.*", part, re.M)
    ]
    lines = [line for line in lines if line.startswith(("echo ", "tinyrl "))]
    assert len(lines) >= 4
    few = ["run.num_steps=1", "generation.max_new_tokens=8", "grpo.num_prompts=1", "grpo.group_size=4"]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "echo":
            subprocess.run(line, shell=True, check=True)
            continue
        done = CliRunner().invoke(app, [*words[1:], *(few if words[1] == "train" else [])])
        assert done.exit_code == 0, (line, done.output)


def test_no_placeholder_was_left() -> None:
    assert not re.findall(r"@\w+@|TODO|not yet filled", README)


def test_the_tree_has_a_line_for_each_room() -> None:
    tree = README.partition("## Read the code")[2].partition("\n## ")[0]
    named = {name.rstrip("/") for name in re.findall(r"^      ([\w/.]+(?: [\w.]+\.py)?) ", tree, re.MULTILINE)}
    rooms = {path.name for path in (ROOT / "tinyrl").iterdir() if not path.name.startswith("__")}
    assert {word for name in named for word in name.split()} == rooms
