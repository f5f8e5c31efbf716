"""Where a run stands after a step, and state.json of a checkpoint, which holds that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from tinyrl.models.kernels import Kernels
from tinyrl.runs.best import Gains, Score

STATE = "state.json"


class SourceFile(BaseModel):
    """A file that a run has read; module: as user code has imported it."""

    bytes: int
    modified: int  # nanoseconds
    sha256: str
    module: str | None = None


class InputHashes(BaseModel):
    """Hashes of a run's inputs. rows: hashes of "training" and "held-out"; files: by "setting: file"; unread: why those
    have no hash that went after they were loaded; functions: fingerprints of those that a notebook or script defined,
    by "setting: use".
    """

    rows: dict[str, str] = {}
    files: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    functions: dict[str, str] = {}
    versions: dict[str, str] = {}


class Controllers(BaseModel):
    """State of the methods between steps."""

    kl_coef: float | None = None  # PPO's weight of the KL, which may adapt
    pass_rates: dict[str, list[float]] = {}  # of rows by fingerprint: completions right, wrong, in which step
    failing_batches: int = 0  # in a row, whose rewards failed
    flat_steps: int = 0  # without a gradient of the policy
    unrewarded_steps: int = 0  # without a sample that has a reward
    inexact_sampling: bool = False  # measured, though the engine's numbers should be those of training


class RunState(BaseModel):
    """The state of a run after `step` finished steps. phase: what comes next, the evaluation after that step (of step
    0: before training), whose other metrics are `values`, or the next step's rollout. seconds: by phase, and in all as
    "total", of a step whose evaluation is still to come; peak_gb: its peak memory. gains: of the evaluations; best: the
    best score of a step that has a checkpoint.
    """

    step: int = 0
    phase: Literal["evaluation", "rollout"] = "evaluation"
    values: dict[str, int | float | None] = {}
    seconds: dict[str, float] = {}
    peak_gb: float = 0.0
    controllers: Controllers = Controllers()
    gains: Gains = Gains()
    best: Score | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: dict[str, Any] = {}


class CheckpointState(BaseModel):
    """state.json: the run's state, and what it was a function of or depends on for an exact resume."""

    run: RunState
    micro_batch_tokens: int
    micro_batch_device: str | None = None  # that the budget fits; None: not written by an earlier version
    max_rows: PositiveInt | None = None  # that are sampled at a time on that device
    engine: str | None = None  # that sampled; None: the method does not sample, or not written by an earlier version
    kernels: Kernels | None = None  # None: not chosen yet, or not written by an earlier version
    kernels_place: str | None = None  # device and torch of that choice
    sources: InputHashes
    config: dict[str, Any]
    given: dict[str, Any] | None = None  # None: by a run of an earlier version, which did not keep it
    records: dict[str, NonNegativeInt]  # bytes of metrics.jsonl and the like
    python_random: list[Any]
    judge_requests: dict[str, NonNegativeInt] = {}  # that the run has made, by the judge's name among the rewards

    @classmethod
    def read(cls, folder: Path) -> CheckpointState:
        """Read state.json of a checkpoint. Raises ValueError, naming the field, for one that is not of ours."""
        try:
            return cls.model_validate_json((folder / STATE).read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"{folder / STATE} is not what this tinyrl writes: {place}: {first['msg']}") from None

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(self.model_dump(), indent=1), encoding="utf-8")
