"""The token view: colours, what was read, where the reward landed, and hostile pieces."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tests.tools.report.runs import PageReader, page, write_run
from tinyrl.runs.records import MOST_TOKENS, read_last_tokens
from tinyrl.tools.report import level_of, scale_of


def token(piece: str, **numbers: Any) -> dict[str, Any]:
    return {"piece": piece, "chosen": True, "advantage": None, "old": -0.5, "new": -0.5, "ref": -0.5, "value": None,
            "reward": None, **numbers}  # fmt: skip


def line(step: int, tokens: list[Any], **more: Any) -> dict[str, Any]:
    return {"step": step, "kind": "eval", "prompt_index": 3, "sample": 1, "prompt": "PROMPT", "reward": 0.25,
            "tokens": tokens, **more}  # fmt: skip


def run_with(folder: Path, lines: list[dict[str, Any]], tail: str = "") -> Path:
    run = write_run(folder, [{"step": 1, "reward/mean": 1}])
    (run / "tokens.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + tail, "utf-8")
    return run


def section(run: Path) -> str:
    html = page(run)
    return html.partition("<h2>Token by token</h2>")[2].partition("<h2>")[0]


def test_tokens_are_coloured_by_what_the_reader_chooses(tmp_path: Path) -> None:
    tokens = [
        token("one", advantage=1.0, old=-2.0, new=-1.5, ref=-2.5),
        token(" two", advantage=-0.4, reward=0.75),
        token("<obs>", chosen=False, advantage=1.0),
    ]
    html = section(run_with(tmp_path / "run", [line(1, [token("old")]), line(2, tokens), line(1, [token("old")])]))
    assert re.findall(r'id="by-(\w)"( checked)?', html) == [
        ("a", " checked"), ("d", ""), ("k", ""), ("s", ""), ("w", ""),
    ]  # no value: nothing to choose  # fmt: skip
    # scales 1, 0.5, 0.5, 2 and 0.75: levels 5, 5, 5 and -5 of the first; -2 and -1 of the second, and 5 for its reward
    assert (
        '<span class="a5 d5 k5 sm5" title="advantage 1 · old \u22122 · new \u22121.50 · ref \u22122.50">one</span>'
        in html
    )
    assert re.search(
        r'<span class="am2 sm1 w5" title="[^"]*reward 0.750"> two</span><sup class="got">0.750</sup>', html
    )
    assert re.search(r'<span class="unchosen" title="[^"]*">&lt;obs&gt;</span>', html)
    assert "#by-a:checked ~ .tokens .am2 { background: color-mix(in srgb, var(--held) 22%, transparent); }" in html
    assert "strongest from 0.500 on." in html
    assert ">old<" not in html  # of an earlier step
    assert "1 completion of step 2" in html
    assert "held-out, prompt 3, sample 1 · reward 0.250</span>" in html


def test_levels_and_scale() -> None:
    assert scale_of([math.nan, 0.0, -3.0, 1.0]) == 3.0
    assert scale_of([float(i) for i in range(1, 101)]) == 95.0  # the largest few do not wash out the rest
    assert scale_of([math.nan, 0.0]) == 0.0
    assert [level_of(value, 2.0) for value in (0.0, 0.1, 0.5, 2.0, 9.0, -9.0, math.nan)] == [0, 0, 1, 5, 5, -5, 0]


def test_hostile_and_odd_lines_harm_nothing(tmp_path: Path) -> None:
    hostile = "</span><script>alert(1)</script>\x1b[31m\u202e\ud800"
    odd = [token(hostile, advantage=1.0), 3, {}, {"piece": None, "chosen": "x", "advantage": [1], "reward": 1e999}]
    lines = [line(2, odd, prompt=hostile, prompt_index="x"), line(2, [token("x" * 1_000_000)])]
    lines += [{"step": 2}, {"step": 9, "tokens": "none"}]
    run = run_with(tmp_path / "run", lines, tail="broken\n" + '{"step": 3, "tok')
    html = page(run)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)") == 2
    assert html.count('<span class="unseen">U+D800</span>') == 2
    assert len(html) < 60_000
    assert "tokens.jsonl: 1 line could not be read" in PageReader(html).text


def test_long_completions_are_cut_in_the_middle_and_only_some_are_shown(tmp_path: Path) -> None:
    tokens = [token(f"t{i};") for i in range(1000)]
    run = run_with(tmp_path / "run", [line(2, tokens)] * 12)
    found = read_last_tokens(run / "tokens.jsonl", [])
    assert len(found) == 8
    assert [one["piece"] for one in found[0]["tokens"]] == [f"t{i};" for i in (*range(200), *range(800, 1000))]
    html = section(run)
    assert html.count("… 600 tokens left out …") == 8
    assert html.index(">t199;<") < html.index("600 tokens left out") < html.index(">t800;<")
    assert len(html) < 8 * MOST_TOKENS * 130
