"""Reward functions: user functions in their worker process, or the verifier of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyrl.data.image_rows import with_parts
from tinyrl.tasks.own import OwnTask
from tinyrl.tasks.task import Task
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import HERE, FunctionSource, parse_use
from tinyrl.workers.progress import Progress
from tinyrl.workers.values import RowResults, is_score

SETTING = "reward.functions: use"
AS_MESSAGES = "Completions are lists of messages here: the text is completion[-1]['content']."


class FunctionReward(WorkerFunction):
    """A reward function in a worker process; timeout_s is for a call."""

    def __init__(
        self,
        use: str | FunctionSource,
        *,
        weight: float = 1.0,
        timeout_s: float = 60.0,
        setting: str = SETTING,
        host: str | None = None,
        name: str = "",
    ) -> None:
        source = parse_use(use, setting=setting) if isinstance(use, str) else use
        super().__init__([source], setting=setting, timeout_s=timeout_s, host=host, name=name)
        self.weight = weight

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, list[Any]],
        *,
        progress: Progress | None = None,
    ) -> RowResults:
        """Score a batch; NaN: the function returned None ("does not apply"), or the row is among the failures. Prompts
        with images have parts for content, as TRL's have. progress: for a function that asks for it; None: a verifier.

        ValueError: a column that the function needs is missing, or one cannot be sent to it. Raises Interrupted soon
        after a stop was asked for.
        """
        arguments = {"prompts": [*map(with_parts, prompts)], "completions": list(completions), **columns}
        shared = None if progress is None else progress.arguments()
        results = self.rows(arguments, len(prompts), is_valid=is_score, shared=shared)
        results.values = [math.nan if score is None else score for score in results.values]
        return results


def verifier_of(task: Task, *, timeout_s: float) -> FunctionReward:
    """Return the verifier of a task as a reward. A user task's runs in a worker process, and so does one that may take
    any time (`task.grader`); those that ship with tinyrl run in this one.
    """
    if task.grader is not None:
        return FunctionReward(task.grader, timeout_s=timeout_s, setting="task.grader")
    if isinstance(task, OwnTask):
        code = task.code
        return FunctionReward(
            code.use, timeout_s=timeout_s, setting="task.name", host=code.verifier_host, name=task.name
        )
    here = FunctionSource(task.name, task.name, module=HERE, file=None, folder=Path.cwd(), here=task.verify)
    return FunctionReward(here, timeout_s=timeout_s, setting="task.name")
