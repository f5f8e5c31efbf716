"""The state of a run between two optimizer steps, and state.json of a checkpoint, which is checked when read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tinyrl.runs.checkpoint import checkpoint_step
from tinyrl.text import first_line, shortened
from tinyrl.training.sources import Sources

STATE = "state.json"
Phase = Literal["evaluation", "rollout", "update"]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = int | float | None
MOST_THREADS = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Best(_Strict):
    """The best held-out result so far."""

    step: Count
    value: Finite


class Controllers(_Strict):
    """What methods carry from step to step."""

    kl_coef: Annotated[Finite, Field(ge=0)] | None = None  # PPO's weight of the KL, which may adapt
    exact_sampling: bool | None = None  # sampling log-probabilities are training's; None: not measured yet
    entropy_coef: Annotated[Finite, Field(ge=0)] | None = None  # weight of the entropy bonus, where it is steered
    entropy: Finite | None = None  # of a token in the step before; None: not measured yet
    solved: dict[str, Count] = Field(default_factory=dict)  # rows by fingerprint, and the epoch they were solved in
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
    values: dict[str, Number] = Field(default_factory=dict)
    sums: dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    controllers: Controllers = Field(default_factory=Controllers)
    completions: Count = 0
    tokens: Count = 0
    best: Best | None = None
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    loss_scale: dict[str, Count | Annotated[Finite, Field(gt=0)]] = Field(default_factory=dict)

    @field_validator("loss_scale")
    @classmethod
    def _is_of_a_scaler(cls, state: dict[str, Any]) -> dict[str, Any]:
        if state and (state.keys() != torch.amp.GradScaler("cpu").state_dict().keys() or not state["scale"]):
            raise ValueError("is no state of a torch.amp.GradScaler")
        return state

    @property
    def first_update(self) -> bool:
        """Whether no optimizer step has used the rollout in hand."""
        return self.epoch == self.minibatch == 0


class CheckpointState(_Strict):
    """state.json: the run's state, and what it was a function of or depends on for an exact resume."""

    run: RunState
    micro_batch_tokens: Annotated[Count, Field(ge=1)]
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)]
    sources: Sources = Field(default_factory=Sources)
    config: dict[str, Any]
    records: dict[str, Count]  # bytes of metrics.jsonl and the like
    python_random: list[Any]

    @field_validator("python_random")
    @classmethod
    def _is_a_state(cls, state: list[Any]) -> list[Any]:
        try:
            kind, numbers, gauss = state
            random.Random().setstate((kind, tuple(numbers), gauss))
        except (ValueError, TypeError, OverflowError):
            raise ValueError("is no state of Python's generator") from None
        return state

    @field_validator("config")
    @classmethod
    def _is_a_configuration(cls, config: dict[str, Any]) -> dict[str, Any]:
        for name, section in config.items():
            if not isinstance(section, str if name == "method" else dict):
                raise ValueError(f"{shortened(name)} is {shortened(repr(section))}")
        if "method" not in config:
            raise ValueError("no method")
        return config

    def setting(self, section: str, name: str) -> Any:
        """A setting of the configuration; None where the version that wrote it had none."""
        return self.config.get(section, {}).get(name)

    @property
    def num_steps(self) -> int | None:
        """How many steps the run was to have; None where that was not written down."""
        steps = self.setting("run", "num_steps")
        return steps if isinstance(steps, int) else None

    @model_validator(mode="before")
    @classmethod
    def _former_fields(cls, state: Any) -> Any:
        """Earlier versions wrote down the training rows only."""
        if isinstance(state, dict) and "data" in state and "sources" not in state:
            rows = {"training": state["data"]}
            return {name: value for name, value in state.items() if name != "data"} | {"sources": {"rows": rows}}
        return state

    def write(self, folder: Path) -> None:
        """Write state.json into a checkpoint folder."""
        (folder / STATE).write_text(json.dumps(self.model_dump(), indent=1), encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """state.json of a checkpoint. Raises ValueError, with the first thing that is wrong, for one that is not ours."""
    try:
        state = CheckpointState.model_validate(json.loads((folder / STATE).read_text(encoding="utf-8")))
        if state.run.step == checkpoint_step(folder):
            return state
        problem = f"run.step: {state.run.step}, in {folder.name}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = first_line(error)
    raise ValueError(f"{folder / STATE} is not what this tinyrl writes: {problem}")
