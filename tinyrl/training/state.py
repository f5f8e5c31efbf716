"""The state of a run between two optimizer steps, and state.json of a checkpoint, which is checked when read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinyrl.text import first_line

STATE = "state.json"
Phase = Literal["evaluation", "rollout", "update"]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Best(_Strict):
    """The best held-out result so far."""

    step: Count
    value: Finite


class Controllers(_Strict):
    """What methods carry from step to step."""

    kl_coef: Finite | None = None  # PPO's weight of the KL, which may adapt
    exact_sampling: bool | None = None  # sampling log-probabilities are training's; None: not measured yet
    failing_batches: Count = 0  # in a row, whose rewards failed
    flat_steps: Count = 0  # whose advantages were all 0


class RunState(_Strict):
    """What changes as a run goes on.

    step counts finished steps; phase is what is going on in the next one ("evaluation" of step 0: the held-out score
    before training); epoch and minibatch are those of an update. values and sums are the metrics of the step in hand.
    """

    step: Count = 0
    phase: Phase = "evaluation"
    epoch: Count = 0
    minibatch: Count = 0
    values: dict[str, Any] = Field(default_factory=dict)
    sums: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    controllers: Controllers = Field(default_factory=Controllers)
    completions: Count = 0
    tokens: Count = 0
    best: Best | None = None
    skipped: Count = 0
    skipped_in_a_row: Count = 0

    @property
    def first_update(self) -> bool:
        """Whether no optimizer step has used the rollout in hand."""
        return self.epoch == self.minibatch == 0


class CheckpointState(_Strict):
    """state.json: the run's state, and what it was a function of or depends on for an exact resume."""

    run: RunState
    micro_batch_tokens: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)]
    data: str  # fingerprint of the training rows
    config: dict[str, Any]
    records: dict[str, Count]  # bytes of metrics.jsonl and the like
    python_random: list[Any]

    def write(self, folder: Path) -> None:
        """Write state.json into a checkpoint folder."""
        (folder / STATE).write_text(json.dumps(self.model_dump(), indent=1), encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """state.json of a checkpoint. Raises ValueError, with the first thing that is wrong, for one that is not ours."""
    try:
        return CheckpointState.model_validate(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    raise ValueError(f"{folder / STATE} is not what this tinyrl writes: {problem}")
