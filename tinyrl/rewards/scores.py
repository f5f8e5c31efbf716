"""Scores of a batch: what happens when too many rows have none."""

from tinyrl.data.messages import Prompt
from tinyrl.errors import GuardStop
from tinyrl.text import one_line

MAX_FAILED_SHARE = 0.2  # of the rows of a batch: more is not a nuisance but another task
MAX_BAD_BATCHES = 3
PROMPT_CHARS = 80


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
        what = f"Rewards failed for more than {MAX_FAILED_SHARE:.0%} of the rows"
        how = f"{failed} of {rows}"
        raise GuardStop(f"{what}, {bad} batches in a row (last: {how}). {first_failure}")
    why = "every score was None, so no reward applies. There is nothing to learn from"
    raise GuardStop(f"No completion got a reward, {bad} batches in a row (last: {rows} rows): {why}.")


def describe_failure(prompt: Prompt, reason: str) -> str:
    """Describe in one line which prompt's reward failed, and why. A chat is named by its last message."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"] if prompt else ""
    return f"Prompt '{one_line(text, PROMPT_CHARS)}': {reason}"
