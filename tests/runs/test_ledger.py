"""`tinyrl show RUN --prompts`: prompts never solved, always solved, forgotten; and their rows as a file."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tests.running import rows_of
from tests.tools.report.runs import write_run
from tinyrl.cli.commands import app
from tinyrl.data.rows import row_key
from tinyrl.runs.samples import hard_keys, read_prompt_stats, render_prompt_stats

#                 index, key, tried, solved
STEPS: dict[int, list[Any]] = {
    1: [[0, "a", 4, 0], [1, "b", 4, 4], [2, "c", 4, 2], [3, "d", 4, 1], [9, "i", 0, 0]],
    2: [[0, "a", 3, 0], [1, "b", 4, 4], [2, "c", 4, 0]],
    5: [[2, "c", 2, 0], [3, "d", 4, 3], [7, "e", 4, 0]],
}
TEXTS = {0: "first prompt\x1b[2J", 2: "third"}


def write(folder: Path, steps: dict[int, list[Any]] = STEPS, *, tail: str = "", **more: Any) -> Path:
    made = write_run(folder / "run", [{"step": 0}], **more)
    lines = [json.dumps({"step": step, "prompts": prompts}) + "\n" for step, prompts in steps.items()]
    (made / "prompts.jsonl").write_text("".join(lines) + tail)
    return made


def shown(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments, "--prompts"])


def test_a_prompt_stands_by_all_its_tries_and_the_last(tmp_path: Path) -> None:
    prompt_stats = read_prompt_stats(write(tmp_path) / "prompts.jsonl", [])
    assert {record.index: record.outcome for record in prompt_stats} == {
        0: "never",
        1: "always",
        2: "forgotten",
        3: "sometimes",
        7: "never",
    }
    assert [record.tried for record in prompt_stats] == [7, 8, 10, 8, 4]
    assert prompt_stats[2].tries == [(1, 4, 2), (2, 4, 0), (5, 2, 0)]
    assert hard_keys(prompt_stats) == {"a", "c", "e"}


def test_the_page_has_the_counts_and_the_hard_ones_tried_most(tmp_path: Path) -> None:
    prompt_stats = read_prompt_stats(write(tmp_path) / "prompts.jsonl", [])
    assert render_prompt_stats(prompt_stats, TEXTS, num=1).split("\n") == [
        "training prompts tried: 5, in steps 1 to 5",
        "right, or solved: a completion whose reward is task.solved_reward or more",
        "      2  never solved: every completion was wrong",
        "      1  forgotten: solved once, and not at the last try",
        "      1  in between",
        "      1  always solved: every completion was right",
        "",
        "never solved (1 of 2)",
        "  prompt 0      0/4 0/3  first prompt[ESC][2J",
        "",
        "forgotten",
        "  prompt 2      2/4 0/4 0/2  third",
    ]


def test_damage_is_left_out_and_said(tmp_path: Path) -> None:
    odd = [[0, "a", 4], "x", [0, 5, 4, 0], [-1, "a", 4, 0], [0, "a", 4, 5], [True, "a", 4, 0], [1, "b", 2, 1]]
    made = write(tmp_path, {1: odd}, tail='{"step": 2}\n{"step": \n{"step": 3, "pro')
    notes: list[str] = []
    (record,) = read_prompt_stats(made / "prompts.jsonl", notes)
    assert (record.index, record.tries) == (1, [(1, 2, 1)])
    assert notes == [
        "prompts.jsonl: 1 line could not be read and are left out.",
        "prompts.jsonl: 7 entries could not be read and are left out.",
    ]


def with_rows(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A run on the training rows of a file, of which the first was never solved, the second was, the third is new."""
    data = folder / "rows.jsonl"
    written = [{"q": f"say {c}", "answer": c} for c in "abcdefgh"]
    data.write_text("".join(json.dumps(row) + "\n" for row in written))
    config = {"method": "grpo", "task": {"name": "rows", "data": str(data), "columns": {"prompt": "q"}}}
    rows = rows_of("rows", "train", data=str(data), columns={"prompt": "q"})
    entries = [[0, row_key(rows[0]), 4, 0], [1, row_key(rows[1]), 4, 1], [5, "of a row that is gone", 4, 0]]
    return write(folder, {1: entries}, config=config), rows


def test_hard_rows_are_written_to_train_on(tmp_path: Path) -> None:
    made, rows = with_rows(tmp_path)
    hard = tmp_path / "hard.jsonl"
    done = shown(str(made), "--export-hard", str(hard))
    assert done.exit_code == 0, done.stderr
    assert f"1 rows in {hard}" in done.stdout
    assert "1 are not in the training rows any more" in done.stdout
    assert [json.loads(line) for line in hard.read_text().splitlines()] == rows[:1]
    assert rows_of("rows", "train", data=str(hard), eval_data=str(hard)) == rows[:1]
    again = shown(str(made), "--export-hard", str(hard))
    assert again.exit_code == 2
    assert "hard.jsonl exists; give another name" in again.stderr


def test_a_prompt_that_no_sample_shows_has_the_text_of_its_row(tmp_path: Path) -> None:
    made, rows = with_rows(tmp_path)
    done = shown(str(made))
    assert done.exit_code == 0, done.stderr
    assert f"prompt 0      0/4  {rows[0]['prompt']}" in done.stdout
    (tmp_path / "rows.jsonl").unlink()
    gone = shown(str(made))
    assert gone.exit_code == 0
    assert "prompt 0      0/4\n" in gone.stdout
    assert "rows.jsonl: no such file" in gone.stderr
