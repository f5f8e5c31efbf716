"""Answers compared as mathematics by math-verify: the pairs that plain comparison misses, and what must stay wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tinyrl.tasks import load_task

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'tinyrl[math]'"
)

EQUAL = [("(1,2)", "(1, 2)"), (r"\text{Paris}", "Paris"), (r"\frac12", "1/2"), (r"2\sqrt{3}", r"\sqrt{12}"),
         (r"50\%", "0.5"), ("(x+1)^2", "x^2+2x+1"), (r"\{1,2\}", r"\{2, 1\}"), ("$5$", "5")]  # fmt: skip
OTHER = [
    (r"Then the final answer is $2\sqrt{3}$. I hope it is correct.", r"\sqrt{12}", 1.0),
    ("It is 3, so the answer is 4.", "3", 0.0),
    ("7", None, None),
    ("7", " ", None),
    # gold answers that cannot be read; near them, signs and words, which are compared as text
    *[("<answer>7</answer>", unread, None) for unread in (r"\text{}", "$$", r"\boxed{}", r"\frac{1}{", r"\sqrt")],
    ("<answer>+</answer>", "+", 1.0),
    ("<answer>-</answer>", "+", 0.0),
    ("<answer>no</answer>", r"\text{No}", 1.0),
    ("<answer>東京</answer>", "東京", 1.0),
    ("<answer>(1,2)</answer>", "(2,1)", 0.0),
    ("<answer>listen</answer>", "silent", 0.0),  # the same product of letters
    ("<answer>0.333</answer>", "1/3", 0.0),
    ("<answer>\\frac{</answer>", "1/2", 0.0),
]


def right(said: str, reference: str | None) -> float | None:
    from tinyrl.tasks.math_grading import equal_answers

    return equal_answers(["?"], [said], answer=[reference])[0]


@needs_math_verify
def test_equal_answers_are_right_however_they_are_marked() -> None:
    for said, reference in EQUAL:
        assert right(f"So it is <answer>{said}</answer>", reference) == 1.0
        assert right(f"therefore \\boxed{{{said}}}.", reference) == 1.0
        assert right(said, f"because of this\n#### {reference}") == 1.0
        assert right(reference, said) == 1.0


@needs_math_verify
def test_other_answers_are_wrong_and_unreadable_ones_have_no_score() -> None:
    for text, reference, score in OTHER:
        assert right(text, reference) == score, text


@needs_math_verify
def test_a_comparison_that_never_comes_to_its_end_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert right("<answer>0</answer>", "x-x") == 1.0  # which imports
    monkeypatch.setattr("tinyrl.tasks.math_grading.PATIENCE_S", 0.2)
    assert right("<answer>10^{10^{10}}</answer>", "1") == 0.0


@needs_math_verify
@pytest.mark.parametrize(("length", "score"), [(300, 1.0), (301, 0.0)])
def test_an_answer_that_is_too_long_is_not_read_as_a_formula(length: int, score: float) -> None:
    said = f"(x+{' ' * (length - 7)}1)^2"
    assert len(said) == length
    assert right(f"<answer>{said}</answer>", "x^2+2x+1") == score


@needs_math_verify
@pytest.mark.slow
def test_a_process_that_does_not_get_to_compute_scores_no_right_answer_zero() -> None:
    """Another process stops this one again and again, as a busy machine does, for longer than PATIENCE_S in all."""
    stops = f"import os, signal, time\nfor _ in range(24):\n    os.kill({os.getpid()}, signal.SIGSTOP)\n"
    stops += f"    time.sleep(0.5)\n    os.kill({os.getpid()}, signal.SIGCONT)\n    time.sleep(0.004)\n"
    right("<answer>0</answer>", "x-x")  # which imports
    other = subprocess.Popen([sys.executable, "-c", stops])
    try:
        scores = []
        while other.poll() is None:
            scores.append(
                right(f"<answer>(x+{len(scores) + 1})^2</answer>", f"(x+{len(scores) + 1})*(x+{len(scores) + 1})")
            )
    finally:
        other.wait()
    assert scores  # few where the machine is busy
    assert set(scores) == {1.0}


def test_a_task_with_a_rule_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^task.grading=math .* task sort"):
        load_task("sort", grading="math")
