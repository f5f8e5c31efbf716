"""Rows without a reward: their reasons, and when there are too many of them to go on."""

import re
from collections import Counter

from tinyrl.data.images import shown_text
from tinyrl.data.messages import Prompt
from tinyrl.process.errors import GuardStop
from tinyrl.text import one_line

MAX_FAILED_SHARE = 0.2  # of the rows of a batch: more is not a nuisance but another task
MAX_BAD_BATCHES = 3
PROMPT_CHARS = 80
MOST_KINDS = 4  # of failures, in a message


def check_failure_streak(before: int, *, rows: int, failed: int, rewarded: int, failures: str = "") -> int:
    """Count the bad batches in a row (more than 20 % of the rows failed, or none got a reward), with this one.

    A dropped row is a nuisance; losing a fifth of every batch changes the task. Raises GuardStop at the third;
    `failures` describes those of the batch.
    """
    failing = failed > MAX_FAILED_SHARE * rows
    bad = before + 1 if failing or (rows > 0 and rewarded == 0) else 0
    if bad < MAX_BAD_BATCHES:
        return bad
    if failing:
        what = f"More than {MAX_FAILED_SHARE:.0%} of the rows failed"
        raise GuardStop(f"{what}, {bad} batches in a row (last: {failed} of {rows}): {failures}")
    why = "every score was None, so no reward applies. There is nothing to learn from; see tinyrl check"
    raise GuardStop(f"No completion got a reward, {bad} batches in a row (last: {rows} rows): {why}.")


def check_outcome(*, steps: int, unrewarded: int, failures: str) -> None:
    """Raise GuardStop at the end of a run of which no step had a sample with a reward: it is too short for
    check_failure_streak. failures: describes those of the last batch, if there were some.
    """
    if steps > 0 and unrewarded == steps:
        why = failures or "failed_rewards.jsonl has the reasons; without a line there every score was None"
        raise GuardStop(f"The run has learnt nothing, as no completion got a reward: {why}")


def describe_failures(failed: list[tuple[Prompt, str]]) -> str:
    """Describe failed rows, (prompt, reason), by the first and, if they are of several kinds, how many of each. A chat
    is named by its last message.
    """
    prompt, reason = failed[0]
    text = prompt if isinstance(prompt, str) else shown_text(prompt[-1]) if prompt else ""
    first = f"Prompt '{one_line(text, PROMPT_CHARS)}': {reason}"
    kinds = Counter(_kind(reason) for _, reason in failed)
    if len(kinds) == 1:
        return first
    most = [f"{count} x {kind}" for kind, count in kinds.most_common(MOST_KINDS)]
    others = f" and {len(kinds) - MOST_KINDS} more kinds" if len(kinds) > MOST_KINDS else ""
    return f"{', '.join(most)}{others}. First: {first}"


def _kind(reason: str) -> str:
    """Return a reason without what may differ from row to row: an error's message, a place in the code."""
    return re.split(r": | \(", reason, maxsplit=1)[0]
