"""Rows in the formats that people have: how each is parsed, and what is refused."""

from typing import Any

import pytest

from tinyrl.data import formats, kinds
from tinyrl.data.formats import (
    Format,
    Scored,
    TextExample,
    labelled,
    preference,
    shared_prompt,
    text_examples,
    two_labels,
)
from tinyrl.data.kinds import Judged, Labels, Pairs, Texts
from tinyrl.data.rows import train_eval_split


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


A, X, Y = user("a"), said("x"), said("y")
SYSTEM, OTHER = ({"role": "system", "content": text} for text in ("short", "long"))
UNLEARNT, LEARNT = {**said("bad"), "weight": 0}, {**said("good"), "weight": 1}
TALK = [user("hi"), said("ho"), user("more"), said("no")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
CALLED = [A, CALL, {"role": "tool", "content": "4"}, X]
HH = "\n\nHuman: a\n\nAssistant:"

# A row, and its examples (prompt, answer, tools), or what the error says.
TEXTS: list[tuple[dict[str, Any], list[tuple] | str]] = [
    ({"text": "abc"}, [(None, "abc")]),
    ({"prompt": "a", "completion": "bc", "text": "no", "messages": TALK}, [("a", "bc")]),
    ({"prompt": None, "text": "bc", "completion": None, "tools": "no JSON"}, [(None, "bc")]),
    ({"prompt": "a", "completion": [X]}, [([A], [X])]),
    ({"prompt": "hi", "messages": TALK[:2]}, [(TALK[:1], TALK[1:2])]),
    ({"messages": TALK}, [(TALK[:1], TALK[1:2]), (TALK[:3], TALK[3:])]),
    ({"conversations": [*TALK, A]}, [(TALK[:1], TALK[1:2]), (TALK[:3], TALK[3:])]),  # what nobody answers is left out
    ({"messages": [X, A, Y]}, [([X, A], [Y])]),  # a greeting is context
    ({"messages": [A, UNLEARNT, A, LEARNT]}, [([A, UNLEARNT, A], [LEARNT])]),
    ({"messages": [A, LEARNT, A, UNLEARNT]}, [([A], [LEARNT])]),
    ({"messages": [A, {**X, "weight": None}]}, [([A], [X])]),
    ({"prompt": "a", "completion": [UNLEARNT]}, []),
    ({"messages": [{**A, "weight": 0.5}, X]}, [([{**A, "weight": 0.5}], [X])]),  # nothing is learnt of it anyway
    *[({"messages": [A, X, A, {**Y, "weight": weight}]}, "`weight`") for weight in (0.5, 2, -1, "0", [], float("nan"))],
    ({"messages": CALLED, "tools": TOOLS}, [(CALLED[:1], [CALL], TOOLS), (CALLED[:3], [X], TOOLS)]),
    ({"prompt": [A], "completion": CALLED[1:], "tools": '[{"type": "function", "function": {"name": "add"}}]'},
     [(CALLED[:1], [CALL], TOOLS), (CALLED[:3], [X], TOOLS)]),
    ({"prompt": "a", "completon": "b"}, "task.columns.completion=OLD"),
    ({"text": None}, "'text'"),
    ({"text": TALK}, "'text'"),
    ({"prompt": " ", "completion": "a"}, "prompt"),
    ({"prompt": "a", "completion": 3}, "'completion'"),
    ({"messages": [X]}, "no turn of the assistant"),
]  # fmt: skip

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
PAIRS: list[tuple[dict[str, Any], Scored | str]] = [
    ({"prompt": "a", "chosen": "a b", "rejected": "a c"}, Scored("a", ("a b", "a c"))),
    ({"prompt": "a", "chosen": [X], "rejected": [Y]}, Scored("a", ([X], [Y]))),
    # the prompt inside both
    ({"chosen": "The sky is blue", "rejected": "The sky is black"}, Scored("The sky is", (" blue", " black"))),
    ({"chosen": "one two", "rejected": "one two three"}, Scored("one", (" two", " two three"))),
    ({"chosen": f"{HH} I do", "rejected": f"{HH} I do not"}, Scored(HH, (" I do", " I do not"))),
    ({"chosen": f"{HH} b\n\nHuman: c d", "rejected": f"{HH} b\n\nHuman: c e"},
     Scored(f"{HH} b\n\nHuman: c", (" d", " e"))),
    ({"chosen": [*TALK[:3], X], "rejected": [*TALK[:3], Y]}, Scored(TALK[:3], ([X], [Y]))),
    # both: as UltraFeedback has it, and as messages
    ({"prompt": "a", "chosen": [A, X], "rejected": [A, Y]}, Scored([A], ([X], [Y]))),
    ({"prompt": "a", "chosen": [A, X], "rejected": [A, X, A, Y]}, Scored([A], ([X], [X, A, Y]))),
    ({"prompt": "hi\n", "chosen": [*TALK[:3], X], "rejected": [*TALK[:3], Y]}, Scored(TALK[:3], ([X], [Y]))),
    ({"prompt": TALK[:1], "chosen": [*TALK[1:3], X], "rejected": [*TALK[1:3], Y]}, Scored(TALK[:3], ([X], [Y]))),
    ({"prompt": "a", "chosen": [A, X, A, Y], "rejected": [A, Y, A, Y]}, Scored([A], ([X, A, Y], [Y, A, Y]))),
    # a system turn in one of them, or the same in both
    ({"prompt": [SYSTEM, A], "chosen": [A, X], "rejected": [A, Y]}, Scored([SYSTEM, A], ([X], [Y]))),
    ({"prompt": [SYSTEM], "chosen": [A, X], "rejected": [A, Y]}, Scored([SYSTEM, A], ([X], [Y]))),
    ({"prompt": "a", "chosen": [SYSTEM, A, X], "rejected": [SYSTEM, A, Y]}, Scored([SYSTEM, A], ([X], [Y]))),
    ({"prompt": [SYSTEM, A], "chosen": [SYSTEM, A, X], "rejected": [SYSTEM, A, Y]}, Scored([SYSTEM, A], ([X], [Y]))),
    # conversations that begin otherwise than with the prompt
    ({"prompt": "b", "chosen": [A, X], "rejected": [A, Y]}, "`prompt`"),
    ({"prompt": [A, X, A], "chosen": [A, X], "rejected": [A, Y]}, "`prompt`"),
    ({"prompt": [said("a")], "chosen": [A, X], "rejected": [A, Y]}, "`prompt`"),
    ({"prompt": [SYSTEM, A], "chosen": [OTHER, A, X], "rejected": [OTHER, A, Y]}, "`prompt`"),
    # nothing to learn from, whatever the prompt is
    ({"chosen": "a b", "rejected": "a b"}, Scored(None, ("a b", "a b"))),
    ({"prompt": "p", "chosen": None, "rejected": "a"}, Scored("p", ("", "a"))),
    ({"chosen": [A, X], "rejected": []}, Scored(None, ([A, X], ""))),
    # how much better
    ({**PAIR, "margin": "0.5"}, Scored("a", ("b", "c"), 0.5)),
    ({"prompt": "a", "chosen": "b"}, "'rejected'"),
    ({"chosen": "b", "rejected": [X]}, "`chosen` and `rejected`"),
    ({"chosen": "b", "rejected": "c"}, "`prompt`"),
    ({"chosen": [A, X], "rejected": [user("c"), X]}, "`chosen` and `rejected`"),
    ({"chosen": [A, user("b")], "rejected": [A, X]}, "`chosen`"),
    *[({**PAIR, "margin": bad}, "'margin'") for bad in ("x", float("inf"), 1e9)],
]  # fmt: skip

LABELS: list[tuple[dict[str, Any], Scored | str]] = [
    ({"text": "good", "label": True}, Scored(None, ("good",), 1.0)),
    ({"prompt": "p", "completion": "c", "label": " False"}, Scored("p", ("c",), 0.0)),  # a .csv
    ({"messages": [A, X], "label": -1}, Scored([A], ([X],), -1.0)),
    ({"prompt": "a", "completion": [X], "label": 1}, Scored([A], ([X],), 1.0)),
    *[({"text": "t", "label": bad}, "'label'") for bad in ("good", "nan", float("nan"), 10**400, [1])],
    ({"messages": [X, A], "label": 1}, "'messages'"),
    ({"text": "t", "score": 3}, "'label'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "row", "wanted"),
    [(what, *case) for what, cases in (("text", TEXTS), ("pairs", PAIRS), ("labels", LABELS)) for case in cases],
)
def test_a_row_is_parsed_or_refused(what: Any, row: dict[str, Any], wanted: Any):
    parse: Any = {"text": text_examples, "pairs": preference, "labels": labelled}[what]
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=r"\S") as caught:
            parse(row)
        assert wanted in str(caught.value)
    else:
        assert parse(row) == ([TextExample(*one) for one in wanted] if what == "text" else wanted)


def test_the_columns_decide_the_kind_of_rows_of_a_reward_model() -> None:
    assert isinstance(Judged().by_columns({"chosen": "b", "label": 3, "rejected": "c"}), Pairs)
    assert isinstance(Judged().by_columns({"text": "a", "label": False, "chosen": None}), Labels)
    with pytest.raises(ValueError, match=r"task\.columns\.NEW=OLD"):
        Judged().by_columns({"prompt": "a", "score": 2})


def test_a_reward_model_learns_from_two_labels() -> None:
    assert two_labels([1.0, -1.0, 1.0]) == (-1.0, 1.0)
    for values in ([1.0, 1.0], [float(i % 7) for i in range(20)]):
        with pytest.raises(ValueError, match="different labels"):
            two_labels(values)


@pytest.mark.parametrize(
    ("row", "kind", "why"),
    [
        ({**PAIR, "chosen": "c"}, Pairs(), "two equal answers"),
        ({**PAIR, "chosen": " \n"}, Pairs(), "an empty answer"),
        ({"messages": [A, said("")], "label": 1}, Labels(), "an empty answer"),
        ({"messages": [A, CALL], "label": 1}, Labels(), None),
        ({"text": " "}, Texts(), "an empty answer"),
        ({"messages": [A, said(""), A, X]}, Texts(), None),
        ({"prompt": "a", "completion": ""}, Texts(), "an empty answer"),
        ({"prompt": "a", "completion": ""}, Texts(learns_prompts=True), None),
        ({"messages": [A, UNLEARNT]}, Texts(), kinds.UNLEARNT),
        ({"messages": [A, UNLEARNT, A, LEARNT]}, Texts(), None),
    ],
)
def test_rows_from_which_nothing_can_be_learnt(row: dict[str, Any], kind: Any, why: str | None) -> None:
    assert kind.problem(row) == why


def test_a_turn_that_is_not_to_be_learnt_is_refused_where_all_is() -> None:
    learns_all = Texts(learns_prompts=True)
    with pytest.raises(ValueError, match="weight=0"):
        learns_all.problem({"messages": [A, UNLEARNT, A, LEARNT]})
    assert learns_all.problem({"messages": [A, LEARNT, A, LEARNT]}) is None
    assert learns_all.problem({"messages": [A, LEARNT, A, UNLEARNT]}) is None  # it ends with the last one learnt


@pytest.mark.parametrize(
    "form",
    [
        lambda p, n: {"prompt": p, "completion": str(n)},
        lambda p, n: {"text": p},
        lambda p, n: {"messages": [said("welcome"), user(p), said(str(n)), user("more"), said("no")]},
        lambda p, n: {"chosen": [user(p), said(f"x{n}")], "rejected": [user(p), said("y")]},
        lambda p, n: {"chosen": f"{p} x{n}", "rejected": f"{p} y"},
    ],
    ids=["prompt", "text", "messages", "pair of messages", "pair of texts"],
)
def test_rows_of_one_prompt_stay_on_one_side(form):
    """20 prompts, three rows each: two prompts are held out, one row of each, and 54 rows are left."""
    rows = [form(f"question {prompt}", n) for n in range(3) for prompt in range(20)]
    train, held_out = train_eval_split(rows, prompt=shared_prompt, seed=0)
    assert (len(train), len(held_out)) == (54, 2)
    kept = [shared_prompt(row) for row in train]
    assert not [row for row in held_out if shared_prompt(row) in kept]


class Alpaca(Format):
    column = "output"

    def prompt(self, row: dict[str, Any]) -> str:
        return f"{row['instruction']} {row['input']}"

    def read(self, row: dict[str, Any]) -> Any:
        return self.prompt(row), row["output"]


def test_a_format_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are read, and split by their prompts, once it is named in both orders."""
    rows = [{"instruction": "Add.", "input": f"{n % 20}", "output": f"{n}"} for n in range(60)]
    with pytest.raises(ValueError, match="no column"):
        text_examples(rows[0])
    monkeypatch.setattr(formats, "ANSWERS", (*formats.ANSWERS, Alpaca()))
    monkeypatch.setattr(formats, "PROMPTS", (*formats.PROMPTS, Alpaca()))
    assert text_examples(rows[21]) == [TextExample("Add. 1", "21")]
    train, held_out = train_eval_split(rows, prompt=Texts().prompt, seed=0)
    assert (len(train), len(held_out)) == (54, 2)


def test_rows_are_counted_by_their_columns_and_the_first_is_shown():
    lines = Texts().described([{"messages": TALK, "tools": TOOLS}, {"prompt": "a", "completion": "b"}])
    assert [part in lines[0] for part in ("1 with `messages`, `tools`", "1 with `prompt`, `completion`")] == [True] * 2
    (_, example) = Texts().described([{"text": "\x1b[31m" + "word " * 1000 + "\u202eend"}])  # cut and made harmless
    assert len(example) < 400
    assert example.isprintable()
