"""Held-out samples on the page: which are read, which steps can be chosen, which are extreme."""

import re
from pathlib import Path
from typing import Any

from tests.tools.report.runs import PageReader, page, sample, write_run
from tinyrl.runs.records import HeldOut, read_held_out, read_run
from tinyrl.tools.report import completions


def held_out(folder: Path, samples: list[dict[str, Any]]) -> HeldOut:
    return read_run(write_run(folder, [{"step": 1, "reward/mean": 1}], samples=samples)).held_out


def test_the_step_is_chosen_without_a_script(tmp_path: Path) -> None:
    """A radio button a step after the first, and a rule that shows what belongs to it."""
    samples = [sample(step, i, f"P{i}", f"s{step}-p{i}", 0.5) for step in (0, 5, 1000) for i in (0, 1)]
    html = page(write_run(tmp_path / "run", [{"step": 1000, "reward/mean": 1}], samples=samples))
    browser = html.partition("The same prompts")[2].partition("Extremes at")[0]
    buttons = re.findall(r'<input type="radio" name="at" id="(at\d)"( checked)?><label for="(at\d)">([^<]*)<', browser)
    assert buttons == [("at0", "", "at0", "5"), ("at1", " checked", "at1", "1,000")]
    assert "#at0:checked ~ table .at0,\n#at1:checked ~ table .at1 { display: revert; }" in browser
    assert re.findall(r'<div class="at at(\d)" data-label="Step (\d+)">', browser) == [
        ("0", "5"), ("1", "1000"), ("0", "5"), ("1", "1000"),
    ]  # fmt: skip
    assert [text for text in re.findall(r"s\d+-p\d", PageReader(browser).text)] == [
        "s0-p0", "s5-p0", "s1000-p0", "s0-p1", "s5-p1", "s1000-p1",
    ]  # fmt: skip
    assert ".at { display: none; }" in html
    assert "<script" not in html


def test_rows_out_of_order_and_damaged_lines_are_survived(tmp_path: Path) -> None:
    samples = [sample(9, 0, "p", "late", 0.5), sample(0, 0, "p", "early", 0.0), sample(4, 0, "p", "between", 0.0)]
    folder = write_run(tmp_path / "run", [{"step": 1}], samples=samples)
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 9, "prompt_ind\n{"kind": "eval", "step": 9, "prompt_index": null}\n')
    notes: list[str] = []
    found = read_held_out(folder / "samples.jsonl", notes)
    assert list(found.by_step) == [0, 4, 9]
    assert [one.messages[0][1].head for one in found.last] == ["late"]
    assert notes == ["samples.jsonl: 1 line could not be read and are left out."]


def test_extremes_are_of_all_samples_of_the_last_step(tmp_path: Path) -> None:
    samples = [sample(0, i, f"p{i}", f"before-{i}", 0.5) for i in range(5)]
    samples += [
        sample(9, 0, "p0", "x" * 5, 0.5),
        sample(9, 1, "p1", "x" * 40, 1.0),
        sample(9, 1, "p1", "x" * 3, -2.0, sample=1),  # worst, but not the prompt's first
        sample(9, 2, "p2", "x" * 30, 0.0),
        sample(9, 3, "p3", "before-3", 0.75),
        sample(9, 4, "p4", "x" * 20, None),
    ]
    found = completions(held_out(tmp_path / "run", samples))["extremes"]
    picked = {name: [(one.prompt_index, one.sample) for _, one in some] for name, some in found.items()}
    assert picked == {
        "Worst": [(1, 1), (2, 0), (0, 0)],
        "Best": [(1, 0), (3, 0), (0, 0)],
        "Longest": [(1, 0), (2, 0), (4, 0)],
        "Most changed": [(1, 0), (2, 0), (3, 0)],  # by 0.5 twice, by 0.25; prompt 4 has no reward
    }
