"""Load a method with all that it works on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tinyrl.config.schema import Config
from tinyrl.data.readers import Placed
from tinyrl.data.rows import prompt_keys
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, load_policy
from tinyrl.tasks.run_rows import take_rows
from tinyrl.training.distill import Distill
from tinyrl.training.dpo import Dpo
from tinyrl.training.grpo import Grpo
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.ppo import Ppo
from tinyrl.training.reward import RewardModel
from tinyrl.training.rows import RowMethod
from tinyrl.training.sft import Sft

FROM_ROWS: dict[str, type[RowMethod]] = {"sft": Sft, "reward": RewardModel, "dpo": Dpo}


def load_method(config: Config, *, options: Options) -> OnPolicy | RowMethod:
    """Load the method of a run. Raises ValueError for what a user can fix."""
    if not config.samples:
        return load_row_method(config, options=options)
    rows = take_rows(config)
    return make_method(load_collector(config, options=options, teacher=True, rows=rows), rows.text)


def load_row_method(
    config: Config,
    *,
    options: Options,
    split: str = "eval",
    without: frozenset[str] = frozenset(),
) -> RowMethod:
    """Load a method that learns from rows. split: of the rows that it evaluates on, eval or train; without: keys of
    prompts whose rows are left out of the held-out ones. Raises ValueError for what a user can fix.
    """
    rows = take_rows(config)
    held_out = rows.held_out
    if without:
        keys_of = partial(prompt_keys, system_prompt=config.task.system_prompt)
        held_out = [row for row in held_out if without.isdisjoint(keys_of(rows.kind.prompt(row)))]
    evaluated = rows.train if split == "train" else held_out
    return FROM_ROWS[config.method](load_policy(config, options=options), replace(rows, held_out=evaluated))


def make_method(collector: Collector, text: Placed) -> OnPolicy:
    """Make the method of a run that samples, on a collector. text: rows that PPO learns beside its samples."""
    match collector.config.method:
        case "grpo":
            return Grpo(collector)
        case "ppo":
            return Ppo(collector, text)
        case "distill":
            return Distill(collector)
        case other:
            raise AssertionError(f"{other} samples nothing")
