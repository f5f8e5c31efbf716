"""GSM8K: which number a completion answers with, and the real data's gold answers."""

from fractions import Fraction

import pytest

from tests.conftest import shared_data
from tinyrl.tasks import gsm8k, load_rows
from tinyrl.tasks.gsm8k import TASK

ROW = {"question": " How many? ", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"}


def score(completion, answer="1 + 2 = 3\n#### 1,024"):
    assert TASK.verify is not None
    return TASK.verify(["?"], [completion], question=["?"], answer=[answer])[0]


def test_the_prompt_asks_for_the_number_after_the_marks():
    text = TASK.prompt(ROW)
    assert isinstance(text, str)
    assert text.startswith("How many?\n")
    assert "####" in text


@pytest.mark.parametrize(
    "completion",
    [
        "so\n#### 1024",
        "#### 1,024",
        "#### $1,024.00",
        "#### 1024.",
        "#### 1024%",
        "#### 1024 apples in 3 boxes",
        "#### The answer is 1024",
        "#### 7\n#### 1024",
        "####\n1024",
        "so \\boxed{1{,}024} of 3",
        "so \\boxed{\\$1024}",
        "#### done\nThe answer is 1024",
        "That makes 1024.",
        "2048 - 1024 = **1024**",
        [{"role": "assistant", "content": "#### 1024"}],
    ],
)
def test_the_right_number_is_right_however_it_is_written(completion):
    assert score(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1025",
        "#### -1024",
        "#### 1024\n#### 7",
        "1024\n#### 7",
        "\\boxed{7} 1024",
        "1024 or 7",
        "#### 1024.5",
        "#### 1 024",
        "#### ١٠٢٤",
        "#### 1024e999999999",
        "no idea",
        "",
        "9**9**9",
        "9" * 1_000_000,
        "(" * 1_000_000,
        "#### " + "1024" * 250_000,
        "#### " * 200_000,
        [],
        [{"role": "assistant", "content": None}],
    ],
    ids=lambda completion: str(completion)[:16],
)
def test_anything_else_is_wrong_and_never_an_exception(completion):
    assert score(completion) == 0.0


def test_a_batch_is_scored_row_by_row():
    assert TASK.verify is not None
    assert TASK.verify(["?"] * 3, ["1", "2", "3"], answer=["#### 1", "#### 1", "3"]) == [1.0, 0.0, 1.0]


def test_what_a_completion_says():
    assert TASK.answer is not None
    assert TASK.answer("#### 1,000.50") == Fraction(2001, 2)
    assert TASK.answer("none") is None


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"question": "", "answer": "#### 1"}, "'question' must be text"),
        ({"question": "q", "answer": "#### x"}, "'answer' must"),
    ],
)
def test_rows_that_cannot_be_used(row, wanted):
    def use():
        TASK.prompt(row)
        TASK.gold(row)

    with pytest.raises(ValueError, match=wanted):
        use()


def test_its_own_rows_come_from_the_hub(monkeypatch):
    monkeypatch.setattr(gsm8k, "read_rows", lambda source: [{"from": source}])
    assert TASK.rows("train") == [{"from": "openai/gsm8k:main@train"}]
    assert TASK.rows("eval") == [{"from": "openai/gsm8k:main@test"}]


@pytest.mark.skipif(shared_data() is None, reason="needs ../shared/data")
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("eval", 1319)])
@pytest.mark.wide
def test_every_gold_answer_of_the_real_data_has_full_marks(split, count):
    folder = f"{shared_data()}/gsm8k"
    rows = load_rows(TASK, split, data=f"{folder}/train.jsonl", eval_data=f"{folder}/test.jsonl")
    assert len(rows) == count
    assert TASK.verify is not None
    columns = {"answer": [row["answer"] for row in rows]}
    gold = [TASK.gold(row) for row in rows]
    assert TASK.verify([], gold, **columns) == [1.0] * count
    # the data's own numbers, read by the plainest means there are
    plain = [row["answer"].split("#### ")[1].replace(",", "") for row in rows]
    assert TASK.verify([], [f"so it is {number}" for number in plain], **columns) == [1.0] * count
    assert TASK.verify([], [f"#### {int(number) + 1}" for number in plain], **columns) == [0.0] * count
