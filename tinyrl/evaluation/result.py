"""What `tinyrl eval` finds: each side's samples, what a trainer measures of it, how sides differ; and the JSON of it.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyrl.evaluation.evaluate import Evaluation
    from tinyrl.evaluation.statistics import PairedDifference, WinRate


@dataclass(frozen=True)
class TrainerMetrics:
    """What a trainer measures on held-out rows."""

    metrics: dict[str, Any]
    own_reference: bool = False  # rewards, margin, loss and accuracy are against where this model started

    def as_json(self) -> dict[str, Any]:
        reference = {"reference": "own"} if self.own_reference else {}
        return {**self.metrics, **reference}


@dataclass(frozen=True)
class Against:
    """How a policy differs from another one."""

    difference: PairedDifference
    win_rate: WinRate
    left_out: int  # held-out prompts that a policy was trained on

    def as_json(self) -> dict[str, Any]:
        difference = {**asdict(self.difference), "left_out": self.left_out}
        return {"difference": difference, "win_rate": asdict(self.win_rate)}


@dataclass(frozen=True)
class TrainedOn:
    """How many of the rows a run was trained on; None where its training rows cannot be read."""

    count: int | None


@dataclass(frozen=True)
class EvalSide:
    """One of the policies or reward models that are evaluated, with its name."""

    target: str
    sampled: Evaluation | None = None
    measured: TrainerMetrics | None = None
    against: Against | None = None  # the side that this one is compared with

    def as_json(self) -> dict[str, Any]:
        held_out = {} if self.measured is None else {"held_out": self.measured.as_json()}
        sampled = {} if self.sampled is None else self.sampled.as_json()
        against = {} if self.against is None else self.against.as_json()
        return {"target": self.target, **held_out, **sampled, **against}


@dataclass(frozen=True)
class TargetResult:
    """A target, alone or beside another side that it is compared with."""

    side: EvalSide
    other: EvalSide | None = None
    trained_on: TrainedOn | None = None  # of rows that the run does not hold out itself
    left_out: int | None = None  # held-out rows that a side was trained on, where sides are measured by a trainer

    @property
    def sides(self) -> list[EvalSide]:
        return [self.side] if self.other is None else [self.side, self.other]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of the target, with the other side in it; its keys come in the order of the work."""
        side = self.side
        beside = dict[str, Any]()
        if self.other is not None:
            beside["other"] = self.other.as_json()
        if self.trained_on is not None:
            beside["trained_on"] = self.trained_on.count
        out: dict[str, Any] = {"target": side.target}
        if side.sampled is not None:
            against = {} if side.against is None else side.against.as_json()
            out |= {**side.sampled.as_json(), **against, **beside}
        if side.measured is not None:
            out |= {"held_out": side.measured.as_json(), **beside}
        if self.left_out is not None:
            out["left_out"] = self.left_out
        return out


@dataclass(frozen=True)
class ComparisonResult:
    """Several policies, of which the first is the baseline: the others are compared with it."""

    sides: list[EvalSide]

    def as_json(self) -> list[dict[str, Any]]:
        return [side.as_json() for side in self.sides]
