"""Find whether run.patience would end a run whatever it learns, as few held-out prompts have wide intervals."""

from __future__ import annotations

from tinyrl.evaluation.statistics import prompts_for_a_gain
from tinyrl.rollout.collect import Collector
from tinyrl.runs.finding import Finding


def an_early_end(collector: Collector, rewards: list[float]) -> Finding | None:
    """Return a finding where no evaluation could gain on another; rewards: of answers to training prompts."""
    run = collector.config.run
    if run.patience is None or collector.scorer.right_or_wrong:
        return None
    prompts = len(collector.eval_prompts[: run.eval_prompts])
    needed = prompts_for_a_gain(rewards, prompts=prompts, best=collector.config.task.solved_reward)
    if needed is None:
        return None
    values = len({*rewards})
    return Finding(
        name="an early end",
        what=f"run.patience={run.patience} ends the run whatever it learns: the reward has {values} values here, and "
        f"the 95 % interval of {prompts} held-out prompts reaches the highest one, so no evaluation gains on another.",
        change=f"Hold out at least {needed} prompts (run.eval_prompts, rows in task.eval_data), or set "
        "run.patience=null.",
        figures={"held_out": prompts, "needed": needed},
        is_harmless=True,
    )
