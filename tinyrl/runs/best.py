"""The held-out score of a run: its metric, what is a gain, when a run ends for want of one, the best checkpoint.

The score is the mean reward or, where a method measures none (sft, dpo, reward), the loss, of which lower is better. An
evaluation gains where its score is beyond the 95 % interval of the evaluation that gained last; the first one gains. A
loss has no interval, so any lower loss gains. The best checkpoint is that of the best score, whatever the intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tinyrl.formatting import format_number
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.records import json_lines, reward_changes, to_float

if TYPE_CHECKING:
    from tinyrl.runs.run_dir import RunDir

REWARD = "eval/reward_mean"
REWARD_INTERVAL = "eval/reward_ci"
LOSS = "eval/loss"
WITHOUT_GAIN = "run/without_gain"  # evaluations since the last gain; recorded where run.patience is set
WORDS = {REWARD: "held-out reward", LOSS: "held-out loss"}


class Score(BaseModel):
    """The score of an evaluation. bound: the end of its interval towards better scores; None: it has no interval."""

    step: int
    value: float
    metric: str = REWARD
    bound: float | None = None

    @property
    def worth(self) -> float:
        """Return the score with its sign such that higher is better."""
        return self.value if self.metric == REWARD else -self.value

    def is_better_than(self, other: Score | None) -> bool:
        return other is None or self.worth > other.worth

    def gains_on(self, other: Score | None) -> bool:
        """Return whether it is better than another, and beyond that one's interval."""
        beyond = other is None or other.bound is None or self.value > other.bound
        return self.is_better_than(other) and beyond

    def __str__(self) -> str:
        return f"{WORDS[self.metric]} {format_number(self.value)}"


def score_of(line: dict[str, Any], *, step: int) -> Score | None:
    """Return the score among the metrics of an evaluation; None where it has none, or that is not finite."""
    metric = REWARD if REWARD in line else LOSS
    value = to_float(line.get(metric))
    if not math.isfinite(value):
        return None
    interval = line.get(REWARD_INTERVAL)
    has_interval = metric == REWARD and isinstance(interval, list) and len(interval) == 2
    bound = to_float(interval[1]) if has_interval and interval is not None else math.nan
    return Score(step=step, value=value, metric=metric, bound=bound if math.isfinite(bound) else None)


class Gains(BaseModel):
    """Which evaluation gained last, and how many came since. Those without a score are not counted."""

    last: Score | None = None  # the last evaluation
    gained: Score | None = None
    without_gain: int = 0

    def after(self, score: Score | None) -> Gains:
        """Return how it stands after another evaluation."""
        if score is None:
            return self
        if score.gains_on(self.gained):
            return Gains(last=score, gained=score)
        return Gains(last=score, gained=self.gained, without_gain=self.without_gain + 1)


def early_end(steps: dict[int, dict[str, Any]], *, patience: int | None) -> str:
    """Return why a run ended before its last step for want of a gain, from its lines of metrics.jsonl and run.patience;
    "" where it did not.
    """
    if patience is None or not steps:
        return ""
    last = max(steps)
    count = steps[last].get(WITHOUT_GAIN)
    if not isinstance(count, int) or count < patience:
        return ""
    scores = [score for step, line in steps.items() if (score := score_of(line, step=step)) is not None]
    if count >= len(scores):  # lines were lost
        return f"ended early at step {last}: run.patience={patience}"
    gained = scores[-1 - count]
    beyond = "" if gained.bound is None else f" (95 % interval up to {format_number(gained.bound)})"
    evaluations = "1 evaluation" if count == 1 else f"{count} evaluations"
    since = f"{evaluations} without a gain on the {gained}{beyond} of step {gained.step}"
    return f"ended early at step {last}: {since}; run.patience={patience}"


def ended_early(run: RunDir, steps: dict[int, dict[str, Any]]) -> str:
    """Return why a run ended before its last step, as `early_end`; steps: its lines of metrics.jsonl."""
    counts = bool(steps) and WITHOUT_GAIN in steps[max(steps)]
    return early_end(steps, patience=run.read_config().run.patience) if counts else ""


def is_finished(run: RunDir, steps: dict[int, dict[str, Any]]) -> bool:
    """Return whether a run has no step left: all are done, or it ended early. steps: as `ended_early` has them."""
    is_done = bool(steps) and max(steps) >= run.read_config().run.num_steps
    return is_done or bool(ended_early(run, steps))


# ---- the best checkpoint ----


@dataclass(frozen=True)
class ScoredStep:
    """An evaluated step; folder: its checkpoint, if there is one."""

    score: Score
    folder: Path | None


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint that verifies. notes: on better ones that do not, and a better evaluation without one."""

    folder: Path
    score: Score
    notes: list[str]


def best_checkpoint(run: RunDir) -> BestCheckpoint | None:
    """Return the best of a run's checkpoints that were evaluated and verify; None where there is none."""
    notes = list[str]()
    evaluated = best_first(run)
    for scored in evaluated:
        if scored.folder is None:
            continue
        problem = problem_with(scored.folder)
        if problem is not None:
            notes.append(f"{scored.folder.name}: {problem}")
            continue
        if missed := missed_score(evaluated):
            notes.append(f"the best evaluation, of step {missed.step} ({missed}), has no checkpoint")
        return BestCheckpoint(folder=scored.folder, score=scored.score, notes=notes)
    return None


def missed_score(evaluated: list[ScoredStep]) -> Score | None:
    """Return the best score, where it is of a step without a checkpoint and better than that of each with one."""
    saved = next((one.score for one in evaluated if one.folder is not None), None)
    best = evaluated[0] if evaluated else None
    is_missed = best is not None and best.folder is None and best.score.is_better_than(saved)
    return best.score if best is not None and is_missed else None


def best_first(run: RunDir) -> list[ScoredStep]:
    """Return the evaluated steps of a run, the best first, and of equal ones the first. Those before a change of the
    reward, after which scores do not compare, are left out.
    """
    since = max(reward_changes(run.read_environment()), default=-1)
    scores: dict[int, Score] = {}
    for line in json_lines(run.metrics, [], containing=b'"eval/'):
        step = line["step"]
        score = score_of(line, step=step)
        if score is not None and step > since:
            scores[step] = score
    there = {checkpoint_step(folder): folder for folder in list_checkpoints(run.checkpoints)}
    ordered = sorted(scores.values(), key=lambda score: (-score.worth, score.step))
    return [ScoredStep(score, there.get(score.step)) for score in ordered]
