"""Load a method with all that it works on."""

from __future__ import annotations

from tinyrl.config.refusal import Refusal
from tinyrl.data.readers import Placed
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, load_policy
from tinyrl.rollout.prepared import PreparedRun
from tinyrl.tasks.rewarded import check_rewarded
from tinyrl.training.distill import Distill
from tinyrl.training.dpo import Dpo
from tinyrl.training.grpo import Grpo
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.ppo import Ppo
from tinyrl.training.reward import RewardModel
from tinyrl.training.rows import RowMethod
from tinyrl.training.sft import Sft

FROM_ROWS: dict[str, type[RowMethod]] = {"sft": Sft, "reward": RewardModel, "dpo": Dpo}


def load_method(prepared: PreparedRun, *, options: Options) -> OnPolicy | RowMethod:
    """Load the method of a run. Raises ValueError for what a user can fix."""
    if not prepared.config.samples:
        return load_row_method(prepared, options=options)
    return make_method(load_collector(prepared, options=options, teacher=True), prepared.rows.text)


def load_row_method(prepared: PreparedRun, *, options: Options) -> RowMethod:
    """Load a method that learns from rows. Raises ValueError for what a user can fix."""
    config = prepared.config
    return FROM_ROWS[config.method](load_policy(config, options=options), prepared.rows)


def make_method(collector: Collector, text: Placed) -> OnPolicy:
    """Make the method of a run that samples, on a collector. text: rows that PPO learns beside its samples. Raises
    ValueError where the environment, which is known now, gives no rewards and nothing else does, and Refusal for credit
    by turn where it gives none.
    """
    config = collector.config
    is_rewarded = collector.scorer.environment_rewards != "none"
    rows = [prompt.row for prompt in collector.train_prompts]
    check_rewarded(config, collector.task, rows, by_environment=is_rewarded)
    match config.method:
        case "grpo":
            method = Grpo(collector)
            if method.config.credits_turns and not is_rewarded:
                player = config.environment.name or "the task"
                raise Refusal(
                    ("grpo.credit", "environment.name"),
                    f"grpo.credit=turn needs rewards of turns, and {player} gives none: a class does by get_reward, "
                    "a task by the replies of its `respond`",
                )
            return method
        case "ppo":
            return Ppo(collector, text)
        case "distill":
            return Distill(collector)
        case other:
            raise AssertionError(f"{other} samples nothing")
