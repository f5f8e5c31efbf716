"""Count the requests that a run may make of its judges. Settings only: it is checked before torch is imported."""

import math

from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardFunctionConfig

GOLD_QUESTIONS = {"score": 4 * 3 + 8 * 4, "rank": 4 + 8}  # to a judge before step 1, at most: Scorer.check


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
    return groups * of_group + 2 * evaluations * run.eval_prompts + GOLD_QUESTIONS[judge.mode]


def check_judge_budgets(config: Config) -> None:
    """Raise ValueError for a judge that the run may ask more often than max_requests allows."""
    for function in config.reward.functions:
        most = function.max_requests
        if not function.is_judge or most is None:
            continue
        needed = judge_requests(config, function)
        if needed > most:
            steps = f"{config.run.num_steps:,} steps"
            raise ValueError(
                f"reward.functions: max_requests={most}, and this run of {steps} may ask its judge {needed:,} times"
            )
