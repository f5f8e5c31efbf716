"""What a step learns from: its samples, and the numbers that a loss reads of each of their tokens.

Axis letters: B samples of a step, b of a micro-batch, T longest response. x[:, t] is of response token t, 0 where there
is none. To add an input of a loss: a field of `LossInputs`, the trainer that sets it, the loss that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tinyrl.generation.sample import Sample
from tinyrl.models.batch import Batch
from tinyrl.models.device import to_device
from tinyrl.models.logprobs import Teaching


@dataclass(frozen=True)
class LossInputs:
    """What a loss reads of each response token: (B, T) of the samples of a step, (b, T) of those of a micro-batch.

    None: this run does not need it. mask is bool, the others are float32 without gradient; log-probabilities are in
    nats.
    """

    mask: Tensor  # tokens in the loss
    sampled: Tensor  # log-probabilities as recorded while sampling
    advantage: Tensor
    old: Tensor | None = None  # log-probabilities under the policy before the update: the ratio's denominator
    reference: Tensor | None = None  # log-probabilities under the reference
    values: Tensor | None = None  # of the critic before the update
    returns: Tensor | None = None  # that the critic is to predict

    def rows(self, rows: Sequence[int]) -> LossInputs:
        """Return those of some of the samples."""
        chosen = [*rows]
        return self._each(lambda x: x[chosen])

    def of(self, batch: Batch) -> LossInputs:
        """Return those of a micro-batch of these samples (b, T), T being its longest response, on its device."""
        rows = [*batch.rows]
        device = batch.input_ids.device
        return self._each(lambda x: to_device(x[rows, : batch.num_columns], device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> LossInputs:
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return LossInputs(
            mask=change(self.mask),
            sampled=change(self.sampled),
            advantage=change(self.advantage),
            old=changed(self.old),
            reference=changed(self.reference),
            values=changed(self.values),
            returns=changed(self.returns),
        )


@dataclass(frozen=True)
class TeacherOutputs:
    """What a teacher says of samples: log-probabilities (B, T) of their tokens in the loss; the distributions at these,
    for each sample; and which samples it has scored (`taught`), having had a text of `teacher.hint` for them.
    """

    logprobs: Tensor
    distributions: list[Teaching]
    taught: list[bool]

    def rows(self, rows: Sequence[int]) -> TeacherOutputs:
        """Return those of some of the samples."""
        return TeacherOutputs(
            logprobs=self.logprobs[[*rows]],
            distributions=[self.distributions[row] for row in rows],
            taught=[self.taught[row] for row in rows],
        )


@dataclass(frozen=True)
class Experience:
    """The samples of a step or of a minibatch, the inputs of their loss, and the outputs of a teacher, if any."""

    samples: list[Sample]
    inputs: LossInputs
    teacher: TeacherOutputs | None = None

    def rows(self, rows: Sequence[int]) -> Experience:
        """Return some of the samples: a minibatch."""
        return Experience(
            samples=[self.samples[row] for row in rows],
            inputs=self.inputs.rows(rows),
            teacher=None if self.teacher is None else self.teacher.rows(rows),
        )

    def plain(self) -> list[dict[str, Any]]:
        """Convert to JSON, for the record of a batch that is not finite."""
        inputs = self.inputs
        columns = {
            "advantage": inputs.advantage,
            "old": inputs.old,
            "ref": inputs.reference,
            "values": inputs.values,
            "returns": inputs.returns,
            "teacher": None if self.teacher is None else self.teacher.logprobs,
        }
        lines = list[dict[str, Any]]()
        for row, sample in enumerate(self.samples):
            length = len(sample.response)
            numbers = {name: None if x is None else x[row, :length].tolist() for name, x in columns.items()}
            lines.append(sample.plain() | numbers)
        return lines
