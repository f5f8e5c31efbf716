"""Rows of reward model training: what they are taken for, tokens of each answer, what is asked of its score.

Answers are tokenised by the functions that score completions later (rewards/model_text.py), so that what is learnt is
what PPO reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tinyrl.config.schema import Config
from tinyrl.data.described import beginning, described, quoting
from tinyrl.data.judged import Judged, Objective, judged, mean_and_deviation, objective_of, read_as, two_labels
from tinyrl.data.readers import Row
from tinyrl.data.rows import example_rows, few_held_out, fingerprints
from tinyrl.models.reward_model import classifier_room
from tinyrl.models.weight_checks import check_ids
from tinyrl.parts import Parts
from tinyrl.rewards.model_text import TextFormat, judged_tokens
from tinyrl.runs.signals import watched
from tinyrl.text import number


@dataclass(frozen=True)
class JudgedTokens:
    """texts: tokens of the chosen and the rejected answer, or of one, each behind its prompt. target: the margin asked
    for, the label (0 or 1), or the rating in deviations from the mean.
    """

    texts: tuple[list[int], ...]
    target: float


@dataclass(frozen=True)
class JudgedRows:
    """The rows of a run. A rating is mean + deviation * target; notes are what is worth saying of them before step 1.
    `prompts`: whether every row to train on has one in a column of its own.
    """

    objective: Objective
    train: list[JudgedTokens]
    held_out: list[JudgedTokens]
    mean: float
    deviation: float
    prompts: bool
    notes: list[str]
    fingerprints: dict[str, str]


def read_judged_rows(config: Config, parts: Parts) -> JudgedRows:
    """The rows of task.data, tokenised; a tenth of the prompts is held out unless task.eval_data says otherwise.

    Raises ValueError for rows that say nothing of their answers, and where they leave nothing to learn.
    """
    asked = config.reward_model.objective
    rows, held_out_rows = example_rows(config)
    objective = objective_of(rows[0], asked)
    if objective == "ratings" and config.reward_model.label_smoothing:
        smoothing = config.reward_model.label_smoothing
        raise ValueError(f"reward_model.label_smoothing={smoothing} is for pairs and labels; these rows are ratings")
    kind = "pairs" if objective == "pairs" else "labels"
    notes = described([read_as(row, objective) for row in rows], kind)
    train, held_out = (_usable(part, objective, notes) for part in (rows, held_out_rows))
    values = [one.value for _, one in train]
    mean, deviation, target_of, said = _targets(objective, values, [one.value for _, one in held_out])
    reader = _Reader(config, parts)
    found = JudgedRows(
        objective,
        [JudgedTokens(reader.texts(row, one), target_of(one.value)) for row, one in watched(train)],
        [JudgedTokens(reader.texts(row, one), target_of(one.value)) for row, one in watched(held_out)],
        mean,
        deviation,
        all(row.get("prompt") is not None for row in rows),
        [*notes, *said, *reader.notes()],
        fingerprints(rows, held_out_rows),
    )
    check_ids((text for one in found.train + found.held_out for text in one.texts), parts.tokenizer, parts.roles.causal)
    if config.run.eval_prompts:
        found.notes.extend(few_held_out([one.prompt or one.answers for _, one in held_out]))
    return found


def _usable(rows: list[Row], objective: Objective, notes: list[str]) -> list[tuple[Row, Judged]]:
    """Rows, as they are and as they are read, without those that teach nothing, which `notes` tell of. Raises
    ValueError where none is left.
    """
    found = [(row, _read(row, objective)) for row in watched(rows)]
    why = Counter(one.unusable for _, one in found if one.unusable)
    what = f"{why.total():,} of {len(rows):,} rows ({', '.join(f'{n:,} with {reason}' for reason, n in why.items())})"
    if why.total() == len(rows):
        raise ValueError(f"{what} teach nothing: none is left to learn from")
    if why:
        first = next(row for row, one in found if one.unusable)
        notes.append(f"warning: {what} teach nothing and are left out, the first is {beginning(first)}")
    return [(row, one) for row, one in found if one.unusable is None]


def _read(row: Row, objective: Objective) -> Judged:
    with quoting(row):
        return judged(row, objective)


def _targets(
    objective: Objective, values: list[float], held_out: list[float]
) -> tuple[float, float, Callable[[float], float], list[str]]:
    """(mean, deviation, value -> target, lines that say so) of the rows to train on."""
    if objective == "pairs":
        return 0.0, 1.0, lambda margin: margin, []
    if objective == "labels":
        low, high = two_labels(values)
        two_labels([*values, *held_out])
        good = values.count(high)
        said = f"labels: {high:g} is the good one ({good:,} of {len(values):,} rows), {low:g} the other"
        return 0.0, 1.0, lambda label: float(label == high), [said]
    mean, deviation = mean_and_deviation(values)
    said = (
        f"ratings: {min(values):g} to {max(values):g}, mean {number(mean)}; a score of 1 is one standard deviation "
        f"({number(deviation)}) above it"
    )
    return mean, deviation, lambda rating: (rating - mean) / deviation, [said]


class _Reader:
    """Tokeniser of answers. State: how many were too long."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self.tokenizer, self.text_format = parts.tokenizer, TextFormat.of_run(config)
        self.adapter = parts.roles.peft is not None
        self.room = parts.positions if self.adapter else classifier_room(parts.roles.causal.config, parts.tokenizer)
        self.read, self.cut = 0, 0

    def texts(self, row: Row, one: Judged) -> tuple[list[int], ...]:
        """Tokens of each answer behind its prompt. Raises ValueError, quoting the row, where no policy writes such."""
        with quoting(row):
            return tuple(self._tokens(one, side) for side in range(len(one.answers)))

    def _tokens(self, one: Judged, side: int) -> list[int]:
        def tokens(most: int) -> list[int]:
            return judged_tokens(
                self.tokenizer, one.prompt, one.answers[side],
                text_format=self.text_format, max_tokens=most, adapter=self.adapter,
            )  # fmt: skip

        found = tokens(self.room + 1)
        self.read += 1
        if len(found) <= self.room:
            return found
        self.cut += 1
        return tokens(self.room)

    def notes(self) -> list[str]:
        """What was cut off."""
        if not self.cut:
            return []
        return [
            f"warning: {self.cut:,} of {self.read:,} texts have more than the {self.room:,} tokens that the model "
            "reads; their beginnings are cut off, as they will be in scoring"
        ]
