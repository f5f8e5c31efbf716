"""Prompts that are left out for a while, since every response of their last group was right: `task.skip_solved`.

A group without spread teaches nothing. One that is all right will mostly be so again, so its prompt gives its place in
the next epochs to others, and is then tried again; Skywork-OR1 (2505.22312) and others drop such prompts for good. One
that is all wrong is kept: it comes once an epoch as before, and more often the more prompts are solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyrl.config.sections import TaskConfig
from tinyrl.data.rows import replaced_indices, row_key
from tinyrl.rollout import Rollout
from tinyrl.tasks.prompts import PreparedPrompt


@dataclass
class SolvedPrompts:
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
        """The epoch of the data that a step begins in."""
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

    def look(self, prompts: list[PreparedPrompt], rollout: Rollout) -> None:
        """Note which groups of a rollout are all right; of a prompt with several, all must be."""
        if not self.task.skip_solved:
            return
        rewards = rollout.rewards.reshape(len(prompts), -1)
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
