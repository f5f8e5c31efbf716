"""The attack on a reward before training, `tinyrl reward attack`: what scores high and is wrong.

Every text is wrong by how it is made: it has no answer, another row's, or the right one neither first nor last among
others. A policy finds such texts by chance and learns to write them (reward hacking, Skalski et al., "Defining and
characterizing reward hacking", 2022); this finds the common ones in seconds, without a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments.trial import NONSENSE
from tinyrl.rewards.functions import FunctionReward
from tinyrl.rewards.judge import JudgeReward
from tinyrl.rewards.trial import as_the_data_has_it
from tinyrl.tasks import Task
from tinyrl.tasks.grading import (
    completion_text,
    first_number,
    last_number,
    marked_answer,
    normalised_text,
    numbers_equal,
    parse_number,
)
from tinyrl.tasks.prompts import row_columns
from tinyrl.text import visible

HIGH = 0.75  # of the way from a row's lowest score to its right answer's
LEAST_SHARE = 0.25  # of the rows, before it is no coincidence
ROUNDS, BEST = 2, 6  # of mutations, and how many texts of each round are mutated
SHOWN_CHARS, SHOWN_HOLES = 90, 12
FIELD = re.compile(r"\{(\w+)\}")
HOLES = yaml.safe_load(Path(__file__).with_name("holes.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Target:
    """A row as an attack sees it: what its prompt says, the right value, two wrong ones from other rows or made up."""

    prompt: str
    right: str
    wrong: str
    wrong_too: str


def _made(template: str | list[Any], fields: dict[str, str | None]) -> str | None:
    """Fill in a template of HOLES; None where one of the values it names is None."""
    text, times = template if isinstance(template, list) else (template, 1)
    if any(fields.get(name, "") is None for name in FIELD.findall(text)):
        return None
    return FIELD.sub(lambda found: fields.get(found[1], found[0]) or "", text) * times


def _fields(target: Target) -> dict[str, str | None]:
    """Return the values by which a text can be made for a row."""
    right, numeric = target.right, parse_number(target.right) is not None
    numbers = [str(i) for i in range(201)]
    if right not in numbers[1:-1]:
        numbers.insert(100, right)  # neither first nor last
    return {
        **asdict(target),
        "nonsense": NONSENSE,
        "words": " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)),
        "all_forms": "\n".join(_made(form, {"value": target.wrong}) or "" for form in HOLES["forms"].values()),
        "counting": " ".join(numbers) if numeric else None,
        "numeric": "" if numeric else None,
        "minus": "-" * right.startswith("-"),
        "digits": right.lstrip("-"),
        "reversed": right[::-1] if right.isdigit() else f"{right}0",
        "start": right[: max(1, len(right) // 3)] if len(right) > 2 else None,
    }


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


@dataclass
class Attempt:
    """A kind of text and what it got: of each row its text, its score and whether that is high (None: not tried).
    family: what it shares with its forms and mutations.
    """

    name: str
    family: str
    texts: list[str | None]
    scores: list[float] = field(default_factory=list)
    high: list[bool | None] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the rows it was tried on, those in which it scores high."""
        tried = [high for high in self.high if high is not None]
        return sum(tried) / len(tried) if tried else 0.0

    @property
    def is_hole(self) -> bool:
        return sum(high is True for high in self.high) >= max(1, LEAST_SHARE * len(self.high))

    def example(self) -> tuple[str, int]:
        """A text of it, one that scores high where there is one, and its row."""
        row = next((i for i, high in enumerate(self.high) if high), None)
        row = next(i for i, text in enumerate(self.texts) if text is not None) if row is None else row
        return self.texts[row] or "", row


@dataclass
class Attack:
    """What was tried on a reward. right: each row's best score of a right answer, in any of the forms (NaN: none)."""

    name: str
    right: list[float]
    low: list[float]
    attempts: list[Attempt]
    failed: dict[str, str]  # kinds of text on which the reward fails, and why

    @property
    def holes(self) -> list[Attempt]:
        """The worst of each family, the worst first: the most rows, then what is no mutation, then the shortest."""
        found = [attempt for attempt in self.attempts if attempt.is_hole]
        found.sort(key=lambda attempt: (-attempt.share, attempt.name.count(" + "), len(attempt.example()[0])))
        return list({attempt.family: attempt for attempt in reversed(found)}.values())[::-1]

    @property
    def is_blind(self) -> bool:
        """No right answer gets more than the worst text of its row."""
        return not any(right > low for right, low in zip(self.right, self.low, strict=True))


Reward = FunctionReward | JudgeReward


def attack(reward: Reward, name: str, task: Task, rows: list[Row]) -> Attack:
    """Try texts, then mutations of those that scored best, on a reward that was started. Raises ValueError where fewer
    than two rows have a right answer to compare with.
    """
    found = [(row, value) for row in rows if (value := right_value(task, row)) is not None]
    values = list(dict.fromkeys(value for _, value in found))
    if len(values) < 2:
        raise ValueError("an attack compares with right answers: two rows at least with different ones, in `answer`")
    targets = [_target(task, row, value, values) for row, value in found]
    rows = [row for row, _ in found]
    columns = row_columns(rows)
    prompts = [task.prompt(row) for row in rows]
    failed = dict[str, str]()

    def scores(what: str, texts: Sequence[str | None]) -> list[float]:
        """The score of each row's text; NaN where there is none, or the reward fails."""
        tried = [i for i, text in enumerate(texts) if text is not None]
        if not tried:
            return [math.nan] * len(texts)
        completions = [as_the_data_has_it(texts[i] or "", prompts[i]) for i in tried]
        here = {name: [column[i] for i in tried] for name, column in columns.items()}
        call = reward([prompts[i] for i in tried], completions, here)
        if call.failures:
            failed.setdefault(what, call.failures[0].reason)
        by_row = dict(zip(tried, call.scores, strict=True))
        return [by_row.get(i, math.nan) for i in range(len(texts))]

    golds = [task.gold(row) for row in rows]
    right = [scores("the right answer", golds)]
    right += [
        scores("the right answer", [_made(form, {"value": t.right}) for t in targets])
        for form in HOLES["forms"].values()
    ]
    best = np.fmax.reduce(right).tolist()  # NaN only where all are
    attempts = list[Attempt]()
    for found_by in (_texts, *[_mutated] * ROUNDS):
        new = list(found_by(targets, attempts))
        for attempt in new:
            attempt.scores = scores(attempt.name, attempt.texts)
        attempts += new
    low = np.fmin.reduce([attempt.scores for attempt in attempts]).tolist()
    for attempt in attempts:
        attempt.high = [
            None if math.isnan(score + top - floor) or top <= floor else score >= floor + HIGH * (top - floor)
            for score, top, floor in zip(attempt.scores, best, low, strict=True)
        ]
    return Attack(name, best, low, attempts, failed)


def right_value(task: Task, row: Row) -> str | None:
    """Return a row's right answer without what is around it: "72" of a worked solution that ends in "#### 72"."""
    gold = task.gold(row)
    answer = gold if gold is not None else row.get("answer")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        return None
    text = str(answer).strip()
    marked = marked_answer(text)
    return (marked if marked is not None else text).strip() or None


def _target(task: Task, row: Row, right: str, values: list[str]) -> Target:
    """A row with two wrong values: other rows' that are not the same, made up where there is only one."""
    at = values.index(right)
    others = [v for v in values[at + 1 :] + values[:at] if is_wrong(v, right)]
    made = "999983" if parse_number(right) is not None else "something else"
    wrong, wrong_too = [*others[:2], made, f"{made}1"][:2]
    return Target(_asked(task.prompt(row)), right, wrong, wrong_too)


def _asked(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return completion_text([{**message, "role": "assistant"} for message in prompt[-1:]])


def _texts(targets: list[Target], _: list[Attempt]) -> Iterator[Attempt]:
    """Make every kind of text that is wrong in some row."""
    fields = [_fields(target) for target in targets]
    for name, template in HOLES["texts"].items():
        yield from _where_wrong(name, name, [_made(template, each) for each in fields], targets)
    for name, template in HOLES["values"].items():
        values = [_made(template, each) for each in fields]
        for form, around in HOLES["forms"].items():
            yield from _where_wrong(f"{name}, {form}", name, [_made(around, {"value": v}) for v in values], targets)


def _where_wrong(name: str, family: str, texts: list[str | None], targets: list[Target]) -> Iterator[Attempt]:
    """Yield an attempt with those of the texts that are wrong, where there are any."""
    wrong = [
        text if text is not None and is_wrong(text, t.right) else None for text, t in zip(texts, targets, strict=True)
    ]
    if any(text is not None for text in wrong):
        yield Attempt(name, family, wrong)


def _mutated(targets: list[Target], attempts: list[Attempt]) -> Iterator[Attempt]:
    """Mutate the texts that scored most on average, each joined to the next."""
    known = {attempt.name for attempt in attempts}
    best = sorted(attempts, key=lambda attempt: -_mean(attempt.scores))[: BEST + 1]
    for one, other in pairwise(best):
        for what, template in HOLES["mutations"].items():
            name = f"{one.name} + {other.name if what == 'and' else what}"
            pairs = zip(one.texts, other.texts, strict=True)
            texts = [None if a is None or b is None else _made(template, _changes(a, b)) for a, b in pairs]
            if name not in known:
                yield from _where_wrong(name, one.family, texts, targets)


def _changes(text: str, following: str) -> dict[str, str | None]:
    joined, half = re.sub(r"\s", "", text), text[: len(text) // 2]
    return {"text": text, "next": following, "capitals": text.upper(), "joined": joined, "half": half}


def _mean(scores: list[float]) -> float:
    valid = [score for score in scores if not math.isnan(score)]
    return sum(valid) / len(valid) if valid else -math.inf


def render(found: Attack) -> str:
    """Render the holes, each with a text and its score beside the right answer's, and failures of the reward."""
    tried = sum(text is not None for attempt in found.attempts for text in attempt.texts)
    lines = [f"{found.name}: {tried:,} wrong texts of {len(found.attempts)} kinds, on {len(found.right)} rows"]
    if found.is_blind:
        lines.append("HOLE: no right answer gets more than the worst of them, in any form that was tried")
    holes = found.holes
    for hole in holes[:SHOWN_HOLES]:
        text, row = hole.example()
        shown = visible(text).replace("\n", "\\n")
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}... ({len(text):,} characters)"
        scored = f"{hole.scores[row]:.4g}, a right answer {found.right[row]:.4g}, the lowest {found.low[row]:.4g}"
        lines.append(f"HOLE: {hole.name} (in {hole.share:.0%} of the rows; {scored})\n  {shown}")
    if len(holes) > SHOWN_HOLES:
        lines.append(f"and {len(holes) - SHOWN_HOLES} more")
    if found.failed:
        what, why = next(iter(found.failed.items()))
        lines.append(f"warning: it fails on {len(found.failed)} kinds of text, such as {what}: {visible(why)}")
    if not holes and not found.is_blind:
        lines.append("no hole found: none of them scores near a right answer in a quarter of the rows")
    return "\n".join(lines)
