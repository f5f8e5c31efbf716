"""The benchmarks' commands: defaults, what they refuse, and that those without a peer run from the repository alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS, parse, problem
from benchmarks.processes import ROOT
from benchmarks.sizes import REAL_MODEL, copy_real
from tests.tiny_models import TinyModels


def test_a_command_has_its_own_defaults_and_the_command_line_wins():
    learning, grpo = parse(["learning"]), parse(["grpo"])
    assert (learning.steps, learning.threads, learning.sizes) == (60, 1, [])
    assert (grpo.steps, grpo.threads, grpo.sizes) == (6, 2, ["s", "m", "v"])
    set_by_hand = parse(["grpo", "--steps", "3", "--threads", "1", "--sizes", "xs"])
    assert (set_by_hand.steps, set_by_hand.threads, set_by_hand.sizes) == (3, 1, ["xs"])


def test_the_folder_of_the_real_model_is_used(tmp_path: Path, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(REAL_MODEL, "elsewhere")
    folder = tiny("llama")
    parse(["grpo", "--sizes", "real", "--real-model", str(folder)])
    copy_real(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("what", [name for name, command in COMMANDS.items() if command.needs_a_peer])
def test_a_comparison_asks_for_the_peer(what: str):
    assert "--peer-python" in (problem(parse([what])) or "")
    assert problem(parse([what, "--peer-python", "python"])) is None


def test_what_cannot_be_measured_is_refused():
    assert "warm-up" in (problem(parse(["rollout", "--steps", "1"])) or "")
    assert "at most 10" in (problem(parse(["learning", "--peer-python", "python", "--pairs", "11"])) or "")


@pytest.mark.release
@pytest.mark.parametrize(
    ("words", "columns", "row"),
    [
        (["rollout"], "seconds | tokens a second", "| tinyrl, fused |"),
        (["turns"], "seconds a rollout | ms a chosen token", "| tinyrl, fast turns (fused) |"),
        (
            ["scaling", "--axes", "size"],
            "| size; tinyrl",
            "| 18432 |",
        ),  # 2 layers: 2 x 32 x 32, 2 x 32 x 16, 3 x 32 x 64
    ],
)
def test_a_command_runs_without_a_peer(tmp_path: Path, words: list[str], columns: str, row: str):
    small = ["--sizes", "xs", "--pairs", "1", "--steps", "2", "--threads", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", *words, *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert columns in done.stdout
    assert row in done.stdout
