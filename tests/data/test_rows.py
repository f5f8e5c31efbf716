"""Columns, fingerprints, order and held-out rows."""

from collections import Counter

import pytest

from tests.running import LookedAt
from tinyrl.data.messages import prompt_of
from tinyrl.data.readers import placed_rows
from tinyrl.data.rows import (
    batch_indices,
    few_held_out,
    fingerprint,
    hold_out,
    keyed_order,
    read_rows,
)
from tinyrl.errors import Interrupted
from tinyrl.runs import signals


def test_columns_are_renamed_and_swapped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "p", "answer": "long", "final": "7"}\n')
    assert read_rows(str(path)) == [{"problem": "p", "answer": "long", "final": "7"}]
    columns = {"question": "problem", "answer": "final"}
    assert read_rows(str(path), columns=columns) == [{"question": "p", "answer": "7"}]
    assert placed_rows(str(path), columns={"answer": "final", "final": "answer"}) == [
        (f"{path}:1", {"problem": "p", "answer": "7", "final": "long"})
    ]


def test_a_key_inside_a_column_is_named_with_dots(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"r": {"truth": {"x": "7"}, "style": "rule"}, "a.b": 1}\n')
    whole = {"truth": {"x": "7"}, "style": "rule"}
    columns = {"answer": "r.truth.x", "n": "a.b"}
    assert read_rows(str(path), columns=columns) == [{"r": whole, "answer": "7", "n": 1}]
    for wrong in ("r.trut", "r.truth.x.y", "r.", "s.truth"):
        with pytest.raises(ValueError, match=r"a\.jsonl:1: no column"):
            read_rows(str(path), columns={"answer": wrong})


def test_a_missing_column_is_answered_with_the_ones_there_are(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "p", "answer": "1"}\n{"problme": "p", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: no column 'problem'.*Did you mean `problme`.*problme, answer"):
        read_rows(str(path), columns={"question": "problem"})


def test_a_fingerprint_is_of_the_content_and_the_order_of_rows():
    rows = [{"a": 1, "b": "é"}, {"a": 2, "b": None}]
    assert fingerprint(rows) == fingerprint([{"b": "é", "a": 1}, {"b": None, "a": 2}])
    # sha256sum of {"a":1,"b":"\\u00e9"} and {"a":2,"b":null}, each with a newline
    assert fingerprint(rows) == "49aba496f8d8a193c6b55892b5338027e193892c4451eb1c894fed2286c7d855"
    different = [rows[::-1], rows[:1], [{"a": 1, "b": "e"}, rows[1]], [{"a": "1", "b": "é"}, rows[1]]]
    assert len({fingerprint(other) for other in [rows, *different]}) == 5


def test_keyed_order_is_a_permutation_that_only_the_key_decides():
    assert sorted(keyed_order("a", 50)) == list(range(50))
    assert keyed_order("a", 50) == keyed_order("a", 50) != keyed_order("b", 50)
    assert keyed_order("a", 6) == [0, 1, 3, 4, 2, 5]  # `printf a:$i | sha256sum` for i = 0..5, sorted


def test_every_epoch_has_every_row_once_and_a_step_needs_no_history():
    seen = [batch_indices(3, step, num_prompts=4, num_rows=10) for step in range(5)]
    stream = [i for batch in seen for i in batch]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:]
    assert batch_indices(3, 4, num_prompts=4, num_rows=10) == seen[4]
    assert batch_indices(4, 0, num_prompts=10, num_rows=10) != stream[:10]


def test_more_prompts_than_rows_go_round_and_no_rows_are_refused():
    assert Counter(batch_indices(0, 7, num_prompts=7, num_rows=2)).most_common() in ([(0, 4), (1, 3)], [(1, 4), (0, 3)])
    assert batch_indices(0, 7, num_prompts=3, num_rows=1) == [0, 0, 0]
    with pytest.raises(ValueError, match="no rows"):
        batch_indices(0, 0, num_prompts=1, num_rows=0)


def test_a_huge_batch_is_left_when_a_stop_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "LOOK_EVERY_S", -1.0)
    looks = []

    def stop_after_a_while() -> None:
        looks.append(0)
        if len(looks) > 1000:
            raise Interrupted("SIGTERM")

    with LookedAt(stop_after_a_while), pytest.raises(Interrupted):
        batch_indices(0, 0, num_prompts=10**9, num_rows=10)


def test_a_tenth_of_the_prompts_is_held_out_with_all_their_rows():
    rows = [{"q": i % 40, "n": i} for i in range(80)]
    train, held = hold_out(rows, prompt=lambda row: row["q"], seed=0)
    assert len(train) == 72
    assert len({row["q"] for row in held}) == len(held) == 4
    assert not {row["q"] for row in held} & {row["q"] for row in train}
    assert train == sorted(train, key=lambda row: row["n"])
    assert hold_out(rows, prompt=lambda row: row["q"], seed=0) == (train, held)
    assert hold_out(rows, prompt=lambda row: row["q"], seed=1)[1] != held


def test_held_out_rows_do_not_change_side_when_the_file_is_sorted_another_way():
    rows = [{"q": i} for i in range(50)]
    held = hold_out(rows, prompt=lambda row: row["q"], seed=0)[1]
    assert hold_out(rows[::-1], prompt=lambda row: row["q"], seed=0)[1] == held[::-1]


@pytest.mark.parametrize(("count", "held"), [(10, 1), (19, 1), (20, 2), (6000, 512)])
def test_at_least_one_and_at_most_512_rows_are_held_out(count, held):
    train, out = hold_out([{"q": i} for i in range(count)], prompt=lambda row: row["q"], seed=0)
    assert (len(train), len(out)) == (count - held, held)


@pytest.mark.parametrize("prompts", [1, 2, 9])
def test_fewer_than_ten_prompts_are_trained_on_and_evaluated(prompts):
    rows = [{"q": i % prompts, "n": i} for i in range(2 * prompts)]
    train, held = hold_out(rows, prompt=lambda row: row["q"], seed=0)
    assert train == rows
    assert [row["q"] for row in held] == list(range(prompts))
    assert hold_out(rows, prompt=lambda row: row["q"], seed=0, repeat=lambda row: True) == (rows, rows)


def test_little_to_evaluate_on_is_said_in_one_line():
    assert len(few_held_out(3, trained_on=True)) == len(few_held_out(3, trained_on=False)) == 1
    assert few_held_out(3, trained_on=True) != few_held_out(3, trained_on=False)
    assert few_held_out(30, trained_on=True) == few_held_out(30, trained_on=False) == []


@pytest.mark.parametrize(
    "prompt",
    ["", " \n", None, 7, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"}],
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt"):
        prompt_of(prompt)


def test_what_is_a_prompt_is_not_refused():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    assert prompt_of("hi") == "hi"
    assert prompt_of(messages) == messages
