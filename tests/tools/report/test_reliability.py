"""The reliability table of a reward model's run."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import PageReader, page, write_run

BINS = [[0.512, 0.48, 51], [0.75, 0.8, 50], [0.97, 1.0, 51]]
LINES: list[dict[str, Any]] = [
    {"step": 0, "eval/accuracy": 0.5, "eval/ece": 0.0, "eval/reliability": [[0.5, 0.5, 152]], "time/total": 1.0},
    {"step": 1, "rewards/accuracy": 0.6, "time/total": 1.0},
    {"step": 2, "eval/accuracy": 0.76, "eval/ece": 0.037, "eval/reliability": BINS, "time/total": 1.0},
    {"step": 3, "rewards/accuracy": 0.8, "time/total": 1.0},
]


def test_the_last_evaluation_is_shown_in_numbers(tmp_path: Path) -> None:
    html = page(write_run(tmp_path / "run", LINES, config={"method": "reward"}))
    table = html[html.index("<h2>Reliability</h2>") :]
    table = table[: table.index("</table>")]
    cells = [re.findall(r">([^<]*)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", table)]
    assert cells == [
        ["0.512", "0.480", "\u22120.032", "51"],
        ["0.750", "0.800", "0.050", "50"],
        ["0.970", "1", "0.030", "51"],
    ]
    assert "at step 2" in table
    assert "off by 0.037" in PageReader(table).text
    tiles = PageReader(html[html.index('<dl class="tiles">') : html.index("</dl>")]).text
    assert "Calibration error" in tiles


@pytest.mark.parametrize("odd", [None, 3, "x", [], [1, 2], [[1, 2]], [["a", None, True]], [[1e999, 0, 1]], {"a": 1}])
def test_something_else_under_its_name_is_left_out(odd: Any, tmp_path: Path) -> None:
    html = page(write_run(tmp_path / "run", [{"step": 1, "rewards/accuracy": 0.6, "eval/reliability": odd}]))
    assert "Reliability" not in html
