"""The reviews task: continue a neutral opening into a short film review.

The embedded default of `tinyrl train ppo`, where a learned reward model scores the reviews. The verifier here is
the independent judge: the grammar's own count of positive and negative clauses, which no model was trained on.
"""

from tinyrl.data.readers import Row
from tinyrl.starter.sentiment import clause_moods, openings
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

MAX_EVAL_ROWS = 512


def rows(split: str) -> list[Row]:
    """Rows {"prompt"}: 539 openings to train on, 512 held out; none was ever in the pre-training text."""
    prompts = openings(split)
    return [{"prompt": opening} for opening in (prompts if split == "train" else prompts[:MAX_EVAL_ROWS])]


def score(text: str, row: Row) -> float:
    """The mean mood of a review's clauses, from -1 to 1; a clause the grammar cannot parse counts 0."""
    moods = clause_moods(text)
    return sum(mood or 0 for mood in moods) / len(moods) if moods else 0.0


TASK = Task(
    name="reviews",
    summary="continue a neutral opening into a film review (scored by a reward model; judged by the grammar)",
    rows=rows,
    verify=by_row(score),
    gold=lambda row: " the plot was brilliant, and the cast kept me hooked. i loved it.",
    columns=("prompt",),
)
