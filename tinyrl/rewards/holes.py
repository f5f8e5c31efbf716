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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.environments.environment import NONSENSE
from tinyrl.rewards.functions import mean
from tinyrl.tasks import Task
from tinyrl.tasks.grading import first_number, last_number, marked_answer, normalised_text, numbers_equal, parse_number

HIGH = 0.75  # share of the way from a row's lowest score to that of its right answer
LEAST_SHARE = 0.25  # share of the rows in which a text must score high, so that it is no coincidence
ROUNDS, BEST = 2, 6  # rounds of mutations, texts mutated in each
FIELD = re.compile(r"\{(\w+)\}")
HOLES = yaml.safe_load(Path(__file__).with_name("holes.yaml").read_text(encoding="utf-8"))
Texts = list[str | None]  # a text for each row; None: not tried there
Score = Callable[[list[int], list[str]], list[float]]  # rows and a completion for each -> scores; NaN: none


@dataclass
class Attempt:
    """A kind of text, its scores (NaN: not tried, or none), and where they are high. family: shared by its forms."""

    name: str
    family: str
    texts: Texts
    scores: list[float] = field(default_factory=list)
    high: list[bool] = field(default_factory=list)

    @property
    def share(self) -> float:
        return sum(self.high) / max(1, sum(not math.isnan(score) for score in self.scores))

    def example(self) -> tuple[str, int]:
        """Return a text that scores high, and its row."""
        row = self.high.index(True)
        return self.texts[row] or "", row


@dataclass(frozen=True)
class Attack:
    """What was tried. right: each row's best score of a right answer in any form; holes: the worst attempt of each
    family that scores high in a quarter of the rows, the worst first; is_blind: no right answer scores more than the
    worst text of its row.
    """

    right: list[float]
    attempts: list[Attempt]
    holes: list[Attempt]
    is_blind: bool


def find_holes(score: Score, task: Task, rows: list[Row]) -> Attack | None:
    """Score wrong texts, then mutations of those that scored best. None where fewer than two rows have different right
    answers to compare with.
    """
    right = {i: value for i, row in enumerate(rows) if (value := right_value(task, row)) is not None}
    where, values = [*right], list(dict.fromkeys(right.values()))
    if len(values) < 2:
        return None
    fields = [_fields(as_messages(task.prompt(rows[i]))[-1]["content"], right[i], values) for i in where]

    def scored(many: list[Texts]) -> list[list[float]]:
        """Score several texts of every row in one call."""
        places = [(n, r) for n, texts in enumerate(many) for r, text in enumerate(texts) if text is not None]
        found = np.full((len(many), len(where)), math.nan)
        if places:
            found[tuple(zip(*places, strict=True))] = score(
                [where[r] for _, r in places], [str(many[n][r]) for n, r in places]
            )
        return found.tolist()

    def attempt(name: str, family: str, texts: Texts) -> list[Attempt]:
        """Keep the texts that are wrong; no attempt where none is."""
        pairs = zip(texts, fields, strict=True)
        wrong = [text if text is not None and is_wrong(text, each["right"]) else None for text, each in pairs]
        return [Attempt(name, family, wrong)] if any(text is not None for text in wrong) else []

    forms = HOLES["forms"]
    own = [[task.gold(rows[i]) for i in where]]
    own += [[_filled(form, {"value": each["right"]}) for each in fields] for form in forms.values()]
    best, new, attempts = np.fmax.reduce(scored(own)).tolist(), list[Attempt](), list[Attempt]()
    for name, template in HOLES["texts"].items():
        new += attempt(name, name, [_filled(template, each) for each in fields])
    for name, template in HOLES["values"].items():
        for form, around in forms.items():
            texts = [_filled(around, {"value": _filled(template, each)}) for each in fields]
            new += attempt(f"{name}, {form}", name, texts)
    for _ in range(1 + ROUNDS):
        for one, scores in zip(new, scored([one.texts for one in new]), strict=True):
            one.scores = scores
        attempts += new
        known, new = {one.name for one in attempts}, []
        leading = sorted(attempts, key=lambda one: -np.nan_to_num(mean(one.scores), nan=-math.inf))[: BEST + 1]
        for one, other in pairwise(leading):
            for what, template in HOLES["mutations"].items():
                name = f"{one.name} + {other.name if what == 'and' else what}"
                pairs = zip(one.texts, other.texts, strict=True)
                texts = [None if a is None or b is None else _filled(template, _changes(a, b)) for a, b in pairs]
                new += attempt(name, one.family, texts) if name not in known else []
    low = np.fmin.reduce([one.scores for one in attempts]).tolist()
    for one in attempts:
        ends = zip(one.scores, best, low, strict=True)
        one.high = [top > floor and score >= floor + HIGH * (top - floor) for score, top, floor in ends]
    found = [one for one in attempts if sum(one.high) >= max(1, LEAST_SHARE * len(best))]
    found.sort(key=lambda one: (-one.share, one.name.count(" + "), len(one.example()[0])))
    holes = list({one.family: one for one in reversed(found)}.values())[::-1]
    return Attack(best, attempts, holes, not any(top > floor for top, floor in zip(best, low, strict=True)))


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
    said, wanted = normalised_text(text).split(), normalised_text(right).split()
    plain = [re.findall(r"[\w.+-]+", word) for word in (text, right)]
    ends = [words[: len(wanted)] for words in (said, plain[0])] + [words[-len(wanted) :] for words in (said, plain[0])]
    if wanted in ends or plain[1] in (plain[0][: len(plain[1])], plain[0][-len(plain[1]) :]):
        return False
    found = (marked_answer(text), first_number(text), last_number(text))
    values = [value for value in found if value is not None]
    values += re.findall(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)[:1]
    return not any(numbers_equal(v, right) or normalised_text(v) == normalised_text(right) for v in values)


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


def _changes(text: str, following: str) -> dict[str, str]:
    joined, half = re.sub(r"\s", "", text), text[: len(text) // 2]
    return {"text": text, "next": following, "capitals": text.upper(), "joined": joined, "half": half}
