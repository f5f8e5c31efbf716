"""Search for holes in a reward before training: texts that score high and are wrong.

Every text is wrong by how it is made: it has no answer, another row's, or the right one neither first nor last among
others. A policy finds such texts by chance and learns to write them (reward hacking, Skalski et al., "Defining and
characterizing reward hacking", 2022); this finds the common ones in seconds, without a model. The templates are in
holes.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from tinyrl.data.images import shown_text
from tinyrl.data.messages import as_messages, asked_of
from tinyrl.data.readers import Row
from tinyrl.environments.environment import NONSENSE
from tinyrl.tasks import Task
from tinyrl.tasks.grading import first_number, last_number, marked_answer, normalised_text, numbers_equal, parse_number

HIGH = 0.75  # share of the way from a row's lowest score to that of its right answer
LEAST_SHARE = 0.25  # share of the rows in which a text must score high, so that it is not a coincidence
FIELD = re.compile(r"\{(\w+)\}")
HOLES = yaml.safe_load(Path(__file__).with_name("holes.yaml").read_text(encoding="utf-8"))
Texts = list[str | None]  # a text for each row; None: not tried there
Score = Callable[[list[int], list[str]], list[float]]  # rows and a completion for each -> scores; NaN: none


class Hole(NamedTuple):
    """A kind of wrong text with the share of the rows where it scores high; one of these texts, its score, and the best
    score of its row's right answer in any form.
    """

    name: str
    share: float
    text: str
    score: float
    right: float


class Attack(NamedTuple):
    """The result of a search. holes: of each family of texts the worst that scores high in a quarter of the rows, the
    worst first; is_blind: no right answer scores more than the worst text of its row; tried: texts and their kinds.
    """

    holes: list[Hole]
    is_blind: bool
    tried: tuple[int, int]


@dataclass(frozen=True)
class RightAnswers:
    """Right answers by row. values: without what is around them; given: as the task or the rows have them; column: its
    name, None where the task knows them.
    """

    values: dict[int, str]
    given: dict[int, str]
    column: str | None = None

    @property
    def are_different(self) -> bool:
        """Return whether two rows have different answers, so that one is wrong for the other."""
        return len({*self.values.values()}) > 1


def known_answers(task: Task, rows: list[Row]) -> RightAnswers:
    """Return the right answers that a task knows, or that rows have in a column `answer`."""
    values = {i: value for i, row in enumerate(rows) if (value := right_value(task, row)) is not None}
    return RightAnswers(values, {i: str(task.gold(rows[i]) or value) for i, value in values.items()})


def answers_in(column: str, rows: list[Row]) -> RightAnswers:
    """Return the values of a column as right answers."""
    values = {i: value for i, row in enumerate(rows) if (value := answer_in(row.get(column))) is not None}
    return RightAnswers(values, {i: str(rows[i][column]).strip() for i in values}, column)


def find_holes(score: Score, task: Task, rows: list[Row], answers: RightAnswers) -> Attack:
    """Score right answers, of which two are different, and wrong texts."""
    right = answers.values
    where = [*right]
    values = list(dict.fromkeys(right.values()))
    prompts = [shown_text(as_messages(asked_of(task.prompt(rows[i])))[-1]) for i in where]
    fields = [_fields(prompt, right[i], values) for prompt, i in zip(prompts, where, strict=True)]

    def scored(many: list[Texts]) -> np.ndarray:
        """Score several texts of every row in one call: (texts, rows)."""
        places = [(n, r) for n, texts in enumerate(many) for r, text in enumerate(texts) if text is not None]
        found = np.full((len(many), len(where)), math.nan)
        if places:
            answers = [str(many[n][r]) for n, r in places]
            found[tuple(zip(*places, strict=True))] = score([where[r] for _, r in places], answers)
        return found

    forms = HOLES["forms"]
    kinds = list[tuple[str, str, Texts]]()  # name, family, texts
    for name, template in HOLES["texts"].items():
        kinds.append((name, name, [_filled(template, each) for each in fields]))
    for name, template in HOLES["values"].items():
        for form, around in forms.items():
            texts = [_filled(around, {"value": _filled(template, each)}) for each in fields]
            kinds.append((f"{name}, {form}", name, texts))
    for _, _, texts in kinds:
        pairs = zip(texts, right.values(), strict=True)
        texts[:] = [text if text is None or is_wrong(text, value) else None for text, value in pairs]
    kinds = [kind for kind in kinds if any(text is not None for text in kind[2])]
    golds = list[Texts]()
    for texts in ([answers.given[i] for i in where], *in_forms([*right.values()]).values()):
        golds.append([*texts])
    best = np.fmax.reduce(scored(golds))
    scores = scored([texts for _, _, texts in kinds])
    low = np.fmin.reduce(scores)
    longest = [max(len(text) for text in texts if text) for texts in zip(*golds, strict=True)]
    lengths = np.array([[len(text or "") for text in texts] for _, _, texts in kinds])
    is_short = lengths <= np.array(longest)
    base = lowest_fair_score(scores, is_short, best)
    high = (best > low) & (scores >= base + HIGH * (best - base))
    found = list[tuple[str, Hole]]()
    for (name, family, texts), of, is_high in zip(kinds, scores, high, strict=True):
        if is_high.sum() >= max(1, LEAST_SHARE * len(where)):
            at = int(is_high.argmax())
            share = is_high.sum() / max(1, (~np.isnan(of)).sum())
            found.append((family, Hole(name, float(share), texts[at] or "", float(of[at]), float(best[at]))))
    found.sort(key=lambda one: (-one[1].share, len(one[1].text)))
    holes = dict(reversed(found))
    tried = sum(text is not None for _, _, texts in kinds for text in texts)
    return Attack([*holes.values()][::-1], not (best > low).any(), (tried, len(kinds)))


def lowest_fair_score(scores: np.ndarray, is_short: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Return the lowest score (rows,) of wrong texts that are no longer than a right answer in its longest form: a
    penalty on length gives long ones far less, beside which every other text would seem to score high. Where all short
    ones score as a right answer does, that of all texts. scores: (texts, rows), NaN for none; is_short: (texts, rows).
    """
    of_short = np.fmin.reduce(np.where(is_short, scores, math.nan))
    return np.where(of_short < best, of_short, np.fmin.reduce(scores))


def dressed(value: str) -> dict[str, str]:
    """Return a right answer in the forms in which chat models write one, by their names."""
    numeric = parse_number(value) is not None
    fields = {
        "value": value,
        "number": value if numeric else None,
        "letter": value if len(value) == 1 and value.isalpha() else None,
        "words": None if numeric else value,
        "exclaimed": None if numeric or len(value) == 1 else value,
    }
    texts = {name: _filled(template, fields) for name, template in HOLES["dresses"].items()}
    return {name: text for name, text in texts.items() if text is not None}


def in_forms(values: list[str]) -> dict[str, list[str]]:
    """Return answers in each form of one, by its name."""
    return {name: [_filled(form, {"value": value}) or "" for value in values] for name, form in HOLES["forms"].items()}


def right_value(task: Task, row: Row) -> str | None:
    """Return the right answer of a row, as its task knows it, or in its column `answer`."""
    gold = task.gold(row)
    return answer_in(gold if gold is not None else row.get("answer"))


def answer_in(value: Any) -> str | None:
    """Return an answer without what is around it: "72" of a worked solution that ends in "#### 72". None for what is no
    answer.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    text = str(value).strip()
    marked = marked_answer(text)
    return (marked if marked is not None else text).strip() or None


def is_wrong(text: str, right: str) -> bool:
    """Return whether nobody could take a text for the right answer: that is not what it marks, nor its first or last
    number or words.
    """
    for words in (lambda t: normalised_text(t).split(), lambda t: re.findall(r"[\w.+-]+", t)):
        written = words(text)
        wanted = words(right)
        if wanted in (written[: len(wanted)], written[-len(wanted) :]):
            return False
    found = [marked_answer(text), first_number(text), last_number(text)]
    found += re.findall(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)[:1]
    said = [value for value in found if value is not None]
    return not any(numbers_equal(v, right) or normalised_text(v) == normalised_text(right) for v in said)


def _filled(template: str | list[Any], fields: dict[str, Any]) -> str | None:
    """Fill in a template of HOLES; None where one of the values it names is None."""
    text, times = template if isinstance(template, list) else (template, 1)
    if any(fields.get(name, "") is None for name in FIELD.findall(text)):
        return None
    return FIELD.sub(lambda found: fields.get(found[1], found[0]) or "", text) * times


def _fields(prompt: str, right: str, values: list[str]) -> dict[str, Any]:
    """Return what the templates name of a row; wrong values are other rows', or made up where there is only one."""
    at = values.index(right)
    numeric = parse_number(right) is not None
    others = [v for v in values[at + 1 :] + values[:at] if is_wrong(v, right)]
    invented = "999983" if numeric else "something else"
    wrong, wrong_too = [*others[:2], invented, f"{invented}1"][:2]
    numbers = [str(i) for i in range(201)]
    if right not in numbers[1:-1]:
        numbers.insert(100, right)  # neither first nor last
    return {
        "prompt": prompt,
        "right": right,
        "wrong": wrong,
        "wrong_too": wrong_too,
        "nonsense": NONSENSE,
        "words": " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)),
        "all_forms": "\n".join(_filled(form, {"value": wrong}) or "" for form in HOLES["forms"].values()),
        "counting": " ".join(numbers) if numeric else None,
        "numeric": "" if numeric else None,
        "minus": "-" if right.startswith("-") else "",
        "digits": right.lstrip("-"),
        "reversed": right[::-1] if right.isdigit() else f"{right}0",
        "start": right[: max(1, len(right) // 3)] if len(right) > 2 else None,
    }
