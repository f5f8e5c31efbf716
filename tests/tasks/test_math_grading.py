"""Answers compared as mathematics by math-verify: the pairs that plain comparison misses, and what must stay wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.rewards.functions import FunctionReward
from tinyrl.tasks import load_task

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'tinyrl[math]'"
)

EQUAL = [
    ("(1,2)", "(1, 2)"),
    (r"\text{Paris}", "Paris"),
    (r"\frac12", "1/2"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"50\%", "0.5"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"x = \pi", r"\pi"),
    ("$5$", "5"),
]
DIFFERENT = [
    ("(1,2)", "(2,1)"),
    ("listen", "silent"),  # the same product of letters
    ("Paris", "London"),
    ("0.333", "1/3"),
    ("10^{10^{10}}", "1"),  # never comes to its end
    ("", "1"),
    ("\\frac{", "1/2"),
]


def right(said: str, reference: str | None) -> float | None:
    from tinyrl.tasks.math_grading import equal_answers

    return equal_answers(["?"], [said], answer=[reference])[0]


@needs_math_verify
@pytest.mark.parametrize(("said", "reference"), EQUAL)
@pytest.mark.wide
def test_equal_answers_are_right_however_they_are_marked(said: str, reference: str) -> None:
    assert right(f"So it is <answer>{said}</answer>", reference) == 1.0
    assert right(f"therefore \\boxed{{{said}}}.", reference) == 1.0
    assert right(said, f"because of this\n#### {reference}") == 1.0
    assert right(reference, said) == 1.0


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        *[pytest.param(f"<answer>{said}</answer>", other, 0.0, marks=pytest.mark.wide) for said, other in DIFFERENT],
        (r"Then the final answer is $2\sqrt{3}$. I hope it is correct.", r"\sqrt{12}", 1.0),
        ("It is 3, so the answer is 4.", "3", 0.0),
        ("7", None, None),
        ("7", " ", None),
    ],
)
def test_other_answers_are_wrong_and_rows_without_one_have_no_score(
    text: str, reference: str | None, score: float | None
) -> None:
    assert right(text, reference) == score


def test_only_tasks_with_an_answer_can_be_graded_so() -> None:
    with pytest.raises(ValueError, match=r"^task.grading=math .* task sort"):
        load_task("sort", grading="math")


def test_without_the_package_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else find_spec(name)
    )
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(4)))
    words = ["train", "grpo", "task.data=rows.jsonl", "task.grading=math"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "task.grading=math needs math-verify: pip install 'tinyrl[math]'" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


@needs_math_verify
def test_math_is_graded_in_a_process_of_its_own() -> None:
    with FunctionReward(load_task("rows", grading="math").grader or "", timeout_s=60.0) as grader:
        call = grader(["?"] * 3, ["0.5", "1/3", "1/2"], {"answer": [r"\frac12"] * 3})
    assert (call.scores, call.failures) == ([1.0, 0.0, 1.0], [])
