"""The rubric of a judge: its text and criteria, and whether the scale they speak of is the one scores are read on.

Criteria follow Rubrics as Rewards (Gunjal et al. 2025, arXiv:2507.17746), explicit aggregation: the reward is
sum(w_k s_k) / sum(w_k) over the criteria k. Three deviations: one request asks about all criteria, where the paper asks
about each alone; a score s_k is on a scale, mapped to 0 to 1, where the paper's is 0 or 1; criteria are a run's, unless
criteria_column names the prompts' own. Of these, some weights may be negative: as in HealthBench (Arora et al. 2025,
arXiv:2505.08775) the sum is divided by that of the positive ones, and clipped to 0 to 1. tests/rewards/test_criteria.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.data.criteria import criteria_in
from tinyrl.data.readers import Row

OF_A_SCALE = re.compile(r"\b(?:scor|rat(?:e|ing)|scale|grad(?:e|ing)|points?\b|marks?\b)", re.I)
RANGE = re.compile(r"(?<![\w.-])(-?\d+(?:\.\d+)?)\s*(?:to|through|and|-|\u2013|\u2014)\s*(\d+(?:\.\d+)?)(?![\w-])")
BEST = re.compile(r"\bout of (\d+)|\b(\d+)[- ]points? scale", re.I)
SENTENCE = re.compile(r"[^\n.!?;]*(?:\.\d[^\n.!?;]*)*")
LARGEST_LOW = 1.0  # scales begin at 0, 1 or below; "8 to 10 if it is right" is a part of one


@dataclass(frozen=True)
class Criterion:
    """A criterion that a judge scores from `low` (worst) to `high` (best); name: of its metric."""

    name: str
    text: str
    weight: float
    low: float
    high: float

    def reward(self, score: float) -> float:
        """Map a score to 0 to 1."""
        return (score - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Rubric:
    """What a judge judges by: a text ("" where there are criteria alone), and criteria, if it scores several.

    column: of the rows, with the criteria of each; None: they are the run's. low, high: the scale of a row's criteria.
    """

    text: str
    criteria: list[Criterion]
    column: str | None = None
    low: float = 0.0
    high: float = 1.0

    def of_row(self, row: Row) -> Rubric:
        """Return the rubric for a row. Raises ValueError where its column holds no criteria."""
        if self.column is None:
            return self
        criteria = list[Criterion]()
        for number, one in enumerate(criteria_in(row, self.column), start=1):
            name = f"criterion_{number}"
            criteria.append(Criterion(name=name, text=one.text, weight=one.weight, low=self.low, high=self.high))
        return replace(self, criteria=criteria)

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        return {one.name: (one.low, one.high) for one in self.criteria}

    def reward(self, rewards: Mapping[str, float]) -> float:
        """Return the weighted mean of the criteria's rewards, from 0 to 1 if some weights are negative."""
        total = sum(one.weight * rewards[one.name] for one in self.criteria)
        return min(1.0, max(0.0, total / sum(max(0.0, one.weight) for one in self.criteria)))


def read_rubric(judge: RewardFunctionConfig) -> Rubric:
    """Return the rubric of a judge. Raises ValueError for a file that cannot be read, and for a text that speaks of
    another scale than the default one, where none is given.
    """
    text = ""
    if judge.rubric is not None:
        try:
            text = Path(judge.rubric).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"reward.functions: rubric {judge.rubric}: {error}") from None
    criteria = list[Criterion]()
    for name, one in zip(judge.criterion_names, judge.criteria, strict=True):
        low, high = judge.scale if one.scale is None else one.scale
        criteria.append(Criterion(name=name, text=one.text, weight=one.weight, low=low, high=high))
    if judge.mode == "score" and judge.criteria_column is None and "scale" not in judge.model_fields_set:
        by_default = [one for one, given in zip(criteria, judge.criteria, strict=True) if given.scale is None]
        if by_default or not criteria:
            check_scale(text, f"the rubric {judge.rubric}", judge.scale)
        for one in by_default:
            check_scale(one.text, f"the criterion {one.name}", judge.scale)
    low, high = judge.scale
    return Rubric(text=text, criteria=criteria, column=judge.criteria_column, low=low, high=high)


def check_scale(text: str, what: str, scale: list[float]) -> None:
    """Raise ValueError for a text, `what`, that speaks of another scale than `scale`, which nobody has given."""
    named = named_scale(text)
    if named is None:
        return
    low, high = scale
    least, best = named
    if best != high or least not in (None, low):
        words = f"up to {best:g}" if least is None else f"from {least:g} to {best:g}"
        own = f"[{low if least is None else least:g}, {best:g}]"
        raise ValueError(
            f"reward.functions: {what} speaks of a scale {words}, and scores are read from {low:g} to {high:g} by "
            f"default. Give scale: {own}, or scale: [{low:g}, {high:g}] if that is meant"
        )


def named_scale(rubric: str) -> tuple[float | None, float] | None:
    """Return the (worst, best) score that a rubric speaks of: over all ranges in sentences about scores, one of which
    must begin at 1 or below. The worst is None where only the best is named ("out of 5"); None: there is no scale.
    """
    sentences = [found for found in SENTENCE.findall(rubric) if OF_A_SCALE.search(found)]
    ends = list[tuple[float, float]]()
    best = list[float]()
    for sentence in sentences:
        ends += [(float(low), float(high)) for low, high in RANGE.findall(sentence)]
        best += [float(one or other) for one, other in BEST.findall(sentence)]
    least = min((low for low, high in ends if low < high), default=None)
    if least is not None and least <= LARGEST_LOW:
        return least, max(high for _, high in ends)
    return (None, max(best)) if best else None


def check_rubrics(config: Config) -> None:
    """Raise Refusal for a rubric that cannot be read, or that speaks of another scale."""
    for at, function in enumerate(config.reward.functions):
        if not function.is_judge:
            continue
        try:
            read_rubric(function)
        except ValueError as error:
            raise Refusal((f"reward.functions[{at}].rubric",), str(error)) from error
