"""A training method as a run sees it: its loop, its numbers on held-out rows, what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from tinyrl.models.batch import Batch, Item

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.evaluation.evaluate import Evaluation
    from tinyrl.models.policy import Policy, Role
    from tinyrl.training.run import Run
    from tinyrl.workers.calls import WorkerFunction


class Pass(NamedTuple):
    """A forward and backward pass of a role: the loss of each micro-batch of items, divided by counts of all of them.
    last_tokens: compute the state of each row's last token too, for scores.
    """

    role: Role
    items: Sequence[Item]
    loss: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]  # (loss, metrics that add up)
    last_tokens: bool = False


class Method:
    """Base of the methods. config: with the number of steps that run.epochs gives.

    The models' libraries are imported where they are used, so that importing a method is importing its algorithm.
    """

    row_fingerprints: dict[str, str]  # of both splits

    def __init__(self, policy: Policy, config: Config) -> None:
        self.policy = policy
        self.config = config
        self.world = policy.world

    @property
    def engine_name(self) -> str | None:
        """Return the name of the sampling engine, if the method samples."""
        return None

    def train(self, run: Run) -> None:
        raise NotImplementedError

    def trial_passes(self, items: Sequence[Item]) -> list[Pass]:
        """Return passes over items with the tensors of an update's, to measure memory by; of their losses only the
        gradients' sizes matter.
        """
        return [Pass("policy", items, self.trial_loss)]

    def trial_loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the log-probabilities of a micro-batch; the policy must be acting."""
        return self.policy.logprobs("policy", batch, temperature=1.0)[0].sum(), {}

    def evaluate(self) -> Evaluation:
        """Measure on the first run.eval_prompts held-out rows."""
        raise NotImplementedError

    @property
    def rows_of_epoch(self) -> tuple[int, int]:
        """Return (training rows, rows of a step)."""
        raise NotImplementedError

    def epoch_note(self) -> str:
        """Return a line with the steps of an epoch, and of the run where run.epochs gives them."""
        rows, of_step = self.rows_of_epoch
        run = self.config.run
        note = f"an epoch is {rows / of_step:.4g} steps: {rows:,} training rows, {of_step:,} of them a step"
        return note if run.epochs is None else f"{note}; run.epochs={run.epochs:g} is {run.num_steps:,} steps"

    def check(self) -> list[str]:
        """Check what can only be checked now, before step 1; returns lines worth showing."""
        return []

    def check_end(self, run: Run) -> None:
        """Raise GuardStop where a run that is at its end has learnt nothing."""

    def save(self, folder: Path) -> None:
        from tinyrl.models.policy_files import save_policy

        save_policy(self.policy, folder)

    def save_without_weights(self, folder: Path) -> None:
        """Write what `save` writes besides tensors."""
        from tinyrl.models.policy_files import save_policy_without_weights

        save_policy_without_weights(self.policy, folder)

    def load(self, folder: Path) -> None:
        from tinyrl.models.policy_files import restore_policy

        restore_policy(self.policy, folder)

    def judge_requests(self) -> dict[str, int]:
        """Return the requests made so far of each judge, by its name among the rewards."""
        return {}

    def add_judge_requests(self, before: dict[str, int]) -> None:
        """Count those that earlier processes of the run have made of its judges."""

    def forget(self) -> None:
        """Discard what was computed from rows or frozen models, which are others now."""

    @property
    def max_rows(self) -> int | None:
        """Return how many completions are sampled at a time at most, which memory may have halved; None: all, or none
        are sampled.
        """
        return None

    def restore_max_rows(self, rows: int) -> None:
        """Go on with the limit of a checkpoint from this device."""

    def describe_memory(self) -> str:
        from tinyrl.models.memory import describe_memory

        return describe_memory(self.policy)

    def keep_output(self, write: Callable[[str], None]) -> None:
        """Hand what reward functions print to `write`, in whole lines, from now on."""

    @property
    def workers(self) -> list[WorkerFunction]:
        """Return the workers of user code that it calls."""
        return []

    def start_code(self) -> None:
        """Load user code that this process calls."""

    def close(self) -> None:
        """End helper processes."""
