"""Turns of the assistant: which are answers, which are learnt, and a message that goes on with a begun one."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.test_formats import SYSTEM, A, X, Y, said, user
from tests.running import rows_for
from tests.training.rows import write_rows
from tinyrl.data.formats import Scored, TextExample, labelled, preference, shared_prompt, text_examples, with_prompt
from tinyrl.data.kinds import EMPTY, UNLEARNT, Labels, Pairs, Texts
from tinyrl.data.turns import behind_beginning, first_answer, is_learnt, learnt_turns
from tinyrl.runs.resolve import config_of

NO = [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"trainable": False}, {"train": False}, {"training": False},
      {"loss_mask": 0}, {"step_loss_mask": 0}, {"loss_scale": 0}, {"masked": True}]  # fmt: skip
YES = [{}, {"weight": 1}, {"loss": True}, {"trainable": True, "weight": 1}, {"train": 1}, {"masked": False}]


@pytest.mark.parametrize(("marks", "learnt"), [*[(marks, False) for marks in NO], *[(marks, True) for marks in YES]])
def test_a_turn_says_in_many_ways_whether_it_is_learnt(marks: dict[str, Any], learnt: bool) -> None:
    assert is_learnt({**X, **marks}) == learnt
    row = {"messages": [A, {**X, **marks}, A, Y]}
    assert [one.answer for one in text_examples(row)] == [*([[{**X, **marks}]] if learnt else []), [Y]]


@pytest.mark.parametrize(
    ("marks", "named"),
    [
        ({"loss": 0.5}, "`loss`"), ({"train": "false"}, "`train`"), ({"trainable": []}, "`trainable`"),
        ({"weight": 1, "train": False}, "`weight`=1, `train`=False"), ({"masked": True, "loss": True}, "`masked`=True"),
        ({"mask": 1}, "`mask`"), ({"train_detail": [{"begin_offset": 0}]}, "`train_detail`"),
    ],
)  # fmt: skip
def test_a_mark_that_does_not_say_whether_a_turn_is_learnt_is_refused(marks: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        text_examples({"messages": [A, {**X, **marks}]})


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_of_a_pair_that_is_not_to_be_learnt_leaves_its_row_out(mark: dict[str, Any]) -> None:
    pair = {"prompt": "a", "chosen": [X], "rejected": [Y]}
    for kind in (Pairs(), Pairs(by_turns=False)):
        assert kind.problem(pair) is None
        for side, message in (("chosen", X), ("rejected", Y)):
            assert kind.problem({**pair, side: [{**message, **mark}]}) == UNLEARNT
    assert Labels().problem({"messages": [A, {**X, **mark}], "label": 1}) == UNLEARNT
    longer = {**pair, "chosen": [X, A, {**Y, **mark}]}
    assert Pairs().problem(longer) is None  # its first turn is learnt
    assert Pairs(by_turns=False).problem(longer) == UNLEARNT


def test_a_mark_makes_no_empty_answer_full() -> None:
    assert Texts().problem({"messages": [A, {**said(""), "weight": 1}]}) == EMPTY


# ---- a greeting ----


@pytest.mark.parametrize(
    ("messages", "first"),
    [
        ([SYSTEM, X, A, Y], 3), ([X, A, Y], 2), ([A, X], 1), ([SYSTEM, A, X], 2), ([SYSTEM, X], 1), ([X], None),
        ([SYSTEM, X, A], 1), ([X, Y], 1), ([A], None),
    ],
)  # fmt: skip
def test_a_greeting_behind_a_system_message_is_context(messages: list[dict[str, Any]], first: int | None) -> None:
    assert first_answer(messages) == first


def test_a_prompt_of_a_conversation_with_a_greeting_is_what_its_first_answer_answers() -> None:
    row = {"messages": [SYSTEM, X, A, Y]}
    assert text_examples(row) == [TextExample([SYSTEM, X, A], [Y])]
    assert shared_prompt(row) == with_prompt(row)["prompt"] == [SYSTEM, X, A]


# ---- a beginning of the answer ----

BEGUN = [A, said("The capital")]
REST = said(" is Oslo.")
WHOLE = said("The capital is Oslo.")


def test_a_completion_goes_on_with_the_message_that_its_prompt_begins() -> None:
    row = {"prompt": BEGUN, "completion": [REST, user("sure?"), Y]}
    assert text_examples(row) == [TextExample(BEGUN, REST["content"]), TextExample([A, WHOLE, user("sure?")], [Y])]
    assert text_examples({"prompt": BEGUN, "completion": [{**REST, "weight": 0}, A, Y]}) == [
        TextExample([A, {**WHOLE, "weight": 0}, A], [Y])
    ]
    assert Texts().problem({"prompt": BEGUN, "completion": [said(" ")]}) == EMPTY
    # in a conversation two messages of the assistant are two turns
    assert text_examples({"messages": [*BEGUN, REST]}) == [
        TextExample([A], BEGUN[1:]), TextExample(BEGUN, [REST])
    ]  # fmt: skip


def test_the_sides_of_a_pair_go_on_with_the_message_that_their_prompt_begins() -> None:
    longer = [said(" was"), user("no"), Y]
    pair = preference({"prompt": BEGUN, "chosen": [REST], "rejected": longer})
    assert pair == Scored(BEGUN, ([REST], longer), continues=True)
    (turn,) = learnt_turns(pair.prompt, [REST], continues=True)
    assert (turn.prompt, turn.answer) == (BEGUN, REST["content"])
    assert behind_beginning(pair.prompt, [REST], continues=True) == (BEGUN, REST["content"])
    merged = [A, said("The capital was")]
    assert behind_beginning(pair.prompt, longer, continues=True) == (merged, longer[1:])
    shared = {"prompt": BEGUN, "chosen": [REST, A, X], "rejected": [REST, A, Y]}
    assert preference(shared) == Scored([A, WHOLE, A], ([X], [Y]))
    assert preference({"chosen": [*BEGUN, X], "rejected": [*BEGUN, Y]}) == Scored(BEGUN, ([X], [Y]))  # two turns
    label = labelled({"prompt": BEGUN, "completion": [REST, A, X], "label": 1})
    assert label == Scored([A, WHOLE, A], ([X],), 1.0)


def test_a_call_goes_on_with_no_begun_message() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    with pytest.raises(ValueError, match="`tool_calls`"):
        text_examples({"prompt": BEGUN, "completion": [call]})


# ---- inputs of other models ----


@pytest.mark.parametrize("name", ["videos", "audio"])
@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", {"messages": [A, X]}),
        ("dpo", {"prompt": "a", "chosen": "x", "rejected": "y"}),
        ("reward", {"prompt": "a", "chosen": "x", "rejected": "y"}),
        ("grpo", {"prompt": "a", "answer": "x"}),
    ],
)
def test_a_column_of_videos_or_sounds_is_refused_by_name_where_nothing_reads_it(
    tmp_path: Path, name: str, method: str, row: dict[str, Any]
) -> None:
    def read(value: Any, **sections: Any) -> int:
        data = write_rows(tmp_path / "rows.jsonl", [row, {**row, name: value}])
        task = {"name": "rows", "data": str(data), "eval_data": str(data)}
        return len(rows_for(config_of({"method": method, "task": task, **sections})).train)

    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*'{name}'.*unused={name}"):
        read(["a.mp4"])
    assert read([]) == 2  # a row of text among others
    if method == "grpo":
        assert read(["a.mp4"], reward={"functions": [{"use": "rewards.py:judge_pictures"}]}) == 2
