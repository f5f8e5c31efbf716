"""reward_output.log: bounded, marked where a resume goes on, and no reason for a run to end."""

from pathlib import Path

import pytest

from tinyrl.runs import run_dir
from tinyrl.runs.run_dir import RunDir


def test_lines_are_added_and_a_later_sitting_is_marked(tmp_path: Path) -> None:
    first = RunDir(tmp_path, warn=print)
    first.append_reward_output("score: a\n")
    first.append_reward_output("score: b\n")
    RunDir(tmp_path, warn=print).append_reward_output("score: c \ud800\n")
    text = (tmp_path / "reward_output.log").read_text()
    assert text == "score: a\nscore: b\n--- resumed ---\nscore: c ?\n"


def test_the_end_is_kept_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MOST_OUTPUT", 100)
    output = RunDir(tmp_path, warn=print)
    for number in range(25):
        output.append_reward_output(f"line {number:04}\n")  # 10 bytes
        assert (tmp_path / "reward_output.log").stat().st_size <= 100
    kept = (tmp_path / "reward_output.log").read_text().splitlines()
    assert kept[0] == "--- the beginning was left out ---"
    assert kept[-1] == "line 0024"
    assert [int(line.split()[1]) for line in kept[1:]] == list(range(25 - len(kept[1:]), 25))
    output.append_reward_output("x" * 1000 + "\n" + "end\n")
    assert (tmp_path / "reward_output.log").read_text() == "--- the beginning was left out ---\nend\n"
    assert [path.name for path in tmp_path.iterdir()] == ["reward_output.log"]


def test_a_disk_that_refuses_is_told_of_once(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "reward_output.log").mkdir()
    output = RunDir(tmp_path, warn=said.append)
    output.append_reward_output("a\n")
    output.append_reward_output("b\n")
    assert said == [
        f"warning: what the reward prints cannot be written to {tmp_path / 'reward_output.log'}: Is a directory"
    ]
