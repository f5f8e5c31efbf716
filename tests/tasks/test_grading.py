"""Grading: numbers, arithmetic, marked answers and formats; hostile text is never more than a wrong answer."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyrl.tasks import grading, rows
from tinyrl.tasks.grading import safe_arithmetic


def test_the_text_of_a_completion():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    said = [{"role": role, "content": content} for role, content in
            (("assistant", "a"), ("tool", "no"), ("assistant", None), ("assistant", "b"))]  # fmt: skip
    assert grading.completion_text([{"role": "assistant", "content": parts}]) == "hi"
    assert [grading.completion_text(completion) for completion in ("hi", said, [])] == ["hi", "a\nb", ""]


def test_the_answer_of_a_completion_is_outside_of_its_thoughts():
    said = [
        {"role": "assistant", "content": "<think>1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>3</think>4"},
    ]
    assert grading.answer_text("<think>maybe 42, no") == ""
    assert grading.answer_text(said) == "\n4"
    assert grading.completion_text(said) == "<think>1\n<think>3</think>4"
    last = grading.by_row(lambda text, row: float(grading.numbers_equal(grading.last_number(text), row["answer"])))
    texts = ["<think>maybe 42, no", "<think>no</think>42", "42"]
    assert last(["p"] * 3, texts, answer=[42] * 3) == [0.0, 1.0, 1.0]
    form = grading.by_row(lambda text, row: float("<think>" in text), with_thoughts=True)
    assert form(["p"], ["<think>no</think>42"]) == [1.0]


NUMBERS: dict[Any, list[Any]] = {
    1000: ["1,000", "1000.00", "$1,000.", "1e3"],
    -5: ["-$5", "$-5"],
    12: [" 12 ", "$12$", "１２"],
    1234: ["\\$1{,}234\\%"],
    -3: ["−3"],
    Fraction(1, 2): [".5", "1⁄2"],
    Fraction(-1, 2): ["-1 / 2"],
    Fraction(1, 10): [0.1],
    Fraction(1, 4): ["2.5E-1"],
    Fraction(3, 4): ["3/4", "\\frac{3}{4}", "３／４"],
    Fraction(-12345, 10): ["－１，２３４．５％"],
    None: [
        "10²", "x₁", "١٢", "1,00", "12,3456", "1/0", "1/2/3", "five", "5 apples", "", ".", "-", "$", "1 2",
        "--1", "٣", "²", "1e301", "1e999999999", "nan", "inf", "9" * 101, math.nan, math.inf, True, None, ["1"],
    ],
}  # fmt: skip


def test_the_number_that_a_text_is():
    for value, texts in NUMBERS.items():
        for text in texts:
            assert grading.parse_number(text) == value, text


def test_a_number_has_at_most_a_hundred_characters():
    assert grading.parse_number("7" * 100) == int("7" * 100)
    assert grading.parse_number("7" * 101) is None


def test_the_first_and_last_number_of_a_text():
    for text, first, last in (
        ("Then 12 and 1,300.", "12", "1,300."),
        ("5-3", "5", "3"),
        ("x = -3 and (-4)", "-3", "-4"),
        ("80% of 1,2345", "80%", "2345"),
        ("٣ apples, ² pears", None, None),
        ("合計１，２３４円", "1,234", "1,234"),
        ("", None, None),
    ):
        assert (grading.first_number(text), grading.last_number(text)) == (first, last)


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join)
        | inner.map("({})".format)
        | inner.map("-({})".format)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@example("(" * 40 + "1" + ")" * 40)
@given(EXPRESSIONS)
def test_safe_arithmetic_agrees_with_python(text):
    try:
        wanted = eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text))  # of our own strategy
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="expression"):
            safe_arithmetic(text)
    else:
        assert safe_arithmetic(text) == wanted


def test_arithmetic_as_people_write_it_and_nothing_else():
    for written, value in (("3 × 4 ÷ 2 − 1", 5), ("（３＋４）＊５", 35), ("007", 7)):
        assert safe_arithmetic(written) == value
    for text in ("9**9**9", "2(3)", "2 3", "1.5", "٣ + 1", "(1", "", "1 / (2 - 2)", "(" * 249 + "1" + ")" * 249):
        with pytest.raises(ValueError, match="expression"):
            safe_arithmetic(text)


def test_the_last_marked_answer_is_found():
    boxes = {"so \\boxed{1} or \\boxed{ \\frac{1}{2} }.": "\\frac{1}{2}", "\\boxed{1} and \\boxed{2": None}
    assert {text: grading.boxed(text) for text in boxes} == boxes
    tags = {"<answer>1</answer> <answer> 2\n</answer> 3": "2", "<answer><answer>1</answer>": "1",
            "</answer><answer>": None}  # fmt: skip
    assert {text: grading.tagged(text, "answer") for text in tags} == tags
    lines = {"#### 1\n#### 2 \nmore": "2", "####\n\n72\nbye": "72", "72": None}
    assert {text: grading.after_last(text, "####") for text in lines} == lines
    texts = {"<think>a</think>\n<answer>b</answer>": True, "<think>a</think><answer>b": False, "": False,
             "<think>a<answer>b</answer></think>": False,
             "<think>a</think><think>a</think><answer>b</answer>": False}  # fmt: skip
    assert {text: grading.think_answer_format(text) for text in texts} == texts


def test_normalised_text():
    texts = {"  Straße\n IS\u00a0Ｌong. ": "strasse is long", ".": ".", "Ｐａｒｉｓ": "paris", "x²": "x²"}
    assert {text: grading.normalised_text(text) for text in texts} == texts


def test_accents_are_the_same_in_both_spellings():
    composed = "caf\u00e9 \u00c5"
    assert composed != (decomposed := "cafe\u0301 A\u030a")
    assert grading.normalised_text(decomposed) == grading.normalised_text(composed) == "caf\u00e9 \u00e5"
    assert grading.normalised_text("cafe") != grading.normalised_text(composed)
    assert [rows.score(decomposed, {"answer": composed}), rows.score(composed, {"answer": decomposed})] == [1.0, 1.0]
    assert rows.score("cafe", {"answer": decomposed}) == 0.0


def test_a_quarter_of_a_megabyte_of_anything_is_answered():
    """What takes the square of a text's length would not end here either."""
    hostile = [digit * 250_000 for digit in "9-( "]
    hostile += ["1," * 125_000, "\\boxed{" * 36_000, "<answer>" * 31_000, "1e999999999", "a\u0301\u0316" * 83_000]
    hostile += ["a" + "\u0301\u0316" * 125_000]
    for text in hostile:
        for name in ("parse_number", "first_number", "last_number", "boxed", "normalised_text", "think_answer_format"):
            getattr(grading, name)(text)
        grading.tagged(text, "answer")
        grading.after_last(text, "####")
        with pytest.raises(ValueError, match="expression"):
            safe_arithmetic(text)
