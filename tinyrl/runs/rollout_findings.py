"""Findings about what a run samples and how it is rewarded: spread, ceiling, truncation, length, several rewards; and
rewards and turns that there are none of, which the first steps show.
"""

from __future__ import annotations

import math

from tinyrl.runs.finding import (
    FEWEST_STEPS,
    Finding,
    Row,
    early,
    halfway,
    known,
    near_top,
    noise,
    of_unit_scale,
    recent,
    solved,
)
from tinyrl.runs.records import Run, number
from tinyrl.text import one_line


def zero_spread(run: Run) -> Finding | None:
    """Most groups have the same reward throughout, so that the step teaches nothing, far from the top."""
    share = recent(run.finite("reward/zero_spread_groups"))
    if not share >= 0.75 or near_top(run):
        return None
    reward = recent(run.finite("reward/mean"))
    hard = of_unit_scale(run) and reward < 0.2
    return Finding(
        "zero-spread groups",
        f"{share:.0%} of the groups have the same reward for all their completions, which teaches nothing; the mean "
        f"reward is {reward:.3g}.",
        "Take easier prompts, or a reward that is given in steps."
        if hard
        else "Replace such groups by fresh prompts: grpo.refill_rounds=2.",
        {"zero_spread_groups": share, "reward": reward},
        rank=lambda row: -abs(known(row.get("advantage"), 1.0)),
    )


def ceiling(run: Run) -> Finding | None:
    """The reward has been as high as it goes for a quarter of the run, so there is nothing left to learn."""
    shares, std, mean = (run.finite(f"reward/{key}") for key in ("zero_spread_groups", "std", "mean"))
    reward, spread = recent(mean), recent(std)
    if shares:
        reached = recent(shares) >= 0.9 and near_top(run)
    else:
        most = max((value for _, value in std), default=0.0)
        reached = (solved(run) and reward >= 0.98) or (near_top(run) and spread <= 0.1 * most)
    if not reached:
        return None
    same = f" and {recent(shares):.0%} of the groups have no spread" if shares else ""
    return Finding(
        "reward at its ceiling",
        f"The reward is {reward:.3g} with a spread of {spread:.2g}{same}: there is hardly anything left to learn here.",
        "Go on with harder prompts: task.skip_solved=1 leaves out for an epoch those that are solved.",
        {"reward": reward, "reward_std": spread},
        rank=lambda row: known(row.get("reward"), -math.inf),
    )


def truncation(run: Run) -> Finding | None:
    """Many completions are cut off at the limit, so their reward is of an unfinished answer."""
    share = recent(run.finite("completion/truncated"))
    if not share >= 0.2:
        return None
    limit = number(run.setting("generation.max_new_tokens"))
    at = f" at {limit:.0f} tokens (generation.max_new_tokens)" if math.isfinite(limit) else ""
    instead = f"generation.max_new_tokens={2 * limit:.0f}" if math.isfinite(limit) else "generation.max_new_tokens"
    return Finding(
        "truncation",
        f"{share:.0%} of the completions are cut off{at} before they end, and are scored as they stand.",
        f"Raise the limit: {instead}."
        if share < 0.98
        else "See whether the end-of-text token is one that this model writes: tinyrl doctor MODEL.",
        {"truncated": share},
        rank=lambda row: float(row.get("finish_reason") == "length"),
    )


def length_creep(run: Run) -> Finding | None:
    """Completions grow while the reward does not: in the second half by 30 % or more, in all by half or more."""
    lengths, rewards = run.finite("completion/mean_length"), run.finite("reward/mean")
    start, middle, end = early(lengths), halfway(lengths), recent(lengths)
    gain = recent(rewards) - halfway(rewards)
    if not (end >= 1.5 * start and end >= 1.3 * middle and gain < 0.1 * early(run.finite("reward/std"))):
        return None
    return Finding(
        "length creep",
        f"Completions have grown from {start:.0f} to {end:.0f} tokens, {end / middle - 1:.0%} of it since halfway, "
        f"while the reward changed by {gain:+.2g} since then.",
        "Charge for length: a reward function of len(completion_ids), with a small negative weight.",
        {"length_start": start, "length": end, "reward_gain": gain},
        rank=lambda row: len(str(row.get("completion", ""))),
    )


def dropped_rewards(run: Run) -> Finding | None:
    """A quarter of the completions or more have no reward. How many a step has follows from their tokens."""
    shares = [(step, _dropped(line)) for step, line in run.steps.items() if number(line.get("reward/dropped")) >= 0]
    share = recent(shares)
    if not share >= 0.25:
        return None
    return Finding(
        "rewards dropped",
        f"{share:.0%} of the completions have no reward: its functions failed, or said that they do not apply.",
        "See failed_rewards.jsonl, which has the reasons; without a line there every function gave None.",
        {"dropped": share},
        rank=lambda row: float(math.isnan(number(row.get("reward")))),
    )


def _dropped(line: Row) -> float:
    """The share of a step's completions without a reward."""
    dropped = number(line.get("reward/dropped"))
    rows = number(line.get("completion/tokens")) / max(known(line.get("completion/mean_length"), 0.0), 1e-9)
    if rows >= 1:
        return min(1.0, dropped / rows)
    functions = any(key.startswith("reward/") for key in line.keys() - NOT_FUNCTIONS)
    return float(dropped > 0 and not functions)


def hardly_asked(run: Run) -> Finding | None:
    """Fewer than one episode in five has a second turn, where more are allowed; before training by held-out ones."""
    before = "" if run.finite("environment/turns") else "eval/"
    turns = recent(run.finite(f"{before}environment/turns"))
    cut = recent(run.finite(f"{before or 'completion/'}truncated"))
    most = known(run.setting("environment.max_turns"), 0.0)
    if not (turns <= 1.2 and most >= 2):
        return None
    endless = cut >= 0.5
    why = f"{cut:.0%} are cut at generation.max_new_tokens before their turn ends" if endless else "most answer at once"
    return Finding(
        "environment hardly asked",
        f"An episode has {turns:.3g} of {most:.0f} turns: {why}, so the environment says next to nothing.",
        "Let turns end: a string that closes a question in generation.stop, or `tinyrl train sft` on episodes first."
        if endless
        else "Show how to ask, in task.system_prompt or by `tinyrl train sft` on episodes first; where one turn is "
        "all, environment.max_turns=1.",
        {"turns": turns, "max_turns": most},
        kind="eval" if before else "train",
        rank=lambda row: float(row.get("finish_reason") == "length"),
    )


NOT_FUNCTIONS = {"reward/mean", "reward/std", "reward/dropped", "reward/zero_spread_groups", "reward/zero_spread_kept"}


def reward_conflict(run: Run) -> Finding | None:
    """One reward function rises while another falls: by a tenth of its size at least, and beyond the noise."""
    moves: dict[str, float] = {}
    names = {key for line in [*run.steps.values()][-FEWEST_STEPS:] for key in line if key.startswith("reward/")}
    for key in sorted(names - NOT_FUNCTIONS):
        points = run.finite(key)
        if len(points) >= FEWEST_STEPS:
            size = max(abs(value) for _, value in points)
            change = (recent(points) - early(points)) * _sign(run, key.removeprefix("reward/"))
            if abs(change) > max(0.1 * size, 4 * noise(points)):
                moves[key.removeprefix("reward/")] = change
    if not moves:
        return None
    up, down = max(moves, key=lambda name: moves[name]), min(moves, key=lambda name: moves[name])
    if moves[up] <= 0 or moves[down] >= 0:
        return None
    a, b = run.finite(f"reward/{up}"), run.finite(f"reward/{down}")
    rising, falling = one_line(up, 40), one_line(down, 40)
    return Finding(
        "one reward up, another down",
        f"{rising} went from {early(a):.3g} to {recent(a):.3g} while {falling} went from {early(b):.3g} to "
        f"{recent(b):.3g}: the policy may be gaming the first.",
        f"Give {falling} a larger weight in reward.functions.",
        {f"{up}_change": moves[up], f"{down}_change": moves[down]},
        rank=lambda row: _of(row, up) - _of(row, down),
    )


def _sign(run: Run, name: str) -> float:
    """-1 for a function whose weight is negative: its fall is what is rewarded."""
    functions = run.setting("reward.functions")
    for function in functions if isinstance(functions, list) else []:
        if isinstance(function, dict) and str(function.get("use", "")).rpartition(":")[2] == name:
            return -1.0 if number(function.get("weight")) < 0 else 1.0
    return 1.0


def _of(row: Row, name: str) -> float:
    rewards = row.get("rewards")
    return known(rewards.get(name), 0.0) if isinstance(rewards, dict) else 0.0


AT_ONCE = (dropped_rewards, hardly_asked)
OF_ROLLOUTS = (zero_spread, ceiling, truncation, length_creep, reward_conflict)
