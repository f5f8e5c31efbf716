"""How much of a reward is tried before step 1, in numbers that are known without a model.

Scorer.check scores the reference answer, nothing and nonsense of the first prompt, and of the next few where the
function fails on all three. A judge is asked too how it tells reference answers from others.
"""

from typing import Literal

TRIED_PROMPTS = 4  # whose answers all fail before a run is refused: the row of one may be at fault
TRIED_ANSWERS = 3  # to each: the reference answer, nothing, nonsense
JUDGED_ROWS = 8  # with reference answers, on which a judge is tried
JUDGED_ANSWERS = 4  # to each: the reference answer, another row's, nothing, nonsense


def most_questions(mode: Literal["score", "rank"]) -> int:
    """Return the most questions to a judge before step 1: one per answer, or in mode `rank` one per prompt."""
    if mode == "rank":
        return TRIED_PROMPTS + JUDGED_ROWS
    return TRIED_PROMPTS * TRIED_ANSWERS + JUDGED_ROWS * JUDGED_ANSWERS
