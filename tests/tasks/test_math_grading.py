"""Answers compared as mathematics by math-verify: the pairs that plain comparison misses, and what must stay wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
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
    (r"50\%", "50"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("0.5", r"\dfrac{1}{2}"),
    ("1,000", "1000"),
    (r"x = \pi", r"\pi"),
    ("$5$", "5"),
]
DIFFERENT = [
    ("(1,2)", "(2,1)"),
    ("listen", "silent"),  # the same product of letters
    ("Paris", "London"),
    ("x^2", "x^3"),
    ("0.333", "1/3"),
    ("10^{10^{10}}", "1"),  # never comes to its end
    ("", "1"),
    ("\\frac{", "1/2"),
]


def right(said: str, reference: str) -> float | None:
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
@pytest.mark.parametrize(("said", "reference"), DIFFERENT)
@pytest.mark.wide
def test_different_answers_are_wrong(said: str, reference: str) -> None:
    assert right(f"<answer>{said}</answer>", reference) == 0.0


@needs_math_verify
def test_an_answer_is_found_in_prose_and_rows_without_one_have_no_score() -> None:
    from tinyrl.tasks.math_grading import equal_answers

    texts = [r"Then the final answer is $2\sqrt{3}$. I hope it is correct.", "It is 3, so the answer is 4.", "7"]
    assert equal_answers(["?"] * 3, texts, answer=[r"\sqrt{12}", "3", None]) == [1.0, 0.0, None]
    assert equal_answers(["?"], ["7"]) == [None]
    assert equal_answers(["?"], ["7"], answer=[" "]) == [None]


def test_only_tasks_with_an_answer_can_be_graded_so() -> None:
    with pytest.raises(ValueError, match=r"^task.grading=math compares a column 'answer', and task sort has a rule"):
        load_task("sort", grading="math")


@pytest.mark.parametrize("command", ["train", "check"])
def test_without_the_package_nothing_is_trained(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else find_spec(name)
    )
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(4)))
    words = [command, "grpo", "task.data=rows.jsonl", "task.grading=math"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "task.grading=math needs math-verify: pip install 'tinyrl[math]'" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


@needs_math_verify
def test_a_run_grades_in_a_process_of_its_own(tmp_path: Path) -> None:
    from tests import running
    from tests.tiny_models import tiny_model
    from tinyrl.rollout.components import Options, SamplingParts

    rows = [{"prompt": f"say {a}:", "answer": r"\frac12"} for a in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "name": "rows",
        "data": str(tmp_path / "rows.jsonl"),
        "max_samples": None,
        "grading": "math",
    }
    model = tiny_model(tmp_path / "model", "llama")
    config = running.config("grpo", model, task=task, reward={"functions": []})
    parts = SamplingParts(config, options=Options(device="cpu"))
    try:
        assert parts.scorer.grader is not None
        prompts = parts.train_prompts[:3]
        texts = ["0.5", "1/3", "1/2"]
        call = parts.scorer.grader([p.prompt for p in prompts], texts, {"answer": [p.row["answer"] for p in prompts]})
        assert (call.scores, call.failures) == ([1.0, 0.0, 1.0], [])
        assert parts.check()
    finally:
        parts.close()
