"""How far a run is, for reward functions that ask: `step` and `num_steps`, or TRL's `trainer_state`.

Imported in the worker and in the run: only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TRAINER_STATE = "trainer_state"


@dataclass(frozen=True)
class TrainerState:
    """What is known here of the state that TRL hands to rewards: optimizer steps of transformers' trainer are steps of
    a run. Raises AttributeError for its other attributes.
    """

    global_step: int  # steps that are complete
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{TRAINER_STATE} has global_step and max_steps here, and not {name!r}")


@dataclass(frozen=True)
class Progress:
    """The step of a batch, from 1 as metrics.jsonl counts, and how many steps are complete. What no step trains on (an
    evaluation, a check, a chat) is scored as at the end of the run, so that evaluations compare.
    """

    step: int
    num_steps: int
    completed: int

    @classmethod
    def at(cls, step: int | None, num_steps: int) -> Progress:
        """Return the progress in a training step, from 0; None, and a step beyond the last one, is the end."""
        if step is None or step >= num_steps:
            return cls(step=num_steps, num_steps=num_steps, completed=num_steps)
        return cls(step=step + 1, num_steps=num_steps, completed=step)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that a reward function may ask for, in JSON."""
        state = TrainerState(global_step=self.completed, max_steps=self.num_steps)
        return {"step": self.step, "num_steps": self.num_steps, TRAINER_STATE: asdict(state)}


def revived(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that came as JSON as a function gets them: trainer_state is an object."""
    return {name: TrainerState(**value) if name == TRAINER_STATE else value for name, value in shared.items()}
