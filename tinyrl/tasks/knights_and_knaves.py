"""Knights and knaves: who tells the truth and who lies (puzzles of Xie et al. 2024, arXiv 2410.23123).

The reward is Logic-RL's (Xie et al. 2025, arXiv 2502.14768), divided by 3 so that full marks are 1.0:

    format right (<think>...</think><answer>...</answer>)     Logic-RL    here
        everybody named rightly                                 1 + 2      1.0
        somebody named wrongly                                  1 - 1.5   -1/6
        the answer cannot be read                               1 - 2     -1/3
    format wrong                                               -1 - 2     -1.0

An answer can be read if it says "NAME is a knight" or "NAME is a knave" once for every name, and nothing more.
The hub's data (K-and-K/knights-and-knaves, CC BY-NC-SA 4.0: not for commercial use) has the columns `quiz` and
`solution_text_format`; they are renamed here. The default is its puzzles of three people.
"""

from __future__ import annotations

import re

from tinyrl.data.readers import Row
from tinyrl.data.sources import read_rows
from tinyrl.tasks import Task, text_in
from tinyrl.tasks.grading import by_row, tagged, think_answer_format

HUB = {"train": "K-and-K/knights-and-knaves:train@3ppl", "eval": "K-and-K/knights-and-knaves:test@3ppl"}
HUB_COLUMNS = {"prompt": "quiz", "answer": "solution_text_format"}
RIGHT = 1.0
WRONG = -0.5 / 3
UNREADABLE = -1.0 / 3
BAD_FORMAT = -1.0
INSTRUCTION = (
    "Think first, inside <think> </think>. Then state who everybody is inside <answer> </answer>, one person a line, "
    "like this:\n<answer>\n(1) Zoey is a knight\n(2) Oliver is a knave\n</answer>"
)
_STATEMENT = re.compile(r"\b([^\W\d_]+)\s+is\s+a\s+(knight|knave)\b", re.IGNORECASE)
_ROLE = re.compile(r"knight|knave", re.IGNORECASE)


def gold(row: Row) -> str:
    if not isinstance(row["answer"], str) or _roles(row["answer"]) is None:
        raise ValueError(f"'answer' must be lines like '(1) Zoey is a knight', not {row['answer']!r:.60}")
    return f"<think>I checked every combination.</think>\n<answer>{row['answer']}</answer>"


def _roles(text: str | None) -> frozenset[tuple[str, str]] | None:
    """Return (name, role) in lower case; None if nobody is named, somebody twice, or a role outside the form."""
    found = [(name.lower(), role.lower()) for name, role in _STATEMENT.findall(text or "")]
    return frozenset(found) if found and len(found) == len(dict(found)) == len(_ROLE.findall(text or "")) else None


def answer(text: str, row: Row) -> frozenset[tuple[str, str]] | None:
    """Return the roles in a completion's <answer> as a set of (name, role); None if they cannot be read."""
    return _roles(tagged(text, "answer"))


def score(text: str, row: Row) -> float:
    """Return 1.0 for the right format and answer, below 0 otherwise: the table at the top of this file."""
    if not think_answer_format(text):
        return BAD_FORMAT
    wanted = _roles(row["answer"])
    roles = answer(text, row)
    if roles is None or wanted is None or {name for name, _ in roles} != {name for name, _ in wanted}:
        return UNREADABLE
    return RIGHT if roles == wanted else WRONG


TASK = Task(
    name="knights_and_knaves",
    summary="who tells the truth and who lies, three people, with <think> and <answer> (Logic-RL's reward)",
    rows=lambda split: read_rows(HUB[split], columns=HUB_COLUMNS),
    prompt=lambda row: f"{text_in(row, 'prompt')}\n{INSTRUCTION}",
    verify=by_row(score, with_thoughts=True),
    gold=gold,
    columns=("prompt", "answer"),
    answer=answer,
)
