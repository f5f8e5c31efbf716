"""Right answers in the forms in which chat models write them score; what says more, or something else, does not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyrl.tasks import load_task, rows
from tinyrl.tasks.stated import number_with_unit, stated_answer, stated_number, undressed

USUAL = [
    ("#### 42 apples", "42"),
    ("<answer>The answer is 42</answer>", "42"),
    (r"\boxed{42\text{ cm}}", "42"),
    (r"\boxed{\text{E}}", "E"),
    ("(B)", "B"),
    ("The answer is B.", "B"),
    ("**Paris**", "Paris"),
    ("Yes!", "Yes"),
    ("The answer is Paris.", "Paris"),
]


@pytest.mark.parametrize(("text", "gold"), USUAL)
def test_a_right_answer_in_a_usual_form_scores(text: str, gold: str) -> None:
    assert rows.score(text, {"answer": gold}) == 1.0


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        ("42", [r"\(42\)", "**42**", "42 km/h", "42 m/s", "€42", "<answer>42 €</answer>", r"\boxed{42^\circ}", "So 42.",
                r"\boxed{42\ \text{cm}^2}", "<answer>42 cm²</answer>", "12 + 30 = 42", "It is not 41 but 42.",
                "The answer is 42, since 40 + 2 = 42.", "Final answer: 42", "#### 42 apples in total",
                r"\boxed{x = 42}",
                "#### 1,012 - 970 = $42", r"\boxed{6 \times 7 = 42}",
                "I have 41 or so, that makes 42"]),
        ("0.5", ["#### 1/2 cup", r"\boxed{\frac{1}{2}\text{ cup}}"]),
        ("B", ["B)", "B.", "**B**", r"The final answer is $\boxed{B}$.", "**Answer:** B", "**Answer**: B", "b",
               "The correct option is **(B)**.", "The answer is:\n\nB", "#### The answer is B.",
               "I am not sure, but the answer is B.", "The answer is A. No: the answer is B."]),
        ("(A)", ["A", "(A)", "The answer is (A)."]),
        ("Paris", ["`Paris`", "“Paris”", 'The answer is "Paris."', "The answer is\n\n**Paris.**", r"\textbf{Paris}",
                   "Answer: Paris", "<answer>**Paris**</answer>",
                   "It is near.\nThe answer is Paris. It lies in France."]),
        ("Dr. Smith", ["The answer is Dr. Smith."]),
        ("5!", ["$5!$"]),
        ("__init__", ["`__init__`"]),
    ],
)  # fmt: skip
def test_markup_a_unit_and_a_final_mark_are_no_part_of_an_answer(gold: str, texts: list[str]) -> None:
    assert {text: rows.score(text, {"answer": gold}) for text in texts} == dict.fromkeys(texts, 1.0)


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        ("42", ["41 or 42", "42 or 41", "41, 42", "41\n42", "The answer is 41, 42.", "#### 42 or 43", "427", "142",
                "-42", "<answer>42, 43</answer>", "<answer>1 42</answer>", "42.5", "The answer is 427.",
                "42 is not the answer.",
                "<answer>x != 42</answer>", "<answer>a = 41, b = 42</answer>", "<answer>x = 41 or x = 42</answer>",
                "It is not 42.", "x ≠ 42", "The answer is not 42.",
                "I don't think the answer is 42.", "<answer>not 42</answer>", "#### 42 million", r"\boxed{42x}",
                r"\boxed{42\sqrt{2}}", r"\boxed{42\pi}", "<answer>42k</answer>", "<answer>42 is wrong</answer>",
                "<answer>42 and more</answer>", "<answer>forty-two</answer>", ""]),
        ("A", ["A or B", "B or A", "A, B", "B, A", "A B C D", "D C B A", "(A) (B) (C) (D)", "(D) (C) (B) (A)",
               "A dog", "not A", "I saw A dog.", "The answer is a dog.", "The answer is A or B.",
               "The answer is A and B.", "A) dog B) cat", "The answer is neither A nor B.", "The answer is not A.",
               "I doubt the answer is A.", "If the answer is A", "The answer is A. The answer is B.",
               "Is it right that the answer is A?", r"\boxed{A, B}", "**A** **B**"]),
        ("Paris", ["not Paris", "Paris or Rome", "Paris, Rome", "Paris, not Rome", "Rome, not Paris", "Paris? No.",
                   "Pari", "The answer is not Paris.", "The answer isn't Paris.", "I think Paris",
                   "The answer is Paris or Rome.", "The answer is Paris. The answer is Rome.",
                   "<answer>Rome</answer> The answer is Paris."]),
        ("Yes", ["Yes! No!", "Yes and no", "No", "yes no"]),
        ("5!", ["5"]),
        ("5", [r"\boxed{5!}"]),
        ("(1, 2)", ["1, 2"]),
        ("42 cm", ["42", "42 m"]),
        (".", [""]),
    ],
)  # fmt: skip
def test_what_says_more_or_something_else_scores_nothing(gold: str, texts: list[str]) -> None:
    assert {text: rows.score(text, {"answer": gold}) for text in texts} == dict.fromkeys(texts, 0.0)


def test_an_answer_is_where_a_text_states_it() -> None:
    stated = {
        "So 1. The answer is 2. Then 3.": ("2", False),
        "The answer is 2. <answer>3</answer>": ("3", True),
        "<answer>The answer is **4**.</answer>": ("4", True),
        "no statement": ("no statement", False),
        "The answer is": ("The answer is", False),
    }
    assert {text: (found.text, found.is_marked) for text in stated if (found := stated_answer(text))} == stated


def test_the_number_that_a_text_ends_with_is_neither_denied_nor_one_of_two() -> None:
    numbers = {"so 7": 7, "7, 7 and 7": 7, "not 6 but 7": 7, "not only 7": 7, "it isn't 7": None, "6 or 7": None,
               "6; 7": None, "cannot be equal to 7": None, "7 was wrong": None, "none": None}  # fmt: skip
    assert {text: stated_number(text) for text in numbers} == numbers


def test_a_unit_is_a_word_or_a_sign_and_no_variable() -> None:
    units = {"7 apples": 7, "7kg": 7, "7 m": 7, "7m": None, "7 x": None, "7°C": 7, "7 dozen": None, "7 (b)": None,
             "7 of 8": None, "7 big red ripe apples": None, "a 7": None}  # fmt: skip
    assert {text: number_with_unit(text) for text in units} == units


def test_markup_goes_and_what_would_be_nothing_stays() -> None:
    texts = {"**a**": "a", "*'a'*": "a", "$a$": "a", "a.": "a", "a!": "a!", "ab!": "ab", "**": "**", ".": ".",
             "(a, b)": "(a, b)", "f(x)": "f(x)", r"\text{}": r"\text{}", "**a** **b**": "a** **b"}  # fmt: skip
    assert {text: undressed(text) for text in texts} == texts


@pytest.mark.slow
def test_a_megabyte_states_its_answer_at_once() -> None:
    hostile = ["the answer is " * 70_000, "the   " * 170_000, "answer:\n" * 120_000, "1 or " * 200_000,
               "not " * 250_000, "\\text{" * 160_000,
               "42" + " a" * 500_000, "**" * 500_000, " \t" * 500_000]  # fmt: skip
    for text in hostile:
        for gold in ("43", "Paris"):
            assert rows.score(text, {"answer": gold}) == 0.0


# ---- one extractor ----

FORMS = ("{}", "{}.", "**{}**", "({})", "So it is {}.", "The answer is {}.", "Answer: {}", "#### {}", "\\boxed{{{}}}",
         "<answer>{}</answer>", "<answer>The answer is {}.</answer>", "{0} or {0}1", "not {}", "#### {} apples", " {} ",
         "\\boxed{{\\text{{{}}}}}", "{0}\n#### {0}", " answer {} .")  # fmt: skip
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("rows", {"prompt": "?", "answer": "42"}),
    ("rows", {"prompt": "?", "answer": "Paris"}),
    ("rows", {"prompt": "?", "answer": "(B)"}),
    ("rows", {"prompt": "?", "answer": "40 + 2 = 42\n#### 42"}),
    ("sums", {"prompt": "?", "answer": 42}),
    ("gsm8k", {"question": "?", "answer": "40 + 2 = 42\n#### 42"}),
    ("search_qa", {"question": "?", "golden_answers": ["The Paris", "42"]}),
    ("sort", {"prompt": "?", "answer": "ab"}),
    ("lookup", {"prompt": "?", "answer": "baker", "world": "w"}),
]


@pytest.mark.parametrize(("name", "row"), ROWS)
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.sampled_from(("42", "42.0", "$42", "41", "Paris", "paris", "Rome", "B", "a b", "baker")) | st.text(max_size=3),
)
def test_a_completion_is_right_exactly_where_its_answer_is_golds(
    name: str, row: dict[str, Any], form: str, value: str
) -> None:
    task = load_task(name)
    assert task.verify is not None
    columns = {column: [of] for column, of in row.items()}
    text = form.format(value)
    [score] = task.verify(["?"], [text], **columns)
    found = task.answers([text, str(task.gold(row))], [row, row])
    assert found is not None
    assert found[1] is not None
    assert (score == 1.0) == (found[0] == found[1])


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_gold_in_the_form_of_its_task_is_right(name: str, row: dict[str, Any]) -> None:
    task = load_task(name)
    assert task.verify is not None
    assert task.verify(["?"], [task.gold(row)], **{column: [of] for column, of in row.items()}) == [1.0]


def test_right_answers_that_are_spelt_differently_are_one_vote() -> None:
    row = {"prompt": "?", "answer": "42"}
    texts = ["So it is 42.", "42", "#### 42 apples", "<answer>The answer is 42.0</answer>", "41"]
    assert load_task("rows").answers(texts, [row] * 5) == ["42"] * 4 + ["41"]
    golden = {"question": "?", "golden_answers": ["George Eliot", "Mary Ann Evans"]}
    texts = [f"<answer>{text}</answer>" for text in ("mary ann evans", "George Eliot", "Dickens")]
    assert load_task("search_qa").answers(texts, [golden] * 3) == ["george eliot", "george eliot", "dickens"]
