"""What is prepared before torch is imported is handed on, and not found again."""

from pathlib import Path

from typer.testing import CliRunner

from tinyrl.cli.commands import app

TASK = """
from pathlib import Path
from tinyrl.tasks import Task

def rows(split):
    with Path(__file__).with_name("reads.txt").open("a") as file:
        file.write(f"{split}\\n")
    return [{"prompt": f"{split} {i}", "answer": "a"} for i in range(20)]

def verify(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

TASK = Task(name="counted", rows=rows, verify=verify, gold=lambda row: row["answer"])
"""


def test_check_reads_the_rows_of_a_task_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(TASK)
    done = CliRunner().invoke(app, ["check", "grpo", f"task.name={tmp_path / 'counted.py'}:TASK", "--quick"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "reads.txt").read_text().split() == ["train", "eval"]
