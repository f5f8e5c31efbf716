"""Which training prompts a step takes: in epochs, by sources, without solved ones, or those that teach most.

Prompts all of whose last responses were right are left out for a while under task.skip_solved: a group without spread
teaches nothing, and one that is all right will mostly be so again, so its prompt gives its place in the next epochs to
others, and is then tried again. Skywork-OR1 (2505.22312) and others drop such prompts for good. One that is all wrong
is kept: it comes once an epoch as before, and more often the more prompts are solved.

task.sampler=difficulty goes by what a prompt is expected to teach. The gradient of a group is in proportion to its
spread, for rewards of 0 and 1 the p (1 - p) of its pass rate, which is largest at a half (2506.05316; GRESO,
2506.02177, skips prompts for the same reason).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinyrl.config.schema import Config
from tinyrl.config.sections import SourceConfig, TaskConfig
from tinyrl.data.rows import PASS_RATE, batch_indices, replaced_indices, row_key, weighted_indices
from tinyrl.tasks.prompts import PreparedPrompt, rows_by_source
from tinyrl.training.state import Controllers

PROBED = 4.0  # completions that a probed rate counts for
PRIOR = 0.1  # of right and of wrong ones, before any is seen: most prompts are always right, or always wrong


class Choice:
    """Which places in the list of training prompts each step takes. What it goes by changes only in `keep`."""

    def draw(self, step: int) -> list[int]:
        """The places of a step's prompts; a function of (seed, step) and of what was kept."""
        raise NotImplementedError

    def skipped(self, step: int) -> set[int]:
        """Places that no step may take now."""
        return set()

    def look(self, prompts: list[PreparedPrompt], rewards: Tensor) -> None:
        """Note the rewards of a group for each of `prompts`, one after another; NaN: none."""

    def keep(self, step: int) -> dict[str, float]:
        """Put what a step showed on record, once its sampling is done; its metrics."""
        return {}


def choice_of(config: Config, prompts: list[PreparedPrompt], controllers: Controllers) -> Choice:
    """What the configuration says, going on with what a run's `controllers` have on record."""
    task, count, seed = config.task, config.on_policy.num_prompts, config.run.seed
    if task.sources:
        return SourceShares(task.sources, prompts, num_prompts=count, seed=seed)
    if task.sampler == "difficulty":
        return PassRates(task, prompts, num_prompts=count, seed=seed, record=controllers.pass_rates)
    return SolvedPrompts(task, prompts, num_prompts=count, seed=seed, record=controllers.solved)


@dataclass
class SourceShares(Choice):
    """Each source's share of every step."""

    sources: list[SourceConfig]
    prompts: list[PreparedPrompt]
    num_prompts: int
    seed: int

    def draw(self, step: int) -> list[int]:
        by_source = rows_by_source(self.prompts)
        shares = [(source.weight, by_source.get(source.label, [])) for source in self.sources]
        return weighted_indices(self.seed, step, num_prompts=self.num_prompts, sources=shares)


@dataclass
class PassRates(Choice):
    """Prompts by the pass rate that they are believed to have. `record` is the run's state: of rows by fingerprint how
    many completions were right and wrong, and the step that was; older ones count for less, as the policy moves.

    Of a step's prompts the share task.sampler_uniform comes from shuffled epochs, so that every prompt is tried again.
    The others are drawn without replacement in proportion to the expectation of p (1 - p) under Beta(right + PRIOR,
    wrong + PRIOR), that is a b / (n (n + 1)) of its two numbers and their sum; one that was never seen in proportion to
    the mean of those that were.
    """

    task: TaskConfig
    prompts: list[PreparedPrompt]
    num_prompts: int
    seed: int
    record: dict[str, list[float]]
    keys: list[str] = field(init=False)
    seen: dict[str, tuple[float, float]] = field(init=False, default_factory=dict)  # in this step

    def __post_init__(self) -> None:
        self.keys = [row_key(p.row) for p in self.prompts]
        rates = [p.row.get(PASS_RATE) for p in self.prompts]
        known = [float(r) if isinstance(r, int | float) and 0 <= r <= 1 else None for r in rates]
        right = [0.0 if rate is None else PROBED * rate for rate in known]
        wrong = [0.0 if rate is None else PROBED * (1 - rate) for rate in known]
        self._probed = np.array([right, wrong])

    def _known(self, key: str, step: int) -> tuple[float, float]:
        """What counts in a step of the completions of a row that were right and wrong."""
        right, wrong, when = self.record.get(key, (0.0, 0.0, 0))
        still = 0.5 ** (max(0, step - when) / self.task.sampler_half_life)
        return still * right, still * wrong

    def worth(self, step: int) -> np.ndarray:
        """What each prompt is expected to teach, E[p (1 - p)]; one that was never seen: the mean of those that were."""
        right, wrong = self._probed + PRIOR
        for i, key in enumerate(self.keys):
            if key in self.record:
                was_right, was_wrong = self._known(key, step)
                right[i], wrong[i] = PRIOR + was_right, PRIOR + was_wrong
        n = right + wrong
        worth = right * wrong / (n * (n + 1))
        seen = (self._probed.sum(0) > 0) | np.array([key in self.record for key in self.keys])
        return np.where(seen, worth, worth[seen].mean() if seen.any() else 1.0)

    def draw(self, step: int) -> list[int]:
        count, total = self.num_prompts, len(self.prompts)
        uniform = count if total <= count else round(count * self.task.sampler_uniform)
        places = batch_indices(self.seed, step, num_prompts=uniform, num_rows=total)
        key = hashlib.sha256(f"difficulty {self.seed} {step}".encode()).digest()
        # the largest of u^(1/w) are a draw without replacement by weights w (Efraimidis and Spirakis, 2006)
        score = np.log(np.random.Generator(np.random.PCG64(int.from_bytes(key[:16]))).random(total)) / self.worth(step)
        score[places] = -np.inf
        return [*places, *(int(i) for i in np.argsort(-score, kind="stable")[: count - uniform])]

    def look(self, prompts: list[PreparedPrompt], rewards: Tensor) -> None:
        rewards = rewards.reshape(len(prompts), -1)
        right = (rewards >= self.task.solved_reward).sum(1).tolist()
        tried = (~rewards.isnan()).sum(1).tolist()
        for prompt, won, of in zip(prompts, right, tried, strict=True):
            key = row_key(prompt.row)
            before = self.seen.get(key, (0.0, 0.0))
            self.seen[key] = (before[0] + won, before[1] + of - won)

    def keep(self, step: int) -> dict[str, float]:
        for key, (right, wrong) in self.seen.items():
            was_right, was_wrong = self._known(key, step)
            self.record[key] = [was_right + right, was_wrong + wrong, step]
        self.seen = {}
        return {"reward/known_prompts": float(len(self.record))}


@dataclass
class SolvedPrompts(Choice):
    """Which of the training prompts are left out. `record` is the run's state: rows by fingerprint, so that it fits
    data that has changed, and the epoch in which each was solved. It changes only at the end of a step's sampling.
    """

    task: TaskConfig
    prompts: list[PreparedPrompt]
    num_prompts: int
    seed: int
    record: dict[str, int]
    keys: list[str] = field(init=False)  # of each prompt
    groups: dict[str, bool] = field(init=False, default_factory=dict)  # of this step: whether all of them were right

    def __post_init__(self) -> None:
        self.keys = [row_key(p.row) for p in self.prompts] if self.task.skip_solved else []

    def epoch(self, step: int) -> int:
        return step * self.num_prompts // len(self.prompts)

    def skipped(self, step: int) -> set[int]:
        """Places in the list of prompts that are left out in a step."""
        now = self.epoch(step)  # a record of a later one is from before the data or grpo.num_prompts changed
        since = now - self.task.skip_solved
        return {i for i, key in enumerate(self.keys) if key in self.record and since <= self.record[key] <= now}

    def replace(self, places: list[int], step: int) -> list[int]:
        """The prompts of a step, others in the place of those left out; these stay where nothing else is left."""
        self.groups = {}
        key = f"unsolved {self.seed} {step}"
        return replaced_indices(places, skipped=self.skipped(step), key=key, num_rows=len(self.prompts))

    def draw(self, step: int) -> list[int]:
        places = batch_indices(self.seed, step, num_prompts=self.num_prompts, num_rows=len(self.prompts))
        return self.replace(places, step)

    def look(self, prompts: list[PreparedPrompt], rewards: Tensor) -> None:
        """Note which groups of a rollout are all right; of a prompt with several, all must be."""
        if not self.task.skip_solved:
            return
        rewards = rewards.reshape(len(prompts), -1)
        right = (rewards >= self.task.solved_reward) | rewards.isnan()
        solved = right.all(1) & ~rewards.isnan().all(1)
        for prompt, all_right in zip(prompts, solved.tolist(), strict=True):
            key = row_key(prompt.row)
            self.groups[key] = all_right and self.groups.get(key, True)

    def keep(self, step: int) -> dict[str, float]:
        """Put what the step's groups showed on record; the metrics of the step."""
        if not self.task.skip_solved:
            return {}
        skipped = len(self.skipped(step))
        for key, all_right in self.groups.items():
            if all_right:
                self.record[key] = self.epoch(step)
            else:
                self.record.pop(key, None)
        return {"reward/skipped_prompts": float(skipped)}
