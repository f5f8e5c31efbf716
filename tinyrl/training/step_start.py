"""Where a run stood when a step began, to which it goes back where a stop comes inside the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyrl.models.device import python_rng, restore_rng, rng_tensors
from tinyrl.training.run_state import RunState
from tinyrl.training.step import RoleOptimizer, load_optimizers, optimizer_tensors


@dataclass(frozen=True)
class RandomState:
    """The state of the generators of torch, of NumPy, and of `random`."""

    tensors: dict[str, Tensor]
    python: list[Any]

    @classmethod
    def now(cls) -> RandomState:
        return cls(rng_tensors(), python_rng())

    def restore(self) -> None:
        restore_rng(self.tensors, self.python)


@dataclass(frozen=True)
class TrainedCopy:
    """A copy, on the CPU, of the weights that are trained and of the optimizers' state."""

    weights: list[Tensor]
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, optimizers: dict[str, RoleOptimizer]) -> TrainedCopy:
        return cls(
            weights=[p.detach().to("cpu", copy=True) for p in trained(optimizers)],
            moments={key: tensor.to("cpu", copy=True) for key, tensor in optimizer_tensors(optimizers).items()},
        )

    @torch.no_grad()
    def put_back(self, optimizers: dict[str, RoleOptimizer]) -> None:
        """Restore what was copied."""
        for parameter, weight in zip(trained(optimizers), self.weights, strict=True):
            parameter.copy_(weight)
        load_optimizers(optimizers, self.moments)


@dataclass
class StepStart:
    """A snapshot of a run at the start of a step. records: bytes of metrics.jsonl and the like; trained: what an update
    under way has changed, None before one and where it is too large to copy.
    """

    state: RunState
    random: RandomState
    records: dict[str, int]
    trained: TrainedCopy | None = None


def trained(optimizers: dict[str, RoleOptimizer]) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of all roles that are trained."""
    return (p for role in optimizers.values() for p in role.parameters.values())
