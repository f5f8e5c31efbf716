"""The user's own rows: answers that only a reward reads, and verl's layout."""

import pytest

from tinyrl.config.schema import Config
from tinyrl.tasks import layout_notes, load_rows, load_split
from tinyrl.tasks.rows import TASK


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
