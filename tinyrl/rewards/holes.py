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
from typing import Any

import numpy as np
import yaml

from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.environments.environment import NONSENSE
from tinyrl.tasks import Task
from tinyrl.tasks.grading import first_number, last_number, marked_answer, normalised_text, numbers_equal, parse_number

HIGH = 0.75  # share of the way from a row's lowest score to that of its right answer
LEAST_SHARE = 0.25  # share of the rows in which a text must score high, so that it is no coincidence
FIELD = re.compile(r"\{(\w+)\}")
HOLES = yaml.safe_load(Path(__file__).with_name("holes.yaml").read_text(encoding="utf-8"))
Texts = list[str | None]  # a text for each row; None: not tried there
Score = Callable[[list[int], list[str]], list[float]]  # rows and a completion for each -> scores; NaN: none


@dataclass
class Attempt:
    """A kind of text with its scores by row (NaN: not tried, or none), and the rows where they are high."""

    name: str
    family: str  # shared by the forms of one text
    texts: Texts
    scores: list[float]
    high: list[bool]

    @property
    def share(self) -> float:
        return sum(self.high) / max(1, sum(not math.isnan(score) for score in self.scores))

    def example(self) -> tuple[str, int]:
        """Return a text that scores high, and its row."""
        row = self.high.index(True)
        return self.texts[row] or "", row


@dataclass(frozen=True)
class Attack:
    """The result of a search. right: each row's best score of a right answer in any form; holes: the worst attempt of
    each family that scores high in a quarter of the rows, the worst first; is_blind: no right answer scores more than
    the worst text of its row.
    """

    right: list[float]
    attempts: list[Attempt]
    holes: list[Attempt]
    is_blind: bool


def find_holes(score: Score, task: Task, rows: list[Row]) -> Attack | None:
    """Score right answers and wrong texts. None where fewer than two rows have different right answers."""
    right = {i: value for i, row in enumerate(rows) if (value := right_value(task, row)) is not None}
    where, values = [*right], list(dict.fromkeys(right.values()))
    if len(values) < 2:
        return None
    fields = [_fields(as_messages(task.prompt(rows[i]))[-1]["content"], right[i], values) for i in where]

    def scored(many: list[Texts]) -> np.ndarray:
        """Score several texts of every row in one call: (texts, rows)."""
        places = [(n, r) for n, texts in enumerate(many) for r, text in enumerate(texts) if text is not None]
        found = np.full((len(many), len(where)), math.nan)
        if places:
            answers = [str(many[n][r]) for n, r in places]
            found[tuple(zip(*places, strict=True))] = score([where[r] for _, r in places], answers)
        return found

    forms, kinds = HOLES["forms"], dict[tuple[str, str], Texts]()
    for name, template in HOLES["texts"].items():
        kinds[name, name] = [_filled(template, each) for each in fields]
    for name, template in HOLES["values"].items():
        for form, around in forms.items():
            kinds[f"{name}, {form}", name] = [_filled(around, {"value": _filled(template, each)}) for each in fields]
    for key, texts in kinds.items():
        pairs = zip(texts, right.values(), strict=True)
        kinds[key] = [text if text is None or is_wrong(text, answer) else None for text, answer in pairs]
    kinds = {key: texts for key, texts in kinds.items() if any(text is not None for text in texts)}
    golds = [[_filled(form, {"value": answer}) for answer in right.values()] for form in forms.values()]
    best = np.fmax.reduce(scored([[task.gold(rows[i]) for i in where], *golds]))
    scores = scored([*kinds.values()])
    low = np.fmin.reduce(scores)
    high = ((best > low) & (scores >= low + HIGH * (best - low))).tolist()
    attempts = [Attempt(*key, kinds[key], *of) for key, *of in zip(kinds, scores.tolist(), high, strict=True)]
    found = [one for one in attempts if sum(one.high) >= max(1, LEAST_SHARE * len(where))]
    found.sort(key=lambda one: (-one.share, len(one.example()[0])))
    holes = list({one.family: one for one in reversed(found)}.values())[::-1]
    return Attack(best.tolist(), attempts, holes, not (best > low).any())


def right_value(task: Task, row: Row) -> str | None:
    """Return a row's right answer without what is around it: "72" of a worked solution that ends in "#### 72"."""
    gold = task.gold(row)
    answer = gold if gold is not None else row.get("answer")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        return None
    text = str(answer).strip()
    marked = marked_answer(text)
    return (marked if marked is not None else text).strip() or None


def is_wrong(text: str, right: str) -> bool:
    """Return whether nobody could take a text for the right answer: that is not what it marks, nor its first or last
    number or words.
    """
    for words in (lambda t: normalised_text(t).split(), lambda t: re.findall(r"[\w.+-]+", t)):
        written, wanted = words(text), words(right)
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
    at, numeric = values.index(right), parse_number(right) is not None
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
        "minus": "-" * right.startswith("-"),
        "digits": right.lstrip("-"),
        "reversed": right[::-1] if right.isdigit() else f"{right}0",
        "start": right[: max(1, len(right) // 3)] if len(right) > 2 else None,
    }
