"""Prompt samplers: in shuffled epochs, or by difficulty.

task.sampler=difficulty goes by what a prompt is expected to teach. The gradient of a group is in proportion to its
spread, for rewards of 0 and 1 the p (1 - p) of its pass rate, which is largest at a half (2506.05316; GRESO,
2506.02177, skips prompts for the same reason).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from tinyrl.data.rows import PASS_RATE, batch_indices, row_key, solved_from

if TYPE_CHECKING:
    from tinyrl.tasks.prompts import PreparedPrompt

UNIFORM = 0.1  # share of a step's prompts that comes in epochs
HALF_LIFE = 200.0  # steps after which what was seen counts half
PROBED = 4.0  # completions, the weight of a pass rate that the data has for a prompt
PRIOR = 0.1  # of right and of wrong ones, before any is seen: most prompts are always right, or always wrong

PassRecord = dict[str, list[float]]  # of rows by fingerprint: completions right, wrong, in which step


@dataclass
class PromptSampler:
    """Draw the training prompts of each step, in shuffled epochs, and count each one's completions in a step.

    record: pass rates in the state of the run, which only `drain` changes; counts: of each prompt in a step, by index,
    its row's fingerprint, completions with a reward, right ones.
    """

    prompts: list[PreparedPrompt]
    num_prompts: int
    seed: int
    solved_reward: float
    counts: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def draw(self, step: int, record: PassRecord) -> list[int]:
        """Return the places of a step's prompts; a function of (seed, step) and the record."""
        return batch_indices(self.seed, step, num_prompts=self.num_prompts, num_rows=len(self.prompts))

    def update(self, prompts: list[PreparedPrompt], rewards: Tensor) -> None:
        """Add a group of rewards for each of `prompts`, one after another; NaN: none."""
        rewards = rewards.reshape(len(prompts), -1)
        tried = (~rewards.isnan()).sum(1).tolist()
        right = (rewards >= solved_from(self.solved_reward)).sum(1).tolist()
        for prompt, n, won in zip(prompts, tried, right, strict=True):
            _, before, before_right = self.counts.get(prompt.index, ("", 0, 0))
            self.counts[prompt.index] = (row_key(prompt.row), before + n, before_right + won)

    def drain(self, step: int, record: PassRecord) -> tuple[list[list[Any]], dict[str, float]]:
        """Reset the counts; return them for a line of prompts.jsonl, by index, and metrics."""
        counts = self.counts
        self.counts = {}
        return [[index, *counts[index]] for index in sorted(counts)], {}


class PassRates(PromptSampler):
    """Sample prompts by estimated pass rate. Older completions in the record count for less, as the policy moves.

    Of a step's prompts the share UNIFORM comes from shuffled epochs, so that every prompt is tried again.
    The others are drawn without replacement in proportion to the expectation of p (1 - p) under Beta(right + PRIOR,
    wrong + PRIOR), that is a b / (n (n + 1)) of its two numbers and their sum; one that was never seen in proportion to
    the mean of those that were.
    """

    @cached_property
    def keys(self) -> list[str]:
        return [row_key(p.row) for p in self.prompts]

    @cached_property
    def _probed(self) -> np.ndarray:
        """(2, rows) completions that were right and wrong before the run, by the rows' own rates."""
        rates = [p.row.get(PASS_RATE) for p in self.prompts]
        known = [float(r) if isinstance(r, int | float) and 0 <= r <= 1 else None for r in rates]
        return np.array([(0.0, 0.0) if r is None else (PROBED * r, PROBED * (1 - r)) for r in known]).T

    def _known(self, key: str, step: int, record: PassRecord) -> tuple[float, float]:
        """Return a row's right and wrong completions, discounted by their age at `step`."""
        right, wrong, when = record.get(key, (0.0, 0.0, 0))
        still = 0.5 ** (max(0, step - when) / HALF_LIFE)
        return still * right, still * wrong

    def worth(self, step: int, record: PassRecord) -> np.ndarray:
        """Return E[p (1 - p)] of each prompt; for one that was never sampled, the mean of those that were."""
        right, wrong = self._probed + PRIOR
        for i, key in enumerate(self.keys):
            if key in record:
                was_right, was_wrong = self._known(key, step, record)
                right[i] = PRIOR + was_right
                wrong[i] = PRIOR + was_wrong
        n = right + wrong
        worth = right * wrong / (n * (n + 1))
        seen = (self._probed.sum(0) > 0) | np.array([key in record for key in self.keys])
        return np.where(seen, worth, worth[seen].mean() if seen.any() else 1.0)

    def draw(self, step: int, record: PassRecord) -> list[int]:
        count = self.num_prompts
        total = len(self.prompts)
        uniform = count if total <= count else round(count * UNIFORM)
        places = batch_indices(self.seed, step, num_prompts=uniform, num_rows=total)
        key = hashlib.sha256(f"difficulty {self.seed} {step}".encode()).digest()
        # the largest of u^(1/w) are a draw without replacement by weights w (Efraimidis and Spirakis, 2006)
        u = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16]))).random(total)
        score = np.log(u) / self.worth(step, record)
        score[places] = -np.inf
        return [*places, *(int(i) for i in np.argsort(-score, kind="stable")[: count - uniform])]

    def drain(self, step: int, record: PassRecord) -> tuple[list[list[Any]], dict[str, float]]:
        prompts, _ = super().drain(step, record)
        for _, key, count, right in prompts:
            was_right, was_wrong = self._known(key, step, record)
            record[key] = [was_right + right, was_wrong + count - right, step]
        return prompts, {"reward/known_prompts": float(len(record))}
