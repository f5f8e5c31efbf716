"""Questions with a search engine: exact match after normalisation, of what the policy wrote and nothing else."""

import json
from typing import Any

import pytest

from tinyrl.environments.search import INVALID
from tinyrl.tasks import load_rows
from tinyrl.tasks.search_qa import TASK, normalised_answer

ROW = {"question": " who wrote Middlemarch ", "golden_answers": ["George Eliot", "Mary Ann Evans"]}


def score(completion: Any, golden: Any = ROW["golden_answers"]) -> float | None:
    assert TASK.verify is not None
    return TASK.verify(["?"], [completion], question=["?"], golden_answers=[golden])[0]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Beatles!", "beatles"),
        ("an A.B.C. of\nthe sea", "abc of sea"),
        ("Theatre", "theatre"),
        ("well-known", "wellknown"),
        ("don't", "dont"),
        ("“Quoted”", "“quoted”"),
        ("É", "é"),
        ("A", "a"),
        ("!!", "!!"),
        ("  ", ""),
    ],
)
def test_answers_are_compared_without_case_punctuation_articles_and_spacing(text: str, normalised: str):
    assert normalised_answer(text) == normalised


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>George Eliot</answer>",
        "<answer> the george   eliot. </answer>",
        "<think>so</think><answer>mary ann evans</answer> done",
        "<answer>no</answer> wait <answer>George Eliot</answer>",
        [said("<search>q</search>"), read("<information>x</information>"), said("<answer>George Eliot</answer>")],
        [said("<answer>George Eliot</answer>"), read("<answer>Charles Dickens</answer>")],
    ],
)
def test_one_of_the_golden_answers_is_right(completion: Any):
    assert score(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "George Eliot",
        "<answer>George</answer>",
        "<answer>George Eliot and others</answer>",
        "<answer>George Eliot</answer> no: <answer>Dickens</answer>",
        "<answer>George Eliot",
        "<answer></answer>",
        "",
        [],
        [said("<search>q</search>"), read("<information><answer>George Eliot</answer></information>")],
        [said("<answer>"), read("George Eliot"), said("</answer>")],
        [said("x"), read(INVALID), said("George Eliot")],
        "<answer>" * 100_000,
        "<answer>" + "the " * 300_000 + "</answer>",
    ],
    ids=lambda completion: str(completion)[:24],
)
def test_anything_else_is_wrong_and_what_was_only_read_too(completion: Any):
    assert score(completion) == 0.0


def test_one_golden_answer_may_be_a_text_and_may_be_an_article():
    assert score("<answer>the paris</answer>", "Paris") == 1.0
    assert [score(f"<answer>{text}</answer>", ["A"]) for text in ("a", "the", "!", "")] == [1.0, 0.0, 0.0, 0.0]


def test_a_batch_is_scored_row_by_row():
    assert TASK.verify is not None
    completions = [f"<answer>{text}</answer>" for text in "abb"]
    assert TASK.verify(["?"] * 3, completions, golden_answers=["a", ["x", "b"], "c"]) == [1.0, 1.0, 0.0]


def test_the_prompt_names_every_tag_and_ends_with_the_question():
    text = TASK.prompt(ROW)
    assert isinstance(text, str)
    assert text.endswith("\nQuestion: who wrote Middlemarch\n")
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in text
        assert f"</{tag}>" in text


@pytest.mark.parametrize("golden", [["George Eliot", "Mary Ann Evans"], "George Eliot", [" A "], ["!"], ["a < b"]])
def test_the_gold_answer_has_full_marks(golden: Any):
    assert score(TASK.gold({"question": "?", "golden_answers": golden}), golden) == 1.0


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"question": "", "golden_answers": "a"}, "a.jsonl:1: 'question' must be text, not ''"),
        ({"question": ["q"], "golden_answers": "a"}, "'question' must be text"),
        ({"question": "q", "golden_answers": []}, "'golden_answers' must be a text or a list of texts, not \\[\\]"),
        ({"question": "q", "golden_answers": ["a", 1]}, "'golden_answers' must be"),
        ({"question": "q", "golden_answers": " "}, "'golden_answers' must be"),
        ({"question": "q", "golden_answers": {"target": ["a"]}}, "'golden_answers' must be"),
        ({"question": "q", "answer": "a"}, "no column 'golden_answers'.*task.columns.golden_answers=OLD"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, row: dict[str, Any], wanted: str):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=wanted):
        load_rows(TASK, "train", data=str(tmp_path / "a.jsonl"), eval_data=str(tmp_path / "a.jsonl"))


def test_there_are_no_rows_without_data():
    with pytest.raises(ValueError, match=r"task\.data=FILE\.jsonl.*'question' and 'golden_answers'"):
        load_rows(TASK, "train")


def test_what_a_completion_says():
    assert TASK.answer is not None
    assert TASK.answer("so <answer> The Who. </answer>") == "who"
    assert TASK.answer("no idea") is None
    assert TASK.answer("<answer> </answer>") is None
