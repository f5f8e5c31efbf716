"""Records of runs that are going on, were killed, or are not runs."""

import math
from pathlib import Path

import pytest

from tests.tools.report.runs import grpo_run, write_run
from tinyrl.runs.records import read_run


def test_broken_lines_are_counted_and_a_number_that_is_none_is_a_gap(tmp_path: Path) -> None:
    tail = 'garbage\n[1]\n{"reward/mean": 1}\n' + "[" * 100_000 + "\n" + '{"step": 3, "reward/mean": 0.7}\n'
    tail += '{"step": 4, "reward/mean": NaN}\n{"step": 5, "reward/mean": Infinity}\n{"step": 6, "rewa'
    run = read_run(
        write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": None}], tail=tail)
    )
    assert run.finite("reward/mean") == [(1, 0.5), (3, 0.7)]
    assert [math.isnan(value) for _, value in run.points("reward/mean")] == [False, True, False, True, True]
    assert run.notes == ("metrics.jsonl: 4 lines could not be read and are left out.",)


def test_damaged_side_files_are_noted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    (folder / "env.json").write_text("{", "utf-8")
    (folder / "samples.jsonl").write_bytes(b'{"kind": "eval", "step": 1, "prompt_index": 0}\n{"eval"\n')
    assert [note.split()[0] for note in read_run(folder).notes] == ["env.json", "samples.jsonl:"]


def test_what_is_no_run_is_refused_with_its_place(tmp_path: Path) -> None:
    run = grpo_run(tmp_path / "runs" / "grpo-sorting-1", steps=1)
    with pytest.raises(ValueError, match=r"grpo-sorting-2 is not a run.*grpo-sorting-1`\?"):
        read_run(tmp_path / "runs" / "grpo-sorting-2")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/re', "utf-8")
    with pytest.raises(ValueError, match=r"grpo-sorting-1 has no finished step"):
        read_run(run)


@pytest.mark.parametrize("text", ["", "garbage\n"])
def test_a_run_without_a_line_of_metrics_is_not_suggested_in_its_own_place(text: str, tmp_path: Path) -> None:
    run = grpo_run(tmp_path / "runs" / "grpo-sorting-1", steps=1)
    (run / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match="no finished step") as caught:
        read_run(run)
    assert "Did you mean" not in str(caught.value)
    assert ("1 line" in str(caught.value)) == bool(text)
