"""examples/first_run.ipynb, executed: its cells as a kernel runs them, and what they say."""

import ast
import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_run.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run_cell(source: str, names: dict[str, Any], number: int) -> Any:
    """Run a cell in __main__, its lines at hand as a kernel has them; the value of its last line."""
    file = f"<ipython-input-{number}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None  # pyright: ignore
    exec(compile(tree, file, "exec"), names)
    return None if last is None else eval(compile(last, file, "eval"), names)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    shown = []
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            lines = [line for line in cell["source"] if not line.startswith("%")]  # which the kernel runs itself
            shown.append(run_cell("".join(lines), vars(main), number))
    run = vars(main)["run"]
    assert (run.exit_code, run.finished, run.config.run.num_steps) == (0, True, 30)
    held_out = [line["eval/reward_mean"] for line in run.metrics if "eval/reward_mean" in line]
    assert held_out[-1] > held_out[0]
    assert any(hasattr(value, "_repr_html_") for value in shown)
    assert len(capsys.readouterr().out.splitlines()[-1].split()) == 8  # eight letters
