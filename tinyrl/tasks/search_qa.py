"""Questions answered with the help of a search engine, scored by exact match: Search-R1 (Jin et al., arXiv 2503.09516).

An answer is right if it equals one of the row's `golden_answers` after SQuAD's normalisation: lower case, no
punctuation, no articles, single spaces. Differs in two points: only the policy's own text is read, never a page that
was found, and a text of which nothing is left (the answers "A" and "!") is compared as it is.
"""

from __future__ import annotations

import re
import string
from typing import Any

from tinyrl.data.readers import Row
from tinyrl.tasks import Task, text_in
from tinyrl.tasks.grading import by_row, folded, tagged

INSTRUCTION = (
    "Answer the question below. First think, between <think> and </think>, and think again whenever you have read "
    "something new. Where you lack a fact, search for it: write a query between <search> and </search>, and what is "
    "found will stand between <information> and </information>. Search as often as you need. As soon as you know the "
    "answer, write it alone, in as few words as possible, between <answer> and </answer>, like this: "
    "<answer>Lake Geneva</answer>"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_answer(text: str) -> str:
    """Normalise a text as SQuAD does; one of which nothing would be left only loses case and spacing."""
    lowered = folded(text).lower()
    plain = " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered.translate(_PUNCTUATION)).split())
    return plain or " ".join(lowered.split())


def answer(text: str, row: Row) -> str | None:
    """Return a completion's last <answer>, normalised, and the first of the row's golden answers for each of them; None
    if there is none.
    """
    inside = tagged(text, "answer")
    given = None if inside is None else normalised_answer(inside)
    golden = [normalised_answer(each) for each in _golden(row["golden_answers"])]
    return golden[0] if given in golden else given or None


def score(text: str, row: Row) -> float:
    """Return 1.0 if a completion's answer is one of the row's golden answers, else 0.0."""
    return float(answer(text, row) == normalised_answer(_golden(row["golden_answers"])[0]))


def _golden(answers: Any) -> list[str]:
    golden = [answers] if isinstance(answers, str) else answers
    if not isinstance(golden, list) or not golden or not all(isinstance(a, str) and a.strip() for a in golden):
        raise ValueError(f"'golden_answers' must be a text or a list of texts, not {answers!r:.60}")
    return golden


TASK = Task(
    name="search_qa",
    summary="your own questions, answered with a search engine over your passages (Search-R1's form)",
    prompt=lambda row: f"{INSTRUCTION}\nQuestion: {text_in(row, 'question')}\n",
    verify=by_row(score),
    right_or_wrong=True,
    gold=lambda row: f"<answer>{_golden(row['golden_answers'])[0].strip()}</answer>",
    columns=("question", "golden_answers"),
    environment="search",
    answer=answer,
)
