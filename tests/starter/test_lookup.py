"""The lookup task: rows, what a search answers, and the verifier."""

import re

import pytest

from tinyrl.environments import Reply
from tinyrl.starter.lookup import TASK, respond, score
from tinyrl.tasks.grading import by_row

verify = by_row(score)

FIRST = {"prompt": "question: job of Uma Costa ?", "answer": "baker", "world": "eval 0 0"}


def test_a_row_is_pinned_and_has_a_world_of_its_own() -> None:
    """A change here changes what every reported number was measured on."""
    rows = TASK.rows("train") + TASK.rows("eval")
    assert rows[4096] == FIRST
    assert len({row["world"] for row in rows}) == len(rows)  # no two rows share a world


def test_searching_as_asked_finds_the_answer_of_every_row() -> None:
    """Plays the episodes by the words of the question alone."""
    for row in TASK.rows("eval"):
        attribute, relation, person = re.fullmatch(
            r"question: (\w+) of (?:the (\w+) of )?(\w+ \w+) \?", row["prompt"]
        ).groups()  # pyright: ignore[reportOptionalMemberAccess]
        turns = []
        for key in (relation, attribute) if relation else (attribute,):
            turns.append({"role": "assistant", "content": f" search {person} {key} ;"})
            [reply] = respond([row["prompt"]], [turns], world=[row["world"]], answer=[row["answer"]], seed=[1])
            assert isinstance(reply, Reply)
            assert not reply.invalid
            person = re.fullmatch(r" found ([\w ]+) ;", reply.text).group(1)  # pyright: ignore[reportOptionalMemberAccess]
            turns.append({"role": "tool", "content": reply.text})
        turns.append({"role": "assistant", "content": f" answer {person} ."})
        assert respond([row["prompt"]], [turns], world=[row["world"]]) == [None]
        assert verify([row["prompt"]], [turns], answer=[row["answer"]]) == [1.0]


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        (" search Ada Stone parent ;", Reply(" found Emil Stone ;")),
        *[(turn, Reply(" found nothing ;", invalid=True)) for turn in (
            " search Ada Stone colour ;", " ;", " search Ada Stone job pet ;", " search Stone Ada job ;",
            " search <html> \ud83d x ;")],
        *[(turn, None) for turn in (" answer ;", "", " search Ada Stone job", " Ada .")],
    ],
)  # fmt: skip
def test_replies_of_the_search(turn: str, reply: Reply | None) -> None:
    assert respond(["q"], [[{"role": "assistant", "content": turn}]], world=["eval 0 0"]) == [reply]
