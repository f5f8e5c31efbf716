"""The page: what it holds, that hostile text stays text, that it loads nothing, and how both files are written."""

import json
import math
import os
import re
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import PageReader, grpo_run, page, sample, write_run
from tinyrl.runs.records import MOST_TOKENS, read_run
from tinyrl.tools.report import completions, token_view, write_report
from tinyrl.tools.report.panels import outcome, subtitle

HOSTILE = (
    "</td><script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)>\x1b[31mred\x1b[0m"
    "\u202egnp.exe\u202c\u2066\u200b\U000e0041\x00\x07\x9b\u2028\ud800 & \"quoted\" 'single'"
)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A reported GRPO run and its page."""
    run = grpo_run(tmp_path_factory.mktemp("runs") / "grpo-sorting-1")
    write_report(run)
    return run, (run / "report.html").read_text("utf-8")


def test_page_holds_outcome_charts_samples_and_settings_and_loads_nothing(grpo: tuple[Path, str]) -> None:
    run, html = grpo
    reader = PageReader(html)
    assert outcome(read_run(run)) in reader.text
    captions = ["Reward", "KL from the reference", "Entropy", "Completion length", "Cut at the length limit",
                "Reward standard deviation", "Groups with equal rewards", "Gradient norm", "Time by phase"]  # fmt: skip
    assert re.findall(r"<figcaption><b>([^<]*)</b>", html) == captions
    assert "held-out 0.923" in reader.text  # 0.46 + 0.48 * (1 - e^(-60/18))
    shown = ("sort: qwhzkalmbc =", "abchklmqw", "abchklmqwz", "Before: step 0", "After: step 60", "grpo.group_size")
    assert [text for text in shown if text not in reader.text] == []
    policies = [attributes["content"] for _, attributes in reader.tags if "http-equiv" in attributes]
    assert policies == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]
    assert not [text for text in ("http:", "https:", "@import", "<script") if text in html]
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#?([^)]*)\)|href="#([^"]*)"|aria-labelledby="([^"]*)"', html)
    assert {name for names in references for name in names if name} <= set(ids)


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    metrics = [{"step": step, "reward/mean": 0.5, f"reward/{HOSTILE}": 1.0, "reward/b": 2.0, f"time/{HOSTILE}": 1.0,
                f"loss/{HOSTILE}": 1.0, f"{HOSTILE}": None if step else 1.0} for step in (0, 1)]  # fmt: skip
    samples = [sample(step, 0, HOSTILE, HOSTILE, 1.0, finish_reason=HOSTILE) for step in (0, 1)]
    config = {"method": "<script>", "task": {"name": "<script>"}, "<b>key</b>": "<script>", "model": {"path": "<svg>"}}
    run = write_run(tmp_path / "<script>alert(2)<\u202e", metrics, samples=samples, config=config)
    (run / "env.json").write_text(json.dumps({"command": HOSTILE, "forked_from": HOSTILE, HOSTILE: [HOSTILE]}), "utf-8")
    (run / "checkpoints" / "step-<script>").mkdir(parents=True)
    write_tokens(run, [tokens_line(1, [token(HOSTILE, advantage=1.0)], prompt=HOSTILE)])
    write_report(run)
    html = (run / "report.html").read_text("utf-8")
    reader = PageReader(html)
    assert "<script" not in html.lower()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert {"img", "iframe", "object", "embed", "link", "base", "form"}.isdisjoint({tag for tag, _ in reader.tags})
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "src"]
    unseen = {c for c in html if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert unseen == set()
    assert '<span class="unseen">U+202E</span>' in html


def test_a_fork_names_its_origin(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": step, "reward/mean": 0.5} for step in (0, 1)])
    (run / "env.json").write_text(json.dumps({"forked_from": "/runs/first@25"}), "utf-8")
    assert " · forked from /runs/first@25 · " in subtitle(read_run(run))


# ---- completions ----


def test_the_outcome_of_a_fork_is_since_its_start(tmp_path: Path) -> None:
    lines = [{"step": step, "eval/reward_mean": step / 10} for step in (0, 4, 6)]
    run = write_run(tmp_path / "fork", lines)
    assert "from 0 to 0.600 in 6 steps (" in outcome(read_run(run))
    (run / "env.json").write_text('{"forked_from": "/runs/other@4"}')
    (run / "checkpoints/step-000004").mkdir(parents=True)
    assert "from 0.400 to 0.600 in 2 steps from step 4 on (" in outcome(read_run(run))
    assert f"--vs {run}@4 " in page(run)


def test_same_prompts_before_and_after(tmp_path: Path) -> None:
    a, b = (0, "PROMPT-A"), (1, "PROMPT-B")
    samples = [
        sample(0, *b, "before-b", 0.25), sample(0, *a, "before-a-second", 0.0, sample=1),
        sample(0, *a, "before-a", 0.0), sample(0, *a, "in-training", 0.5, kind="train", sample=-1),
        sample(5, *a, "half-way", 0.5), sample(9, *b, "after-b", None, finish_reason="length"),
        sample(9, *a, "after-a", 0.75), sample(9, 7, "PROMPT-C", "only-after", 1.0),
    ]  # fmt: skip
    html = page(write_run(tmp_path / "run", [{"step": 9, "reward/mean": 1}], samples=samples))
    html = html.partition("The same prompts")[2].partition("Extremes at")[0]
    text = PageReader(html).text
    wanted = ["PROMPT-A", "before-a", "half-way", "0.750", "after-a"]
    wanted += ["PROMPT-B", "before-b", "not sampled", "cut at the length limit", "after-b"]
    places = [text.index(word) for word in wanted]
    assert places == sorted(places)
    assert not [word for word in ("before-a-second", "in-training", "only-after") if word in text]
    # the step is chosen without a script: a radio button each, and a rule that shows what belongs to it
    assert re.findall(r'id="(at\d)"( checked)?><label for="(at\d)">(\d)<', html) == [
        ("at0", "", "at0", "5"), ("at1", " checked", "at1", "9"),
    ]  # fmt: skip
    assert "#at0:checked ~ table .at0,\n#at1:checked ~ table .at1 { display: revert; }" in html


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
    held_out = read_run(write_run(tmp_path / "run", [{"step": 1}], samples=samples)).held_out
    found = completions(held_out, {})["extremes"]
    assert {name: [(one.prompt_index, one.sample) for _, one in some] for name, some in found.items()} == {
        "Worst": [(1, 1), (2, 0), (0, 0)],
        "Best": [(1, 0), (3, 0), (0, 0)],
        "Longest": [(1, 0), (2, 0), (4, 0)],
        "Most changed": [(1, 0), (2, 0), (3, 0)],  # by 0.5 twice, by 0.25; prompt 4 has no reward
    }


def test_an_episode_is_shown_by_role(tmp_path: Path) -> None:
    roles = ("assistant", "tool")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(["ask", "<b>Bern</b>", "it is Bern"])]
    many = [{"role": roles[i % 2], "content": f"turn-{i:02d}"} for i in range(40)]
    samples = [sample(2, i, "PROMPT", "not shown", 1.0, episode=episode) for i, episode in enumerate((turns, many))]
    html = page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))
    assert '<span class="who">environment</span><div class="text read" dir="auto">&lt;b&gt;Bern&lt;/b&gt;</div>' in html
    assert '<span class="who">policy</span><div class="text" dir="auto">it is Bern</div>' in html
    assert "not shown" not in html
    shown = re.findall(r"turn-(\d\d)", html.partition("Extremes at")[0])
    assert shown == [f"{i:02d}" for i in (*range(8), *range(32, 40))]
    assert "24 messages left out" in html


def test_a_turn_of_an_episode_is_shown_with_its_own_reward(tmp_path: Path) -> None:
    episode = [{"role": role, "content": role} for role in ("assistant", "tool", "assistant")]
    turns = [{"reward": 0.25, "advantage": None}, {"reward": None, "advantage": None}]
    samples = [sample(2, 0, "PROMPT", "not shown", 0.25, episode=episode, turns=turns)]
    html = page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))
    speakers = re.findall(r'<span class="who">(.*?)</span>', html.partition("Held-out prompts")[2].partition("<h2>")[0])
    assert speakers == ["policy · reward 0.250", "environment", "policy"]


def conversation(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {**more, "messages": [{"role": role, "content": text} for role, text in messages]}


def test_the_conversations_of_an_agent_are_shown_by_role_and_number(tmp_path: Path) -> None:
    """The second begins where the page leaves messages out, and is named where it goes on."""
    first = conversation(("system", "rules"), *[("user", f"turn-{i:02d}") for i in range(10)])
    second = conversation(*[("assistant", f"turn-{i:02d}") for i in range(10, 20)])
    samples = [sample(2, 0, "PROMPT", "the result", 1.0, conversations=[first, second])]
    html = page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))
    html, _, _ = html.partition("Extremes at")
    assert '<span class="who">system</span><div class="text read" dir="auto">rules</div>' in html
    assert '<span class="who">policy</span><div class="text" dir="auto">turn-19</div>' in html
    assert '<div class="text read" dir="auto">the result</div>' in html
    assert re.findall(r"conversation (\d)<|turn-(06|07|12|13)|(6) messages left", html) == [
        *(("1", "", ""), ("", "06", ""), ("", "", "6"), ("2", "", ""), ("", "13", ""))
    ]


def test_one_conversation_has_no_number(tmp_path: Path) -> None:
    samples = [sample(2, 0, "PROMPT", "the result", 1.0, conversations=[conversation(("user", "hello"))])]
    assert "conversation 1" not in page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))


def test_hostile_conversations_are_escaped(tmp_path: Path) -> None:
    call = {"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    tool = {"function": {"name": HOSTILE, "description": HOSTILE, "parameters": {"properties": {HOSTILE: {}}}}}
    message = {"role": HOSTILE, "content": HOSTILE, "tool_calls": [call]}
    one = {"tools": [tool], "same_as": {"conversation": HOSTILE, "messages": HOSTILE}, "messages": [message]}
    samples = [sample(2, 0, "PROMPT", HOSTILE, 1.0, conversations=[one, one])]
    html = page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))
    assert "<script" not in html.lower()
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10
    unseen = {c for c in html if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert unseen == set()


@pytest.mark.parametrize(
    "odd",
    [[], ["x", None], [{}], [{"messages": "x", "tools": 3}], [{"messages": [3, {"tool_calls": [3]}], "tools": [3]}]],
)
def test_odd_conversations_are_survived(odd: list[Any], tmp_path: Path) -> None:
    samples = [sample(2, 0, "PROMPT", "the result", 1.0, conversations=odd)]
    assert "the result" in page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))


# ---- token by token ----


def token(piece: str, **numbers: Any) -> dict[str, Any]:
    return {"piece": piece, "chosen": True, "advantage": None, "old": -0.5, "new": -0.5, "ref": -0.5, "value": None,
            "reward": None, **numbers}  # fmt: skip


def tokens_line(step: int, tokens: list[Any], **more: Any) -> dict[str, Any]:
    return {"step": step, "kind": "eval", "prompt_index": 3, "sample": 1, "prompt": "PROMPT", "reward": 0.25,
            "tokens": tokens, **more}  # fmt: skip


def write_tokens(run: Path, lines: list[dict[str, Any]], tail: str = "") -> None:
    (run / "tokens.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + tail, "utf-8")


def test_tokens_are_coloured_by_what_the_reader_chooses(tmp_path: Path) -> None:
    tokens = [
        token("one", advantage=1.0, old=-2.0, new=-1.5, ref=-2.5),
        token(" two", advantage=-0.4, reward=0.75),
        token("<obs>", chosen=False, advantage=1.0),
    ]
    run, old = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1}]), tokens_line(1, [token("old")])
    write_tokens(run, [old, tokens_line(2, tokens), old])
    html = page(run)
    assert re.findall(r'id="by-(\w)"( checked)?', html) == [
        ("a", " checked"), ("d", ""), ("k", ""), ("s", ""), ("w", ""),
    ]  # no value: nothing to choose  # fmt: skip
    # scales 1, 0.5, 0.5, 2 and 0.75: levels 5, 5, 5 and -5 of the first; -2 and -1 of the second, and 5 for its reward
    numbers = "advantage 1 · old \u22122 · new \u22121.50 · ref \u22122.50"
    assert f'<span class="a5 d5 k5 sm5" title="{numbers}">one</span>' in html
    assert re.search(r'"am2 sm1 w5" title="[^"]*reward 0.750"> two</span><sup class="got">0.750</sup>', html)
    assert re.search(r'<span class="unchosen" title="[^"]*">&lt;obs&gt;</span>', html)
    assert "#by-a:checked ~ .tokens .am2 { background: color-mix(in srgb, var(--held) 22%, transparent); }" in html
    assert ">old<" not in html  # of an earlier step


def test_the_largest_few_do_not_wash_out_the_rest() -> None:
    tokens = [token("x", advantage=i, old=0.0, new=0.0, ref=math.nan) for i in (*range(1, 101), 0, math.nan, -1e3)]
    found = token_view([{"tokens": tokens[:-1]}])
    assert found["scales"] == {"a": 95}
    assert [classes for _, classes, *_ in found["tokens"][0]["tokens"]][8:103:30] == ["", "a2", "a4", "a5"]


def test_odd_lines_are_survived_and_long_completions_cut_in_the_middle(tmp_path: Path) -> None:
    odd = [3, {}, {"piece": None, "chosen": "x", "advantage": [1], "reward": 1e999}, token("x" * 1_000_000)]
    lines = [tokens_line(2, odd, prompt_index="x"), *[tokens_line(2, [token(f"t{i};") for i in range(1000)])] * 11]
    run = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1}])
    write_tokens(run, [*lines, {"step": 2}, {"step": 9, "tokens": 0}], tail="broken\n" + '{"step": 3, "tok')
    html = page(run)
    assert html.count("… 600 tokens left out …") == 7
    assert html.index(">t199;<") < html.index("600 tokens left out") < html.index(">t800;<")
    assert len(html) < 60_000 + 7 * MOST_TOKENS * 130
    assert "tokens.jsonl: 1 line could not be read" in PageReader(html).text


# ---- both files ----


def test_the_same_run_gives_the_same_bytes_in_any_process_without_torch(grpo: tuple[Path, str]) -> None:
    """Whatever matplotlib's own settings name: a style, and a backend of a notebook that is not here."""
    run, html = grpo
    picture = (run / "report.png").read_bytes()
    (run / "matplotlibrc").write_text("backend: nowhere\nxtick.labelsize: 30\n")
    code = (
        "import sys; from pathlib import Path; import tinyrl.tools.report\n"
        "slow = {'torch', 'transformers', 'matplotlib', 'numpy', 'yaml'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        f"tinyrl.tools.report.write_report(Path({str(run)!r}))\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    theirs = {"MPLBACKEND": "not_installed", "MATPLOTLIBRC": str(run / "matplotlibrc")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env={**os.environ, **theirs}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert (run / "report.html").read_text("utf-8") == html
    assert (run / "report.png").read_bytes() == picture


def test_a_run_of_many_steps_makes_a_small_page(tmp_path: Path) -> None:
    metrics = [{"step": step, "eval/reward_mean": step / 3000, "eval/reward_ci": [0, 1]} for step in range(3000)]
    html, picture = write_report(write_run(tmp_path / "run", metrics))
    assert max(html.stat().st_size, picture.stat().st_size) < 300_000
    assert "step 2,999\nheld-out 1.00 (0 to 1)" in html.read_text("utf-8")


@pytest.mark.parametrize(
    "metrics",
    [
        [{"step": 1, "reward/mean": None, "loss": float("inf")}],
        [{"step": 1, "reward/mean": 1e308}, {"step": 2, "reward/mean": 10**400}, {"step": 3, "reward/mean": 2}],
        [{"step": 2**52, "reward/mean": 1, "reward/$a^{$": 2, "reward/\u202e": 3, "time/$x_$": 1, "time/total": -3}],
    ],
    ids=["not finite", "enormous", "names"],
)
def test_any_run_can_be_reported(tmp_path: Path, metrics: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a name in a script that the font lacks is no reason for one
        paths = write_report(write_run(tmp_path / "试验", metrics))
    assert all(path.stat().st_size > 1000 for path in paths)
