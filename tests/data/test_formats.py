"""Rows in the shapes that people have: what each is read as, what is refused, and what is said of them."""

from typing import Any, Literal

import pytest

from tinyrl.data.formats import (
    Objective,
    Scored,
    TextExample,
    described,
    judged,
    objective_of,
    preference,
    shared_prompt,
    text_examples,
    two_labels,
)
from tinyrl.data.rows import hold_out


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


TALK = [user("hi"), said("ho"), user("more"), said("no")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]

# ---- texts ----


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"text": "abc"}, None, "abc"),
        ({"completion": "abc"}, None, "abc"),
        ({"prompt": "a", "completion": "bc"}, "a", "bc"),
        ({"prompt": "a", "completion": "bc", "text": "no", "messages": TALK}, "a", "bc"),
        ({"prompt": "a", "text": "bc"}, "a", "bc"),
        ({"prompt": None, "text": "bc", "completion": None, "tools": "no JSON"}, None, "bc"),
        ({"prompt": [user("a")], "completion": "bc"}, [user("a")], "bc"),
        ({"prompt": "a", "completion": [said("bc")]}, [user("a")], [said("bc")]),
        ({"prompt": [user("a")], "completion": [said("bc")]}, [user("a")], [said("bc")]),
        ({"prompt": "hi", "messages": TALK[:2]}, [user("hi")], [said("ho")]),
    ],
)
def test_one_example_of_a_row(row: dict[str, Any], prompt: Any, answer: Any):
    assert text_examples(row) == [TextExample(prompt, answer)]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_each_turn_of_the_assistant_behind_the_messages_before_it(column: str):
    wanted = [TextExample(TALK[:1], TALK[1:2]), TextExample(TALK[:3], TALK[3:])]
    assert text_examples({column: TALK}) == wanted
    assert text_examples({column: [*TALK, user("and?")]}) == wanted  # what nobody answers is left out
    assert text_examples({column: [said("welcome"), *TALK]}) == [
        TextExample([said("welcome"), *TALK[:1]], TALK[1:2]),
        TextExample([said("welcome"), *TALK[:3]], TALK[3:]),
    ]


def test_tool_turns_are_context():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    messages = [user("2 + 2?"), call, {"role": "tool", "content": "4"}, said("four")]
    wanted = [TextExample(messages[:1], [call], TOOLS), TextExample(messages[:3], [said("four")], TOOLS)]
    assert text_examples({"messages": messages, "tools": TOOLS}) == wanted
    as_text = '[{"type": "function", "function": {"name": "add"}}]'
    assert text_examples({"prompt": messages[:1], "completion": messages[1:], "tools": as_text}) == wanted
    assert text_examples({"messages": messages, "tools": ""})[0].tools is None


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a", "completon": "b"},
            "no column 'completion', 'messages', 'conversations' or 'text'. Did you mean `completon`? "
            "Columns: prompt, completon. Rename one (of task.data: task.columns.completion=OLD)",
        ),
        ({"text": None}, "'text' is null"),
        ({"text": 3}, "'text' must be text, not 3"),
        ({"text": TALK}, "'text' must be text, not [{"),
        ({"prompt": " ", "completion": "a"}, "the prompt is empty"),
        ({"prompt": 7, "completion": "a"}, "the prompt must be text, or a list of messages"),
        ({"prompt": "a", "completion": 3}, "'completion' must be text or messages, not 3"),
        (
            {"prompt": "a", "completion": [user("b")]},
            "there is no turn of the assistant with a message before it, only",
        ),
        ({"messages": [said("welcome")]}, "there is no turn of the assistant with a message before it, only assistant"),
        ({"messages": TALK, "tools": {"name": "add"}}, "'tools' must be a list of tool definitions, not {"),
        ({"messages": TALK, "tools": "add"}, "'tools' is text that is not JSON: 'add'"),
    ],
)
def test_a_row_that_is_no_text_is_refused(row: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=r"\S") as caught:
        text_examples(row)
    assert str(caught.value).startswith(sentence)


# ---- pairs ----


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "a", "chosen": " b", "rejected": " c"}, Scored("a", (" b", " c"))),
        ({"prompt": "a", "chosen": "a b", "rejected": "a c"}, Scored("a", ("a b", "a c"))),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, Scored([user("a")], ("b", "c"))),
        ({"prompt": "a", "chosen": [said("b")], "rejected": [said("c")]}, Scored("a", ([said("b")], [said("c")]))),
        # the prompt inside both
        ({"chosen": "The sky is blue", "rejected": "The sky is black"}, Scored("The sky is", (" blue", " black"))),
        ({"chosen": "one two", "rejected": "one two three"}, Scored("one", (" two", " two three"))),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: I do", "rejected": "\n\nHuman: a\n\nAssistant: I do not"},
            Scored("\n\nHuman: a\n\nAssistant:", (" I do", " I do not")),
        ),
        (
            {"chosen": "\n\nAssistant: b\n\nHuman: c d", "rejected": "\n\nAssistant: b\n\nHuman: c e"},
            Scored("\n\nAssistant: b\n\nHuman: c", (" d", " e")),
        ),
        (
            {"chosen": [*TALK[:3], said("x")], "rejected": [*TALK[:3], said("y")]},
            Scored(TALK[:3], ([said("x")], [said("y")])),
        ),
        (
            {"chosen": [user("a"), said("x")], "rejected": [user("a"), said("x")]},
            Scored([user("a")], ([said("x")], [said("x")])),
        ),
        # both: as UltraFeedback has it, and as messages
        (
            {"prompt": "a", "chosen": [user("a"), said("x")], "rejected": [user("a"), said("y")]},
            Scored([user("a")], ([said("x")], [said("y")])),
        ),
        (
            {"prompt": [user("a")], "chosen": [user("a"), said("x")], "rejected": [user("a"), said("y")]},
            Scored([user("a")], ([said("x")], [said("y")])),
        ),
        # nothing to learn from, whatever the prompt is
        ({"chosen": "a b", "rejected": "a b"}, Scored(None, ("a b", "a b"))),
        ({"prompt": "p", "chosen": None, "rejected": "a"}, Scored("p", ("", "a"))),
        ({"chosen": [user("a"), said("x")], "rejected": []}, Scored(None, ([user("a"), said("x")], ""))),
        # how much better
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}, Scored("a", ("b", "c"), 2.0)),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "0.5"}, Scored("a", ("b", "c"), 0.5)),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": None}, Scored("a", ("b", "c"))),
    ],
)
def test_a_pair_behind_its_prompt(row: dict[str, Any], wanted: Scored):
    assert preference(row) == wanted


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "no column 'rejected'. Columns: prompt, chosen. Rename one (of task.data: task.columns.r",
        ),
        (
            {"chosen": "b", "rejected": [said("c")]},
            "`chosen` and `rejected` must both be text or both be chat messages",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            "`chosen` and `rejected` have no first word in common, and there is no `prom",
        ),
        (
            {"chosen": [user("a"), said("b")], "rejected": [user("c"), said("b")]},
            "`chosen` and `rejected` have no first",
        ),
        (
            {"prompt": "z", "chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")]},
            "`chosen` and `rejected` begin with user, which differs from `prompt`: 'z'",
        ),
        (
            {"chosen": [user("a"), user("b")], "rejected": [user("a"), said("c")]},
            "`chosen` must end with a turn of the assistant, not user",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "'margin' must be a number, not 'much'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("inf")}, "'margin' must be a number, not inf"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "'chosen' must be text or messages, not 1"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=r"\S") as caught:
        preference(row)
    assert str(caught.value).startswith(sentence)


# ---- labels and pairs of a reward model ----


@pytest.mark.parametrize(
    ("row", "asked", "objective"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "auto", "pairs"),
        ({"chosen": "b", "rejected": "c", "score": 3}, "auto", "pairs"),
        ({"text": "a", "label": False}, "auto", "labels"),
    ],
)
def test_what_the_columns_say(row: dict[str, Any], asked: Any, objective: Objective) -> None:
    assert objective_of(row, asked) == objective


def test_columns_that_say_nothing() -> None:
    with pytest.raises(ValueError, match=r"this row has prompt, score\. Rename columns with task\.columns\.NEW=OLD"):
        objective_of({"prompt": "a", "score": 2}, "auto")


ASSISTANT = {"role": "assistant", "content": "four"}
USER = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    ("row", "objective", "read"),
    [
        ({"text": "good", "label": True}, "labels", Scored(None, ("good",), 1.0)),
        ({"prompt": "p", "completion": "c", "label": "0"}, "labels", Scored("p", ("c",), 0.0)),  # a .csv
        ({"prompt": "p", "completion": "c", "label": " False"}, "labels", Scored("p", ("c",), 0.0)),
        ({"messages": [USER, ASSISTANT], "label": -1}, "labels", Scored([USER], ([ASSISTANT],), -1.0)),
        ({"prompt": "2+2?", "completion": [ASSISTANT], "label": 1}, "labels", Scored([USER], ([ASSISTANT],), 1.0)),
    ],
)  # fmt: skip
def test_what_a_row_says(row: dict[str, Any], objective: Objective, read: Scored) -> None:
    assert judged(row, objective) == read


@pytest.mark.parametrize(
    ("row", "objective", "sentence"),
    [
        ({"text": "t", "label": "good"}, "labels", "'label' must be true, false or a number, not 'good'"),
        ({"text": "t", "label": "nan"}, "labels", "'label' must be true, false or a number, not 'nan'"),
        ({"text": "t", "label": float("nan")}, "labels", "'label' must be .* not nan"),
        ({"text": "t", "label": 10**400}, "labels", "'label' must be"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1e9}, "pairs", "'margin' must .*at most"),
        ({"text": "t", "label": [1]}, "labels", r"'label' must be true, false or a number, not \[1\]"),
        ({"prompt": "p", "chosen": "a"}, "pairs", "no column 'rejected'"),
        ({"label": 1}, "labels", "no column 'completion', 'messages', 'conversations' or 'text'. Columns: label"),
        ({"messages": [ASSISTANT, USER], "label": 1}, "labels", "'messages' must end .* not assistant, user"),
        ({"messages": [ASSISTANT], "label": 1}, "labels", "'messages' must end with an .* not assistant"),
        ({"text": "t", "score": 3}, "labels", "no column 'label'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(row: dict[str, Any], objective: Objective, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        judged(row, objective)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (Scored("p", ("a", "a"), 0.0), "two equal answers"),
        (Scored("p", ("a", " \n"), 0.0), "an empty answer"),
        (Scored("p", ("",), 1.0), "an empty answer"),
        (Scored([USER], ([{"role": "assistant", "content": ""}],), 1.0), "an empty answer"),
        (Scored("p", ("a", "b"), 0.0), None),
        (Scored(None, ("a",), 0.0), None),
    ],
)
def test_what_teaches_nothing(one: Scored, why: Literal["two equal answers", "an empty answer"] | None) -> None:
    assert one.unusable == why


def test_two_labels() -> None:
    assert two_labels([1.0, 0.0, 1.0]) == (0.0, 1.0)
    assert two_labels([1.0, -1.0]) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="every row to train on has the label 1: there is nothing to tell apart"):
        two_labels([1.0, 1.0])
    with pytest.raises(ValueError, match=r"7 different labels \(0, 1, 2, 3, 4, \.\.\.\), .*make pairs"):
        two_labels([float(i % 7) for i in range(20)])


# ---- the held-out split ----


@pytest.mark.parametrize(
    "shape",
    [
        lambda p, n: {"prompt": p, "completion": str(n)},
        lambda p, n: {"text": p},
        lambda p, n: {"messages": [user(p), said(str(n)), user("more"), said("no")]},
        lambda p, n: {"messages": [said("welcome"), user(p), said(str(n))]},
        lambda p, n: {"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": str(n)}]},
        lambda p, n: {"chosen": [user(p), said(f"x{n}")], "rejected": [user(p), said("y")]},
        lambda p, n: {"chosen": f"{p} x{n}", "rejected": f"{p} y"},
        lambda p, n: {"completion": p},
    ],
    ids=["prompt", "text", "messages", "greeting", "conversations", "pair of messages", "pair of texts", "completion"],
)
def test_rows_of_one_prompt_stay_on_one_side(shape):
    """20 prompts, three rows each: two prompts are held out, one row of each, and 54 rows are left."""
    rows = [shape(f"question {prompt}", n) for n in range(3) for prompt in range(20)]
    train, held_out = hold_out(rows, prompt=shared_prompt, seed=0)
    assert (len(train), len(held_out)) == (54, 2)
    kept = [shared_prompt(row) for row in train]
    assert not [row for row in held_out if shared_prompt(row) in kept]


# ---- what is said ----


def test_what_rows_are_taken_for_is_said_with_an_example():
    rows = [{"messages": TALK, "tools": TOOLS}, {"prompt": "a", "completion": "b"}, {"messages": TALK}]
    assert described(rows, "text") == [
        "rows: 2 of `messages`, one example for each turn of the assistant; 1 of `prompt` and `completion`",
        "for example: user: 'hi' | assistant: 'ho' | user: 'more' (tools: 1) -> assistant: 'no' "
        "(the last of 2 of its row)",
    ]
    assert described([{"text": "a\nb"}], "text") == ["rows: 1 of `text`", r"for example: (the beginning) -> 'a\nb'"]
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert described([pair, {**pair, "margin": 1}], "pairs") == [
        "rows: 1 of `chosen` and `rejected` (text) behind `prompt`; "
        "1 of `chosen` and `rejected` (text) behind `prompt`, with `margin`",
        "for example: 'a' -> 'b' better than 'c'",
    ]
    inside = {"chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")], "margin": 1.5}
    assert described([inside], "pairs") == [
        "rows: 1 of `chosen` and `rejected` (messages) with the prompt inside both, with `margin`",
        "for example: user: 'a' -> assistant: 'b' better by 1.5 than assistant: 'c'",
    ]
    assert described([{"text": "a", "label": 2}], "labels") == [
        "rows: 1 of `text` with `label`",
        "for example: 'a' is 2",
    ]


def test_a_long_example_is_shortened_and_made_harmless():
    (_, example) = described([{"text": "\x1b[31m" + "word " * 1000 + "\u202eend"}], "text")
    assert len(example) < 300
    assert r"\x1b[31mword word" in example
    assert " ... " in example
    assert example.endswith(r"\u202eend'")
    (_, example) = described([{"messages": [user("\x1b"), said("x" * 10**6)]}], "text")
    assert len(example) < 600
