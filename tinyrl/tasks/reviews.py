"""The reviews task: continue a neutral opening into a short film review.

The embedded default of `tinyrl train ppo`, where a learned reward model scores the reviews. The verifier here is
the independent judge: the grammar's own count of positive and negative clauses, which no model was trained on.
"""

from typing import Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.starter.sentiment import clause_moods, openings, unparsable_share
from tinyrl.tasks.grading import completion_text
from tinyrl.tasks.task import Task

MAX_EVAL_ROWS = 512


def rows(split: str) -> list[Row]:
    """Rows {"prompt"}: 539 openings to train on, 512 held out; none was ever in the pre-training text."""
    if split not in ("train", "eval"):
        raise ValueError(f"task reviews has no split {split!r}; there are train, eval")
    prompts = openings(split)
    return [{"prompt": opening} for opening in (prompts if split == "train" else prompts[:MAX_EVAL_ROWS])]


def prompt(row: Row) -> Prompt:
    """'i saw this film last night after work.'."""
    return row["prompt"]


def verify(prompts: list[Prompt], completions: list[Any], **columns: Any) -> list[float | None]:
    """The mean mood of a review's clauses, from -1 to 1; a clause the grammar cannot parse counts 0."""
    scores: list[float | None] = []
    for completion in completions:
        moods = clause_moods(completion_text(completion))
        scores.append(sum(mood or 0 for mood in moods) / len(moods) if moods else 0.0)
    return scores


def unparsable(completions: list[Any]) -> list[float]:
    """For each completion the share of its clauses that the grammar cannot have written."""
    return [unparsable_share(completion_text(completion)) for completion in completions]


def gold(row: Row) -> str:
    """A review whose every clause is positive."""
    return " the plot was brilliant, and the cast kept me hooked. i loved it."


TASK = Task(
    name="reviews",
    summary="continue a neutral opening into a film review (scored by a reward model; judged by the grammar)",
    rows=rows,
    prompt=prompt,
    verify=verify,
    gold=gold,
    columns=("prompt",),
)
