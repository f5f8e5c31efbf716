"""The trial of faster paths on a GPU: once, at a run's first step with enough tokens, on that step's own micro-batch.

A path (models/kernels.py) is taken if log-probabilities and gradients in the run's dtype are as near to float32 as by
the path there is, and a micro-batch takes neither more time (the median of five) nor more memory. Never in float32 nor
under run.deterministic: the kernels add up in no fixed order. A checkpoint keeps the choice, with where it was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tinyrl.models.batch import Item
from tinyrl.models.checks import as_exact, in_float32
from tinyrl.models.device import (
    HALVES,
    MICRO_BATCH_TOKENS,
    Device,
    as_out_of_memory,
    device_name,
    reset_peak_memory,
    restore_torch_rng,
    torch_rng,
)
from tinyrl.models.kernels import TITLES, KernelName, Kernels, missing
from tinyrl.models.logprobs import token_logprobs
from tinyrl.models.policy import Policy
from tinyrl.process.errors import Stop
from tinyrl.text import first_line
from tinyrl.training.method import Pass
from tinyrl.training.step import Updater

REPEATS = 5  # of a micro-batch by each path, in turns, after a first one that compiles
LEAST_TOKENS = 128  # that are compared: of few, rounding alone can make one of two right paths 1.5 times as far off
SAMPLED_GRADIENTS = 1 << 24  # numbers of the gradient that are compared, at about as many places


# ---- the decision ----


@dataclass(frozen=True)
class PathMeasures:
    """A path on a micro-batch: by name its distances from float32, seconds of each repeat, and bytes at the peak."""

    gaps: dict[str, float]
    seconds: Sequence[float]
    peak: int


@dataclass(frozen=True)
class PathComparison:
    """The path as it is, and with one more part of it replaced."""

    today: PathMeasures
    new: PathMeasures

    @property
    def share_of_time(self) -> float:
        """Return the new path's median seconds as a share of today's."""
        return median(self.new.seconds) / median(self.today.seconds)

    @property
    def share_of_memory(self) -> float:
        return self.new.peak / self.today.peak


@dataclass(frozen=True)
class KernelChoice:
    """What is taken, and a line for each path that was tried."""

    kernels: Kernels
    notes: list[str]


def refusal(found: PathComparison) -> str | None:
    """Return why a new path is not taken; None where it is."""
    for name, gap in found.new.gaps.items():
        before = found.today.gaps[name]
        if not as_exact(gap, before):
            return f"its distance from float32 is {gap:.2g} {name}, where it was {before:.2g}"
    if found.share_of_time > 1.0:
        return f"a micro-batch takes {found.share_of_time:.3g} of the time"
    if found.share_of_memory > 1.0:
        return f"a micro-batch takes {found.share_of_memory:.3g} of the memory"
    return None


def choose(
    compare: Callable[[Kernels, Kernels], PathComparison], *, lacks: Callable[[KernelName], str | None]
) -> KernelChoice:
    """Try one path after the other, each beside what has been taken. compare: measures two; lacks: returns why a path
    cannot be tried. A path that raises, or runs out of memory, is not taken.
    """
    taken = Kernels()
    notes = []
    for name, title in TITLES.items():
        new = replace(taken, **{name: True})
        found = None
        why = lacks(name)
        if why is None:
            try:
                with as_out_of_memory():
                    found = compare(taken, new)
                why = refusal(found)
            except Stop:
                raise
            except Exception as error:  # noqa: BLE001 triton's have no base that exists without triton
                why = f"its trial ended in {type(error).__name__}: {first_line(error)}"
        if found is not None and why is None:
            taken = new
            cost = f"{found.share_of_time:.0%} of the time and {found.share_of_memory:.0%} of the memory"
            notes.append(f"training: {title}, for {cost} of a micro-batch")
        else:
            notes.append(f"training: not {title}: {why}")
    return KernelChoice(taken, notes)


def may_choose(device: Device) -> bool:
    """Return whether there is anything to try: not on a CPU, in float32, nor where runs are to give the same bits."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return device.device.type == "cuda" and device.dtype in HALVES and not deterministic


# ---- the trial ----


@dataclass(frozen=True)
class Numbers:
    """What two paths are compared by: log-probabilities of some tokens, and a sample of the gradient."""

    logprobs: Tensor
    gradient: Tensor

    def gaps(self, exact: Numbers) -> dict[str, float]:
        """Return the mean distance in nats, and that of the gradient as a share of its norm."""
        apart = (self.gradient - exact.gradient).norm() / exact.gradient.norm()
        return {
            "nats a token": float((self.logprobs - exact.logprobs).abs().mean()),
            "of the gradient's norm": float(apart),
        }


@contextmanager
def vectors_in_float32(model: nn.Module) -> Iterator[None]:
    """Widen gains and biases inside. A recomputed layer keeps them for backward as they are, where `in_float32` has put
    them back; of matrices it keeps views.
    """
    vectors = {p: p.data for p in model.parameters() if p.dim() == 1 and p.dtype in HALVES}
    for parameter in vectors:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, data in vectors.items():
            parameter.data = data


@dataclass(frozen=True)
class Cost:
    """Seconds of a micro-batch, and the bytes that it took at most."""

    seconds: float
    peak: int


class KernelTrial:
    """Chooses the policy's kernels. State: whether that is still open; the choice of a checkpoint from elsewhere."""

    def __init__(self, updater: Updater, *, setting: Literal["auto", "plain"]) -> None:
        self.updater = updater
        self.policy: Policy = updater.policy
        self.open = setting == "auto" and may_choose(self.policy.run_device)
        self._before: Kernels | None = None
        self._exact: Numbers | None = None  # while the trial lasts

    @property
    def chosen(self) -> Kernels | None:
        """Return the choice for a checkpoint; None while it is open."""
        return None if self.open else self.policy.kernels

    @property
    def place(self) -> str:
        """Return what the choice depends on: the device and torch."""
        return f"{device_name(self.policy.device)}, torch {torch.__version__}"

    def restore(self, kept: Kernels | None, *, place: str | None) -> list[str]:
        """Go on with the choice of a checkpoint where it was made on such a device; else the first step tries anew.
        Returns a line where passes are computed otherwise than at the checkpoint.
        """
        if kept is None:  # still open then, or of an earlier version
            return []
        same_place = place == self.policy.world.on_main(lambda: self.place)  # all ranks go on alike
        if self.open and same_place and all(missing(name) is None for name in kept.names):
            self.policy.kernels = kept
            self.open = False
            return []
        self._before = kept
        return [] if self.open else self._differences()

    def decide(self, passes: Sequence[Pass]) -> list[str]:
        """Choose by the passes of a step, where that is open, and leave no other trace; return lines for people. Rank 0
        chooses for all. The choice stays open after a step of few tokens.
        """
        if not self.open:
            return []
        found = self.policy.world.on_main(lambda: self._try(passes))
        if found is None:
            return []
        names, notes = found
        self.policy.kernels = Kernels(**dict.fromkeys(names, True))
        self.open = False
        return [*notes, *self._differences()]

    def _differences(self) -> list[str]:
        before = self._before
        if before is None or before == self.policy.kernels:
            return []
        now = self.policy.kernels.describe()
        return [f"warning: numbers may differ in their last digits: the checkpoint had {before.describe()}, now {now}"]

    def _try(self, passes: Sequence[Pass]) -> list[list[str]] | None:
        """Return the names of what is taken, and notes; None if there are too few tokens to compare."""
        items = self._compared_items(passes[0].items)
        if len(self.policy.batch_of(items).targets) < LEAST_TOKENS:
            return None
        start = torch_rng()
        widest = self.updater.widest(passes)
        try:
            choice = choose(lambda today, new: self._compare(today, new, widest, items), lacks=self._lacks)
        finally:
            self.policy.kernels = Kernels()
            self._exact = None
            self.updater.zero_grad()
            restore_torch_rng(start)
        return [[*choice.kernels.names], choice.notes]

    def _lacks(self, name: KernelName) -> str | None:
        if name == "varlen_attention" and not self.policy.packs:
            return "rows are padded"
        head = self.policy.head("policy")
        if name == "one_pass_logits" and (head.bias is not None or head.softcap is not None):
            return "the head has a bias or a soft-cap"
        return missing(name)

    def _compared_items(self, items: Sequence[Item]) -> list[Item]:
        """Choose the micro-batch with the most rows, so of shared prompts, among those of a few tokens."""
        lengths = self.policy.lengths(items)
        tokens = min(MICRO_BATCH_TOKENS["cuda"], self.policy.micro_batches.tokens)
        rows = max(lengths.plan(range(len(items)), max_tokens=tokens), key=len)
        return [items[row] for row in rows]

    def _compare(self, today: Kernels, new: Kernels, widest: Sequence[Pass], items: Sequence[Item]) -> PathComparison:
        """Measure two paths, in turns."""
        if self._exact is None:
            self.policy.kernels = Kernels()
            self._exact = self.numbers(items, exact=True)
        gaps: dict[Kernels, dict[str, float]] = {}
        costs: dict[Kernels, list[Cost]] = {today: [], new: []}
        for kernels in costs:
            self.policy.kernels = kernels
            gaps[kernels] = self.numbers(items, exact=False).gaps(self._exact)
            self._cost(kernels, widest)  # which compiles
        for _ in range(REPEATS):
            for kernels, found in costs.items():
                found.append(self._cost(kernels, widest))

        def measured(kernels: Kernels) -> PathMeasures:
            found = costs[kernels]
            seconds = [cost.seconds for cost in found]
            return PathMeasures(gaps[kernels], seconds, peak=max(cost.peak for cost in found))

        return PathComparison(measured(today), measured(new))

    def numbers(self, items: Sequence[Item], *, exact: bool) -> Numbers:
        """Compute log-probabilities of items, and the gradient of a weighted sum of them, without dropout. exact: in
        float32, by the library's layers, recomputed in backward so that one at a time is widened.
        """
        policy = self.policy
        self.updater.zero_grad()
        with torch.no_grad(), policy.acting("policy") as model, torch.enable_grad(), ExitStack() as how:
            head = policy.head("policy")
            if exact or policy.config.model.gradient_checkpointing:
                how.enter_context(policy.gradient_checkpointing())
            if exact:
                how.enter_context(saved_tensors_hooks(Tensor.detach, lambda saved: saved))  # for weights that go back
                how.enter_context(vectors_in_float32(model))
                how.enter_context(in_float32(model))
                head = replace(head, weight=head.weight.float())
            else:
                how.enter_context(policy.run_device.autocast())
            batch = policy.batch_of(items)
            one_pass = policy.kernels.one_pass_logits
            states = policy.states("policy", batch)
            logprobs, _ = token_logprobs(states, head, targets=batch.targets, temperature=1.0, one_pass=one_pass)
            weights = torch.arange(len(logprobs), device=logprobs.device).cos()
            (weights * logprobs).sum().backward()
        found = [p.grad for p in policy.parameters["policy"].values() if p.grad is not None]
        every = max(1, sum(grad.numel() for grad in found) // SAMPLED_GRADIENTS)
        gradient = torch.cat([grad.flatten()[::every].float().cpu() for grad in found])
        self.updater.zero_grad()
        return Numbers(logprobs.detach().cpu(), gradient)

    def _cost(self, kernels: Kernels, widest: Sequence[Pass]) -> Cost:
        """Measure the passes once without a gradient, as before an update, and once with it."""
        policy = self.policy
        policy.kernels = kernels
        self.updater.zero_grad()
        allocated = torch.cuda.memory_allocated(policy.device)
        reset_peak_memory(policy.device)
        torch.cuda.synchronize(policy.device)
        start = time.perf_counter()
        for one in widest:
            rows = [*range(len(one.items))]
            with torch.no_grad():
                self.updater.gradient(one, rows)
            self.updater.gradient(one, rows)
        torch.cuda.synchronize(policy.device)
        seconds = time.perf_counter() - start
        return Cost(seconds, torch.cuda.max_memory_allocated(policy.device) - allocated)
