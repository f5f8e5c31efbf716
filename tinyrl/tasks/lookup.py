"""The lookup task: a question about people whose facts only a search knows; full marks for exactly the right answer.

    question: job of the parent of Ada Stone ? search Ada Stone parent ; found Eva Stone ; search Eva Stone job ; ...

The embedded lookup model's own task. Its pre-training text mostly guesses at once, so greedy decoding never searches
before training: that searching pays is found out from the reward of the answer alone, as in Search-R1.
"""

from typing import Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Transcript, last_turn
from tinyrl.starter.text import answer_text, fact, found_text, lookup_rows, search_text
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

NUM_ROWS = {"train": 4096, "eval": 512}


def rows(split: str) -> list[Row]:
    """Rows {"prompt", "answer", "world"}: 4,096 to train on, 512 held out; no question of theirs was pre-trained on.

    `world` is the key that the row's facts follow from: no two rows share one.
    """
    return [dict(row) for row in lookup_rows(split, num_rows=NUM_ROWS[split])]


def respond(
    prompts: list[Prompt], transcripts: list[Transcript], *, world: list[str], **columns: Any
) -> list[Reply | str | None]:
    """What the search answers in each row's world. A turn that answers, or does not end with ';', ends the episode."""
    return [_reply(last_turn(turns), key) for turns, key in zip(transcripts, world, strict=True)]


def _reply(turn: str, world: str) -> Reply | None:
    words = turn.split()
    if "answer" in words or words[-1:] != [";"]:
        return None
    query = words[1:-1] if words[0] == "search" else []
    known = fact(world, *query) if len(query) == 3 else None
    return Reply(found_text(known), invalid=known is None)


def said_answer(text: str) -> str | None:
    """What the first `answer` in a text says (' answer baker .' -> 'baker'); None where it is not a single word."""
    words = text.split()
    said = words[words.index("answer") + 1 :] if "answer" in words else []
    return said[0] if said[1:] in ([], ["."]) and said and said[0].isalpha() else None


def score(text: str, row: Row) -> float:
    """1.0 where what the policy wrote answers with the right word, else 0.0; observations do not count."""
    return float(said_answer(text) == row["answer"])


def asking_turn(row: Row) -> str:
    """The first search that a question takes: 'job of the parent of Ada Stone' -> ' search Ada Stone parent ;'."""
    *keys, person = row["prompt"].removeprefix("question: ").removesuffix(" ?").split(" of ")
    return search_text(f"{person} {keys[-1].removeprefix('the ')}")


TASK = Task(
    name="lookup",
    summary="answer questions by searching, in several turns (the embedded lookup model's own; right or wrong)",
    rows=rows,
    verify=by_row(score),
    gold=lambda row: answer_text(row["answer"]),  # without the search that leads to it
    columns=("prompt", "answer", "world"),
    answer=said_answer,
    respond=respond,
    stop=(";", "."),
    asking_turn=asking_turn,
)
