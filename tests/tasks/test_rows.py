"""The user's own rows: any prompt, an answer that is text or a number, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyrl.config.schema import Config
from tinyrl.tasks import layout_notes, load_rows, load_split
from tinyrl.tasks.rows import TASK


def score(completion, answer):
    assert TASK.verify is not None
    return TASK.verify(["?"], [completion], prompt=["?"], answer=[answer])[0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris", "Paris"),
        (" paris.\n", "Paris"),
        ("I think <answer>Paris</answer> is it", "paris"),
        ("so\n#### New  York", "new york"),
        ("so \\boxed{x+1}", "x+1"),
        ("The answer is 1,000.", "1000"),
        ("答えは１２です。", "12"),
        ("12", "１２"),
        ("so \\boxed{½}", "1/2"),
        ("The answer is 12 of 13: <answer>$12.00</answer>", 12),
        ("0.5", 0.5),
        ("3/4", "3/4"),
        ("so 72", "48 + 24 = 72\n#### 72"),
        ("True", True),
        ([{"role": "assistant", "content": "Paris"}], "Paris"),
    ],
)
def test_the_same_text_or_number_is_right(completion, answer):
    assert score(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris, France", "Paris"),
        ("I think Paris", "Paris"),
        ("<answer>Rome</answer> not Paris", "Paris"),
        ("1000 or 7", "1000"),
        ("<answer>x</answer> 1000", "1000"),
        ("", "Paris"),
        ("", "."),
        ("9**9**9", "1"),
        ("(" * 1_000_000, "1"),
        ("9" * 1_000_000, "9"),
        ("a\u0301\u0316" * 300_000, "a"),
        ([], "Paris"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_anything_else_is_wrong(completion, answer):
    assert score(completion, answer) == 0.0


def test_rows_without_an_answer_have_no_score():
    assert TASK.verify is not None
    assert TASK.verify(["?"] * 2, ["a", "b"], prompt=["?"] * 2) == [None, None]
    assert TASK.verify(["?"] * 3, ["a", "b", "c"], answer=["a", None, "d"]) == [1.0, None, 0.0]
    assert TASK.verify(["?"] * 3, ["", "a", "a"], answer=["", " \n", ["a"]]) == [None, None, None]
    assert [TASK.gold({"prompt": "?", "answer": answer}) for answer in ("", " ", ["a"], None)] == [None] * 4


@given(
    st.text().filter(str.strip)
    | st.text("#<answer>/1.,$%{}\\boxd \n", min_size=1).filter(str.strip)
    | st.integers()
    | st.floats()
    | st.booleans()
)
def test_every_gold_answer_has_full_marks(answer):
    gold = TASK.gold({"prompt": "?", "answer": answer})
    assert gold is not None
    assert score(gold, answer) == 1.0


def test_prompts_stay_as_they_are():
    messages = [{"role": "user", "content": "hi"}]
    assert TASK.prompt({"prompt": "hi "}) == "hi "
    assert TASK.prompt({"prompt": messages}) == messages
    assert TASK.gold({"prompt": "hi"}) is None


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": 3}, "the prompt must be text"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "p", "answer": ["a"]}, "'answer' must be text or a number"),
        ({"prompt": "p", "answer": " "}, "'answer' is empty"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(row, wanted):
    def use():
        TASK.prompt(row)
        assert TASK.check_reference is not None
        TASK.check_reference(row)

    with pytest.raises(ValueError, match=wanted):
        use()


def test_an_answer_that_only_the_own_reward_reads_may_be_anything(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "answer": ""}\n{"prompt": "q", "answer": ["a", "b"]}\n')
    task = {"data": str(tmp_path / "a.jsonl"), "eval_data": str(tmp_path / "a.jsonl")}
    own = {"functions": [{"use": "rewards.py:score"}]}
    rows = load_split(Config.model_validate({"method": "grpo", "task": task, "reward": own}), "train")
    assert [row["answer"] for row in rows] == ["", ["a", "b"]]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 'answer' is empty"):
        load_split(Config.model_validate({"method": "grpo", "task": task}), "train")


def test_the_rows_of_verl_are_taken_as_they_are(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    prompt = [{"role": "user", "content": "1 + 1"}]
    row = {
        "data_source": "gsm8k",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "split": "train"},
    }
    file = str(tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    read = load_rows(TASK, "train", data=file, eval_data=file)
    assert read == [{**row, "answer": "2"}]
    assert TASK.prompt(read[0]) == prompt
    assert TASK.gold(read[0]) == "2"
    assert len(layout_notes(read[0])) == 1
    by_name = load_rows(TASK, "train", data=file, eval_data=file, columns={"answer": "extra_info.index"})
    assert by_name[0]["answer"] == 0
    assert layout_notes(by_name[0]) == layout_notes({"prompt": "p", "answer": "2"}) == []


def test_there_are_no_rows_without_data():
    with pytest.raises(ValueError, match=r"task\.data=FILE\.jsonl with a column 'prompt'"):
        load_rows(TASK, "train")


def test_what_a_completion_says():
    assert TASK.answer is not None
    assert TASK.answer("so <answer> Paris. </answer>") == "paris"
    assert TASK.answer("#### $1,000.00") == TASK.answer("1e3") == "1000"
    assert TASK.answer("  ") is None
