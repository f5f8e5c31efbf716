"""The report page: its contents, that hostile text stays text, and that it loads nothing."""

import json
import re
import unicodedata
from pathlib import Path

from tests.tools.report.runs import PageReader, page, sample, write_run
from tinyrl.runs.records import read_run
from tinyrl.tools.report import write_report
from tinyrl.tools.report.panels import outcome


def test_page_holds_outcome_charts_samples_and_settings(grpo: tuple[Path, str]) -> None:
    run, html = grpo
    reader = PageReader(html)
    assert outcome(read_run(run)) in reader.text
    captions = ["Reward", "KL from the reference", "Entropy", "Completion length", "Cut at the length limit",
                "Spread of rewards", "Groups without spread", "Gradient norm", "Time by phase"]  # fmt: skip
    assert re.findall(r"<figcaption><b>([^<]*)</b>", html) == captions
    assert "held-out from 0.460 at step 0 to 0.923 at step 60" in reader.text  # 0.46 + 0.48 * (1 - e^(-60/18))
    shown = ("sort: qwhzkalmbc =", "abchklmqw", "abchklmqwz", "Before: step 0", "After: step 60", "grpo.group_size")
    assert [text for text in shown if text not in reader.text] == []
    assert "pass@1</th>" in html  # in the table of numbers; as a chart it would repeat the reward
    assert "tinyrl eval" in reader.text


def test_same_prompts_before_and_after(tmp_path: Path) -> None:
    a, b = (0, "PROMPT-A"), (1, "PROMPT-B")
    samples = [
        sample(0, *b, "before-b", 0.25), sample(0, *a, "before-a-second", 0.0, sample=1),
        sample(0, *a, "before-a", 0.0), sample(0, *a, "in-training", 0.5, kind="train", sample=-1),
        sample(5, *a, "half-way", 0.5), sample(9, *b, "after-b", None, finish_reason="length"),
        sample(9, *a, "after-a", 0.75), sample(9, 7, "PROMPT-C", "only-after", 1.0),
    ]  # fmt: skip
    text = PageReader(page(write_run(tmp_path / "run", [{"step": 9, "reward/mean": 1}], samples=samples))).text
    text = text.partition("Extremes at")[0]
    wanted = ["PROMPT-A", "before-a", "half-way", "0.750", "after-a"]
    wanted += ["PROMPT-B", "before-b", "not sampled", "cut at the length limit", "after-b"]
    places = [text.index(word) for word in wanted]
    assert places == sorted(places)
    assert not [word for word in ("before-a-second", "in-training", "only-after") if word in text]


def test_a_config_with_aliases_is_not_read(tmp_path: Path) -> None:
    """Nine lists of nine of the one before: a bomb that a plain safe_load takes minutes for."""
    folder = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    lists = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    for text in ("a: &a [*a]\nb: &b {c: *b}\n", "\n".join(["a0: &a0 [x, x]", *lists]), "a: !!python/name:os.system\n"):
        (folder / "config.yaml").write_text(text, "utf-8")
        assert "config.yaml could not be read" in PageReader(page(folder)).text


HOSTILE = (
    "</td><script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)>\x1b[31mred\x1b[0m"
    "\u202egnp.exe\u202c\u2066\u200b\U000e0041\x00\x07\x9b\u2028\ud800 & \"quoted\" 'single'"
)


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    metrics = [{"step": step, "reward/mean": 0.5, f"reward/{HOSTILE}": 1.0, "reward/b": 2.0, f"time/{HOSTILE}": 1.0,
                f"loss/{HOSTILE}": 1.0, f"{HOSTILE}": None if step else 1.0} for step in (0, 1)]  # fmt: skip
    samples = [sample(step, 0, HOSTILE, HOSTILE, 1.0, finish_reason=HOSTILE) for step in (0, 1)]
    config = {"method": "<script>", "task": {"name": "<script>"}, "<b>key</b>": "<script>", "model": {"path": "<svg>"}}
    run = write_run(tmp_path / "<script>alert(2)<\u202e", metrics, samples=samples, config=config)
    (run / "env.json").write_text(json.dumps({"command": HOSTILE, HOSTILE: [HOSTILE]}), "utf-8")
    (run / "checkpoints" / "step-<script>").mkdir(parents=True)
    write_report(run)
    html = (run / "report.html").read_text("utf-8")
    reader = PageReader(html)
    assert "<script" not in html.lower()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert {"script", "img", "iframe", "object", "embed", "link", "base", "form"}.isdisjoint(
        {t for t, _ in reader.tags}
    )
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert all((value or "").startswith("#") for name, value in attributes.items() if name in ("href", "src"))
    unseen = {c for c in html if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert unseen == set()
    for name in ("ESC", "U+202E", "U+2066", "U+200B", "U+E0041", "U+0000", "U+009B", "U+2028", "U+D800"):
        assert f'<span class="unseen">{name}</span>' in html


def test_page_loads_nothing_and_its_references_are_in_it(grpo: tuple[Path, str]) -> None:
    html = grpo[1]
    policies = [attributes["content"] for _, attributes in PageReader(html).tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert not [text for text in ("http:", "https:", "@import", "<script") if text in html]
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#?([^)]*)\)|href="#([^"]*)"|aria-labelledby="([^"]*)"', html)
    assert references
    assert {name for names in references for name in names if name} <= set(ids)
    assert html.count('role="img"') == 10  # nine panels, the first in two sizes


def test_an_episode_is_shown_by_role(tmp_path: Path) -> None:
    said = [("assistant", "<search>Ada</search>"), ("tool", "<b>Bern</b>"), ("assistant", "it is Bern")]
    turns = [{"role": role, "content": text} for role, text in said]
    many = [{"role": ("assistant", "tool")[i % 2], "content": f"said-{i:02d}"} for i in range(40)]
    samples = [
        sample(2, 0, "PROMPT", "not shown", 1.0, episode=turns, finish_reason="turns"),
        sample(2, 1, "PROMPT", "alone", 1.0),
        sample(2, 2, "PROMPT", "not shown", 1.0, episode=many),
    ]
    html = page(write_run(tmp_path / "run", [{"step": 2, "reward/mean": 1}], samples=samples))
    assert '<span class="who">environment</span><div class="text read" dir="auto">&lt;b&gt;Bern&lt;/b&gt;</div>' in html
    assert '<span class="who">policy</span><div class="text" dir="auto">it is Bern</div>' in html
    assert "had no more turns" in html
    assert '</b></span><div class="text" dir="auto">alone</div>' in html  # no name where nobody answers
    assert "not shown" not in html
    shown = re.findall(r"said-(\d\d)", html.partition("Extremes at")[0])
    assert shown == [f"{i:02d}" for i in (*range(8), *range(32, 40))]
    assert "24 messages left out" in html
