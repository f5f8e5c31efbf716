"""`tinyrl compare`: several policies beside one, all judged alike, in one table.

A row a policy: reward (mean with interval, median), the verifier's mean, KL to what the policy started from, length,
and how often it is preferred to the baseline on the same prompt, by the reward and by the verifier.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from tinyrl.components import Options
from tinyrl.data.rows import FEW, prompt_key
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.pairing import win_rates
from tinyrl.evaluation.targets import Asked, Target, find, locate, trained_on
from tinyrl.evaluation.versus import OWN_SAMPLING, How, evaluate_side, load_side
from tinyrl.generation.turns import plays
from tinyrl.runs.run_dir import finite
from tinyrl.tasks import load_task
from tinyrl.text import number

LIMITS = ("timeout_s", "memory_gb")  # of the processes of people's code
JUDGED_BY = {  # the sections that say how samples are judged, and which of their settings do not
    "task": ("skip_solved", "solved_reward"),
    "reward": (*LIMITS, "truncated", "truncated_penalty", "overlong_tokens"),
    "generation": OWN_SAMPLING,
}
Row = dict[str, Any]


def compare_policies(
    targets: list[str],
    *,
    vs: str,
    task: str | None,
    settings: list[str],
    num_prompts: int,
    samples: int,
    best_of: int,
    options: Options,
) -> list[Row]:
    """A row for the baseline `vs`, with `best_of` above 1 one for the best of so many of its samples, one a target.

    A row has `policy`, what `evaluate` says of it, and `win_rate` against the baseline; `environment` names settings of
    its environment that are not the baseline's. All are sampled on the same
    prompts, which none of them was trained on, with the same uniforms. Raises ValueError where they would not be judged
    alike or on other prompts, and where no prompt is left.
    """
    found = alike([vs, *targets], Asked(task, None, tuple(settings)))
    seen = frozenset().union(*(trained_on(target.path) for target in found))
    how = How("eval", num_prompts, samples, 1)

    def evaluated(target: Target, best_of: int = 1) -> tuple[list[int], Evaluation]:
        return _evaluated(target, replace(how, best_of=best_of), seen=seen, seed=_seed(found[0]), options=options)

    prompts, baseline = evaluated(found[0])
    rows = [{"policy": found[0].name, **baseline.metrics}]
    against = [(f"{found[0].name}, best of {best_of}", found[0], best_of)] if best_of > 1 else []
    for name, target, best in [*against, *((target.name, target, 1) for target in found[1:])]:
        asked, evaluation = evaluated(target, best)
        if asked != prompts:
            raise ValueError(
                f"{vs} and {target.path} have room for different prompts, so they cannot be compared: "
                "task.long_prompts=drop leaves some out; give a generation.max_prompt_tokens that both have room for"
            )
        rows.append({"policy": name, **evaluation.metrics, "win_rate": win_rates(evaluation, baseline)})
        if other := other_environment(found[0], target):
            rows[-1]["environment"] = other
    return rows


def alike(paths: list[str], asked: Asked) -> list[Target]:
    """The targets at these paths. Raises ValueError naming the first setting of task, reward or generation in which one
    differs from the first.
    """
    found = [locate(find(path, asked)) for path in paths]
    for target in found:
        if not target.is_policy:
            raise ValueError(f"{target.path} is a reward model, which writes nothing that could be judged")
        if target.sampled is None:
            raise ValueError(
                f"{target.path}: nothing says what its samples are judged by; give --task NAME or reward.model=PATH"
            )
        for section, besides in JUDGED_BY.items():
            left, right = (getattr(one.sampled, section).model_dump() for one in (found[0], target))
            for name in left:
                if name not in besides and left[name] != right[name]:
                    raise ValueError(
                        f"{found[0].path} and {target.path} differ in {section}.{name} ({left[name]} and "
                        f"{right[name]}), so they would not be judged alike; give it for all: {section}.{name}=..."
                    )
    return found


def other_environment(first: Target, target: Target) -> list[str]:
    """The settings of its environment in which a target differs from the first: each plays in its own."""
    assert first.sampled is not None
    assert target.sampled is not None
    configs = first.sampled, target.sampled
    if not any(plays(config, load_task(config.task.name or "rows")) for config in configs):
        return []
    left, right = (config.environment.model_dump() for config in configs)
    return [name for name in left if name not in LIMITS and left[name] != right[name]]


def _seed(target: Target) -> int:
    assert target.sampled is not None
    return target.sampled.run.seed


def _evaluated(
    target: Target, how: How, *, seen: frozenset[str], seed: int, options: Options
) -> tuple[list[int], Evaluation]:
    """One policy on the prompts that nobody was trained on (their numbers too), with the uniforms of `seed`."""
    assert target.sampled is not None
    run = target.sampled.run.model_copy(update={"seed": seed})
    side = load_side(replace(target, sampled=target.sampled.model_copy(update={"run": run})), options=options)
    try:
        prompts = [p for p in side.prompts(how.split) if prompt_key(p.prompt) not in seen][: how.num_prompts]
        if not prompts:
            raise ValueError("no held-out prompt is left that none of the policies was trained on; give --task")
        return [p.index for p in prompts], evaluate_side(side, prompts, how)
    finally:
        side.parts.close()


def render_comparison(rows: list[Row], *, as_json: bool) -> str:
    """The table for people, or a JSON list of the rows."""
    if as_json:
        return json.dumps(finite(rows))
    judges = list(dict.fromkeys(judge for row in rows for judge in row.get("win_rate", {})))
    verified = "verifier_mean" in rows[0]
    header = ["policy", "reward", "median", *(["verifier"] if verified else [])]
    header += ["KL", "length", *(f"wins by {judge}" for judge in judges)]
    table = [header, *(_cells(row, judges, verified=verified) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines = [
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in table
    ]
    note = (
        f"({rows[0]['num_prompts']} prompts x {rows[0]['num_samples']}; 95 % intervals; KL in nats per response to "
        f"where each started, of best-of-n to {rows[0]['policy']}; wins against that, ties half)"
    )
    others = [
        f"{row['policy']} plays in another environment than {rows[0]['policy']} "
        f"({', '.join(f'environment.{name}' for name in row['environment'])})"
        for row in rows
        if "environment" in row
    ]
    few = [f"warning: fewer than {FEW} prompts say little"] if rows[0]["num_prompts"] < FEW else []
    return "\n".join([*lines, note, *others, *few])


def _cells(row: Row, judges: list[str], *, verified: bool) -> list[str]:
    kl = f"<= {number(row['kl_bound'])}" if "kl_bound" in row else _shown(row.get("kl"))
    rates = [row.get("win_rate", {}).get(judge) for judge in judges]
    return [
        row["policy"],
        f"{_shown(row['reward_mean'])} {_interval(row['reward_ci'])}",
        _shown(row["reward_median"]),
        *([_shown(row.get("verifier_mean"))] if verified else []),
        kl,
        f"{row['mean_length']:.1f}",
        *("-" if rate is None else f"{_shown(rate['mean'])} {_interval(rate['ci'])}" for rate in rates),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else number(value)


def _interval(ends: list[float]) -> str:
    return "" if math.isnan(ends[0]) else f"({number(ends[0])} to {number(ends[1])})"
