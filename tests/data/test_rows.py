"""Rows: hashes, order and held-out rows."""

from collections import Counter

import pytest

from tinyrl.data.rows import (
    batch_indices,
    few_held_out,
    fingerprint,
    prompt_key,
    prompt_keys,
    seeded_permutation,
    train_eval_split,
    trained_on_too,
)


def test_a_fingerprint_is_of_the_content_and_the_order_of_rows():
    rows = [{"a": 1, "b": "é"}, {"a": 2, "b": None}]
    assert fingerprint(rows) == fingerprint([{"b": "é", "a": 1}, {"b": None, "a": 2}])
    # sha256sum of {"a":1,"b":"\\u00e9"} and {"a":2,"b":null}, each with a newline
    assert fingerprint(rows) == "49aba496f8d8a193c6b55892b5338027e193892c4451eb1c894fed2286c7d855"
    different = [rows[::-1], rows[:1], [{"a": 1, "b": "e"}, rows[1]], [{"a": "1", "b": "é"}, rows[1]]]
    assert len({fingerprint(other) for other in [rows, *different]}) == 5


def test_keyed_order_is_a_permutation_that_only_the_key_decides():
    assert sorted(seeded_permutation("a", 50)) == list(range(50))
    assert seeded_permutation("a", 50) != seeded_permutation("b", 50)
    assert seeded_permutation("a", 6) == [0, 1, 3, 4, 2, 5]  # `printf a:$i | sha256sum` for i = 0..5, sorted


def test_every_epoch_has_every_row_once_and_a_step_needs_no_history():
    seen = [batch_indices(3, step, num_prompts=4, num_rows=10) for step in range(5)]
    stream = [i for batch in seen for i in batch]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:]
    assert batch_indices(3, 4, num_prompts=4, num_rows=10) == seen[4]
    assert batch_indices(4, 0, num_prompts=10, num_rows=10) != stream[:10]
    assert sorted(Counter(batch_indices(0, 7, num_prompts=7, num_rows=2)).values()) == [3, 4]


def test_a_tenth_of_the_prompts_is_held_out_with_all_their_rows():
    rows = [{"q": i % 40, "n": i} for i in range(80)]
    train, held = train_eval_split(rows, prompt=lambda row: row["q"], seed=0)
    assert len(train) == 72
    assert len({row["q"] for row in held}) == len(held) == 4
    assert not {row["q"] for row in held} & {row["q"] for row in train}
    assert train == sorted(train, key=lambda row: row["n"])
    assert train_eval_split(rows, prompt=lambda row: row["q"], seed=1)[1] != held
    one_each = rows[:40]  # a file in another order is split alike
    held = train_eval_split(one_each, prompt=lambda row: row["q"], seed=0)[1]
    assert train_eval_split(one_each[::-1], prompt=lambda row: row["q"], seed=0)[1] == held[::-1]


def test_at_most_512_rows_are_held_out_and_fewer_than_ten_prompts_are_trained_on_and_evaluated():
    for count, held in ((10, 1), (19, 1), (20, 2), (6000, 512)):
        train, out = train_eval_split([{"q": i} for i in range(count)], prompt=lambda row: row["q"], seed=0)
        assert (len(train), len(out)) == (count - held, held)
    rows = [{"q": i % 9, "n": i} for i in range(18)]
    train, held = train_eval_split(rows, prompt=lambda row: row["q"], seed=0)
    assert train == rows
    assert held == rows  # of a prompt all different rows
    assert train_eval_split([*rows, rows[0]], prompt=lambda row: row["q"], seed=0)[1] == rows  # and equal ones once
    assert train_eval_split(rows, prompt=lambda row: row["q"], seed=0, repeat=True) == (rows, rows)
    assert [len(few_held_out(range(count))) for count in (3, 30)] == [1, 0]


def asked(text: str, *, system: str | None = None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def test_prompts_of_two_forms_fall_on_one_side() -> None:
    rows = [{"q": form(f"{i}"), "n": i} for i in range(40) for form in (str, asked)]
    train, held = train_eval_split(rows, prompt=lambda row: row["q"], seed=0)
    assert (len(train), len(held)) == (72, 4)
    assert not {row["n"] for row in train} & {row["n"] for row in held}


def test_a_second_form_does_not_change_which_prompts_are_held_out() -> None:
    for first, second in ((str, asked), (asked, str)):
        alone = [{"q": first(f"{i}"), "n": i} for i in range(40)]
        more = [{"q": second(f"{i}"), "n": i} for i in range(40)]
        held = [train_eval_split(rows, prompt=lambda row: row["q"], seed=0)[1] for rows in (alone, alone + more)]
        assert [row["n"] for row in held[0]] == [row["n"] for row in held[1]]


def test_system_messages_tell_prompts_apart_unless_one_replaces_them() -> None:
    rows = [{"q": asked(f"{i}", system=system), "n": i} for i in range(40) for system in ("a", "b")]
    own = train_eval_split(rows, prompt=lambda row: row["q"], seed=0)
    assert [len(side) for side in own] == [72, 8]
    replaced = train_eval_split(rows, prompt=lambda row: row["q"], seed=0, system_prompt="c")
    assert [len(side) for side in replaced] == [72, 4]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", asked("a"), True),
        ("a", [{"from": "human", "value": "a"}], True),
        ("a", [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}], True),
        ("a", asked("a", system="b"), False),
        ("a", asked("b"), False),
        ("a", [*asked("a"), {"role": "assistant", "content": "b"}], False),
        ("a", [{"role": "assistant", "content": "a"}], False),
    ],
)
def test_the_key_of_a_prompt_is_of_what_is_read(one, other, same: bool) -> None:
    assert (prompt_key(one) == prompt_key(other)) is same


def test_a_prompt_is_known_to_runs_with_another_system_prompt() -> None:
    trained = prompt_keys(asked("a", system="b"), system_prompt="c")
    for system_prompt in (None, "c", "d"):
        assert trained & prompt_keys(asked("a", system="b"), system_prompt=system_prompt)
        assert not trained & prompt_keys(asked("x", system="b"), system_prompt=system_prompt)
    assert not prompt_keys("a", system_prompt=None) & prompt_keys(asked("a", system="b"), system_prompt=None)


def test_different_prompts_on_both_sides_are_counted_once():
    (note,) = trained_on_too(["a", "b", "b", "c"], ["b", "b", "c", "d"])
    assert "2 of 3" in note
    assert trained_on_too(["a"], ["b"]) == []
    assert trained_on_too([], []) == []
