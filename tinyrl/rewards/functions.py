"""Reward functions: a user's in its worker process, a task's own verifier in ours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyrl.data.messages import Prompt
from tinyrl.errors import GuardStop
from tinyrl.text import one_line
from tinyrl.workers import worker
from tinyrl.workers.calls import MAX_FAILED_SHARE, RowFailure, Rows, WorkerFunction, quoted, said
from tinyrl.workers.loading import parse_use

SETTING = "reward.functions: use"
MAX_BAD_BATCHES = 3
PROMPT_CHARS = 80


@dataclass
class RewardCall:
    """One score for each row. NaN: the function returned None ("does not apply"), or the row is among the failures.

    whys: the function's comment on each row, an empty list without any; slowest: seconds of the slowest row, and which
    that is, where rows were timed.
    """

    scores: list[float]
    failures: list[RowFailure] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    slowest: tuple[float, int] | None = None


class FunctionReward(WorkerFunction):
    """A user's reward function in a worker process; timeout_s is for a call."""

    def __init__(self, use: str, *, weight: float = 1.0, timeout_s: float = 60.0) -> None:
        super().__init__([parse_use(use, setting=SETTING)], setting=SETTING, timeout_s=timeout_s)
        self.weight = weight

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, list[Any]]) -> RewardCall:
        """Score a batch. ValueError: a column that the function needs is missing, or one cannot be sent to it.

        Raises Interrupted soon after a stop was asked for.
        """
        rows = self.rows({"prompts": list(prompts), "completions": list(completions), **columns}, len(prompts))
        return _reward_call(rows)


def call_in_process(
    function: Callable[..., Any],
    name: str,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: dict[str, list[Any]],
) -> RewardCall:
    """Score a batch with trusted code, here and without a time limit; an exception fails all rows."""
    arguments = {"prompts": list(prompts), "completions": list(completions), **columns}
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    request = {"arguments": arguments, "num_rows": len(prompts), "call": "score"}
    reply = worker.Loaded(worker.reward([function]), file).answer(request)
    if "error" in reply:
        failures = [RowFailure(row, f"`{name}` {said(reply)}") for row in range(len(prompts))]
        return RewardCall([math.nan] * len(prompts), failures)
    failures = [RowFailure(row, f"`{name}` {quoted(why)}") for row, why in reply["failures"]]
    return _reward_call(Rows(reply["values"], failures))


def _reward_call(rows: Rows) -> RewardCall:
    """Split the values of a call, each a score or None, or [score, why]."""
    pairs = [value if isinstance(value, list) else (value, "") for value in rows.values]
    scores, whys = [math.nan if score is None else score for score, _ in pairs], [why for _, why in pairs]
    return RewardCall(scores, rows.failures, whys if any(whys) else [], rows.slowest)


def as_completion(text: str, prompt: Prompt) -> Any:
    """Return a text as a completion in the data's form: a message where the prompt is a chat."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN of none."""
    valid = [value for value in values if not math.isnan(value)]
    return float(sum(valid) / len(valid)) if valid else math.nan


def check_failure_streak(before: int, *, rows: int, failed: int, rewarded: int, first_failure: str = "") -> int:
    """Count the bad batches in a row (more than 20 % of the rows failed, or none got a reward), with this one.

    A dropped row is a nuisance; losing a fifth of every batch changes the task. Raises GuardStop at the third;
    `first_failure` is describe_failure() of a failed row.
    """
    failing = failed > MAX_FAILED_SHARE * rows
    bad = before + 1 if failing or (rows > 0 and rewarded == 0) else 0
    if bad < MAX_BAD_BATCHES:
        return bad
    if failing:
        what, how = f"Rewards failed for more than {MAX_FAILED_SHARE:.0%} of the rows", f"{failed} of {rows}"
        raise GuardStop(f"{what}, {bad} batches in a row (last: {how}). {first_failure}")
    why = "every score was None, so no reward applies. There is nothing to learn from"
    raise GuardStop(f"No completion got a reward, {bad} batches in a row (last: {rows} rows): {why}.")


def describe_failure(prompt: Prompt, reason: str) -> str:
    """Describe in one line which prompt's reward failed, and why. A chat is named by its last message."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    return f"Prompt '{one_line(text, PROMPT_CHARS)}': {reason}"
