"""Find the right answers of rows as a reward function reads them: in which column they are, and in which form it pays
for them.

An answer counts as right where the function gives a row's own answer more than answers of other rows in the same form:
a function of the text alone does so in at most half of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyrl.data.readers import Row
from tinyrl.data.rows import PASS_RATE
from tinyrl.rewards.holes import RightAnswers, Score, answers_in, in_forms

LEAST_PAID = 0.75  # share of the rows whose own answer scores more than two others
NO_ANSWERS = ("prompt", "images", "id", PASS_RATE)  # columns
MOST_COLUMNS = 16  # that are tried
AS_GIVEN = "as given"


@dataclass(frozen=True)
class PaidForm:
    """The form in which right answers score best. texts: the answers in it, by row; score: the mean over the rows;
    example: the text of a row that is paid.
    """

    answers: RightAnswers
    form: str
    texts: dict[int, str]
    score: float
    example: str

    @property
    def is_given(self) -> bool:
        """Return whether the answers need no other form than the one that task or rows have."""
        return self.form == AS_GIVEN


def columns_to_try(rows: list[Row], *, named: set[str], takes_any: bool) -> list[list[str]]:
    """Return the columns that may hold right answers: those that a reward function names, then, where it takes any, the
    others.
    """
    there = [name for name in rows[0] if name not in NO_ANSWERS]
    first = [name for name in there if name in named]
    rest = [name for name in there if name not in named]
    return [first, rest[:MOST_COLUMNS]] if takes_any else [first]


def paid_column(score: Score, rows: list[Row], columns: list[list[str]], *, enough: float) -> PaidForm | None:
    """Return the column whose values score best as answers, of the first group of columns that has one; None where a
    reward pays for none.
    """
    for group in columns:
        forms = [paid_form(score, answers_in(column, rows), enough=enough) for column in group]
        found = [form for form in forms if form is not None]
        if found:
            return max(found, key=lambda form: form.score)
    return None


def paid_form(score: Score, answers: RightAnswers, *, enough: float) -> PaidForm | None:
    """Return the form in which answers score best; None where they are paid for in none. enough: a score that needs no
    other form than the given one.
    """
    if not answers.are_different:
        return None
    places = [*answers.values]
    forms = {AS_GIVEN: answers.given}
    for name, texts in in_forms([*answers.values.values()]).items():
        forms[name] = dict(zip(places, texts, strict=True))
    best: PaidForm | None = None
    for name, texts in forms.items():
        own, others = _scores(score, answers.values, texts)
        is_paid = own > others
        mean = float(np.nanmean(own)) if is_paid.any() else 0.0
        if is_paid.mean() >= LEAST_PAID and (best is None or mean > best.score):
            best = PaidForm(answers, name, texts, score=mean, example=texts[places[int(is_paid.argmax())]])
        if best is not None and best.score >= enough:
            break
    return best


def _scores(score: Score, values: dict[int, str], texts: dict[int, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of the rows' own answers, and the higher one of two that other rows have, before and behind."""
    places = [*values]
    before = list[str]()
    behind = list[str]()
    for i, place in enumerate(places):
        others = [other for other in places[i + 1 :] + places[:i] if values[other] != values[place]]
        behind.append(texts[others[0]])
        before.append(texts[others[-1]])
    own = [texts[place] for place in places]
    scores = np.array(score(places * 3, own + before + behind)).reshape(3, len(places))
    return scores[0], np.nan_to_num(scores[1:], nan=-np.inf).max(0)
