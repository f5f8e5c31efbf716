"""Count the requests that a run may make of its judges. Settings only: it is checked before torch is imported.

Before step 1 Scorer.check scores the reference answer, nothing and nonsense of the first prompt, and of the next few
where the function fails on all three. A judge is asked too how it tells reference answers from others.
"""

import math
from typing import Literal

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardFunctionConfig

TRIED_PROMPTS = 4  # whose answers all fail before a run is refused: the row of one may be at fault
TRIED_ANSWERS = 3  # to each: the reference answer, nothing, nonsense
JUDGED_ROWS = 8  # with reference answers, on which a judge is tried
JUDGED_ANSWERS = 4  # to each: the reference answer, another row's, nothing, nonsense


def judge_requests(config: Config, judge: RewardFunctionConfig) -> int:
    """Return the most requests of a judge in run.num_steps steps, evaluations and the questions before step 1.

    mode=score asks for each completion, mode=rank once a group. An evaluation has sampled and greedy completions.
    """
    run = config.run
    own = config.own
    evaluations = 0
    if run.eval_prompts:
        after_steps = math.ceil(run.num_steps / run.eval_every) if run.eval_every else 1
        evaluations = after_steps + 1
    rounds = 1 + getattr(own, "dynamic_sampling_rounds", 0)
    groups = getattr(own, "num_prompts", 0) * rounds * run.num_steps
    of_group = getattr(own, "group_size", 1) if judge.mode == "score" else 1
    return groups * of_group + 2 * evaluations * run.eval_prompts + most_questions(judge.mode)


def check_judge_budgets(config: Config) -> None:
    """Raise Refusal for a judge that the run may ask more often than max_requests allows."""
    for at, function in enumerate(config.reward.functions):
        most = function.max_requests
        if not function.is_judge or most is None:
            continue
        needed = judge_requests(config, function)
        if needed > most:
            steps = f"{config.run.num_steps:,} steps"
            raise Refusal(
                (f"reward.functions[{at}].max_requests",),
                f"reward.functions: max_requests={most}, and this run of {steps} may ask its judge {needed:,} times",
            )


def most_questions(mode: Literal["score", "rank"]) -> int:
    """Return the most questions to a judge before step 1: one per answer, or in mode `rank` one per prompt."""
    if mode == "rank":
        return TRIED_PROMPTS + JUDGED_ROWS
    return TRIED_PROMPTS * TRIED_ANSWERS + JUDGED_ROWS * JUDGED_ANSWERS
