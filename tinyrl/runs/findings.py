"""Findings of a run: what is wrong with it, with figures, what shows it, and one thing to change.

Each is a pure function of the rows of metrics.jsonl and the configuration, so that `tinyrl doctor RUN` says of files
what a run says of itself as warnings. Windows: the first tenth of the steps (5 to 25 of them) against the last quarter
(10 to 50). Thresholds are where runs that go well never are, by some margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from tinyrl.runs.records import Points, Run, known, number
from tinyrl.text import one_line

FEWEST_STEPS = 12  # of training, before windows are compared
MOST_GAP = 0.05  # mean difference of log-probabilities; bfloat16 with other kernels comes to some 0.01
MOST_KL = 10.0  # nats per response, and half a nat per token
LEAST_LIKELY = -3.0  # mean log-probability of the policy's tokens under a teacher: 5 %
MOST_NONFINITE = 2  # optimizer steps that were skipped lately; three in a row stop a run
CRITIC_STEPS = 60  # after which a critic should explain something; a third of that where it is worse than none
NOT_FUNCTIONS = {"reward/mean", "reward/std", "reward/dropped", "reward/zero_spread_groups", "reward/zero_spread_kept"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """name: what it is called; what: a sentence with figures; change: one thing to change; figures: by name.

    kind and rank say which lines of samples.jsonl show it: of the last step with lines of that kind, those that rank
    highest.
    """

    name: str
    what: str
    change: str
    figures: dict[str, float]
    kind: Literal["train", "eval"] = "train"
    rank: Callable[[Row], float] = field(default=lambda row: 0.0, repr=False, compare=False)


# ---- windows ----


def _mean(points: Points) -> float:
    return fmean(value for _, value in points) if points else math.nan


def early(points: Points) -> float:
    """The mean of the first tenth of the points, 5 to 25 of them; NaN where there are none."""
    return _mean(points[: min(25, max(5, len(points) // 10))])


def halfway(points: Points) -> float:
    """The mean of the points before the middle, as many as `early` takes."""
    return early(points[max(0, len(points) // 2 - min(25, max(5, len(points) // 10))) :])


def recent_points(points: Points) -> Points:
    """The last quarter of the points, 10 to 50 of them."""
    return points[-min(50, max(10, len(points) // 4)) :]


def recent(points: Points) -> float:
    """The mean of the last quarter of the points; NaN where there are none."""
    return _mean(recent_points(points))


def noise(points: Points) -> float:
    """The standard error of `recent`, from how far neighbouring points differ."""
    last = recent_points(points)
    steps = [(b - a) ** 2 for (_, a), (_, b) in pairwise(last)]
    return math.sqrt(fmean(steps) / 2 / len(last)) if steps else math.inf


def has_steps(run: Run) -> bool:
    """Whether a run has trained for long enough that windows of it can be compared."""
    return len(run.finite("reward/mean")) >= FEWEST_STEPS


def of_unit_scale(run: Run) -> bool:
    """Whether the reward looks like one between 0 and 1."""
    means = run.finite("reward/mean")
    return all(0 <= value <= 1 for _, value in means) and early(run.finite("reward/std")) <= 0.6


def solved(run: Run) -> bool:
    """Whether a reward between 0 and 1 is 0.9 or more."""
    return of_unit_scale(run) and recent(run.finite("reward/mean")) >= 0.9


def near_top(run: Run) -> bool:
    """Whether the reward is about as high as it can be: solved, or on another scale a deviation above the start."""
    points, spread = run.finite("reward/mean"), early(run.finite("reward/std"))
    return solved(run) or (not of_unit_scale(run) and recent(points) > early(points) + spread)


# ---- sampling and rewards ----


def zero_spread(run: Run) -> Finding | None:
    share, reward = recent(run.finite("reward/zero_spread_groups")), recent(run.finite("reward/mean"))
    if not share >= 0.75 or near_top(run):
        return None
    hard = of_unit_scale(run) and reward < 0.2
    easier = "Take easier prompts, or a reward that is given in steps."
    return Finding(
        "zero-spread groups",
        f"{share:.0%} of the groups have the same reward for all their completions, which teaches nothing; the mean "
        f"reward is {reward:.3g}.",
        easier if hard else "Replace such groups by fresh prompts: grpo.refill_rounds=2.",
        {"zero_spread_groups": share, "reward": reward},
        rank=lambda row: -abs(known(row.get("advantage"), 1.0)),
    )


def ceiling(run: Run) -> Finding | None:
    """The reward has been as high as it goes for a quarter of the run, so there is nothing left to learn."""
    shares, std = run.finite("reward/zero_spread_groups"), run.finite("reward/std")
    reward, spread, share = recent(run.finite("reward/mean")), recent(std), recent(shares)
    if shares:
        reached = share >= 0.9 and near_top(run)
    else:
        most = max((value for _, value in std), default=0.0)
        reached = (solved(run) and reward >= 0.98) or (near_top(run) and spread <= 0.1 * most)
    if not reached:
        return None
    same = f" and {share:.0%} of the groups have no spread" if shares else ""
    return Finding(
        "reward at its ceiling",
        f"The reward is {reward:.3g} with a spread of {spread:.2g}{same}: there is hardly anything left to learn here.",
        "Go on with harder prompts, or with task.sampler=difficulty, which draws solved ones seldom.",
        {"reward": reward, "reward_std": spread},
        rank=lambda row: known(row.get("reward"), -math.inf),
    )


def truncation(run: Run) -> Finding | None:
    share, limit = recent(run.finite("completion/truncated")), number(run.setting("generation.max_new_tokens"))
    if not share >= 0.2:
        return None
    at = f" at {limit:.0f} tokens (generation.max_new_tokens)" if math.isfinite(limit) else ""
    instead = f"generation.max_new_tokens={2 * limit:.0f}" if math.isfinite(limit) else "generation.max_new_tokens"
    never_ends = "See whether the end-of-text token is one that this model writes: tinyrl check."
    return Finding(
        "truncation",
        f"{share:.0%} of the completions are cut off{at} before they end, and are scored as they stand.",
        f"Raise the limit: {instead}." if share < 0.98 else never_ends,
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
    """The share of a step's completions without a reward; how many there are follows from their tokens."""
    dropped = number(line["reward/dropped"])
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
    if not (turns <= 1.2 and most >= 2) or run.setting("environment.agent"):
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


def reward_conflict(run: Run) -> Finding | None:
    """One reward function rises while another falls: by a tenth of its size at least, and beyond the noise."""
    moves: dict[str, float] = {}
    keys = {key for line in [*run.steps.values()][-FEWEST_STEPS:] for key in line if key.startswith("reward/")}
    for key in sorted(key for key in keys - NOT_FUNCTIONS):
        points, name = run.finite(key), key.removeprefix("reward/")
        if len(points) >= FEWEST_STEPS:
            size = max(abs(value) for _, value in points)
            change = (recent(points) - early(points)) * _sign(run, name)
            if abs(change) > max(0.1 * size, 4 * noise(points)):
                moves[name] = change
    if not moves or max(moves.values()) <= 0 or min(moves.values()) >= 0:
        return None
    up, down = max(moves, key=lambda name: moves[name]), min(moves, key=lambda name: moves[name])
    a, b = run.finite(f"reward/{up}"), run.finite(f"reward/{down}")
    rising, falling = one_line(up, 40), one_line(down, 40)

    def gap(row: Row) -> float:
        rewards = row.get("rewards")
        return known(rewards.get(up), 0.0) - known(rewards.get(down), 0.0) if isinstance(rewards, dict) else 0.0

    return Finding(
        "one reward up, another down",
        f"{rising} went from {early(a):.3g} to {recent(a):.3g} while {falling} went from {early(b):.3g} to "
        f"{recent(b):.3g}: the policy may be gaming the first.",
        f"Give {falling} a larger weight in reward.functions.",
        {f"{up}_change": moves[up], f"{down}_change": moves[down]},
        rank=gap,
    )


def _sign(run: Run, name: str) -> float:
    """-1 for a function whose weight is negative: its fall is what is rewarded."""
    functions = run.setting("reward.functions")
    for function in functions if isinstance(functions, list) else []:
        if isinstance(function, dict) and str(function.get("use", "")).rpartition(":")[2] == name:
            return -1.0 if number(function.get("weight")) < 0 else 1.0
    return 1.0


# ---- policy and critic ----


def entropy_collapse(run: Run) -> Finding | None:
    """The entropy is below a tenth of what it was, and the prompts are not solved: nothing new is tried."""
    points = run.finite("policy/entropy")
    start, end = early(points[:5]), recent(points)
    if not end < 0.1 * start or solved(run):
        return None
    reward, section = recent(run.finite("reward/mean")), run.setting("method") or "grpo"
    return Finding(
        "entropy collapse",
        f"The entropy has fallen from {start:.3g} to {end:.2g} nats a token, with the reward at {reward:.3g}: samples "
        "hardly differ, so nothing better can be found.",
        f"Keep some of it, from an earlier checkpoint on: {section}.entropy_coef=0.01.",
        {"entropy_start": start, "entropy": end},
        rank=lambda row: -abs(known(row.get("advantage"), 1.0)),
    )


def kl_blow_up(run: Run) -> Finding | None:
    points = run.finite("objective/kl") or run.finite("eval/kl")
    lengths = run.finite("completion/mean_length")
    if not points or not lengths:
        return None
    kl, a_token = recent(points) if len(points) > 10 else points[-1][1], recent(lengths)
    if not (kl >= MOST_KL and kl >= 0.5 * a_token):
        return None
    section = run.setting("method") or "grpo"
    coef = known(run.setting(f"{section}.kl_coef"), 0.0)
    return Finding(
        "KL blow-up",
        f"The KL to the reference is {kl:.3g} nats a response ({kl / a_token:.2g} a token): the text is no longer "
        "that of the model it started from.",
        f"Hold it closer: {section}.kl_coef={2 * coef if coef > 0 else 0.02:.3g}.",
        {"kl": kl, "kl_per_token": kl / a_token},
        kind="eval",
    )


def held_out_falls(run: Run) -> Finding | None:
    """Held-out reward is below its best, by more than its interval says is chance, while training's went on rising; for
    methods with a loss: the loss falls on the rows trained on and has risen on the others.
    """
    return _falls(run, "reward/mean", "eval/reward_mean", sign=1.0) or _falls(run, "loss", "eval/loss", sign=-1.0)


def _falls(run: Run, trained: str, held: str, *, sign: float) -> Finding | None:
    train, held_out = run.finite(trained), run.finite(held)
    if len(held_out) < 3 or len(train) < FEWEST_STEPS:
        return None
    at, best = max(held_out, key=lambda point: (sign * point[1], point[0]))
    last, end = held_out[-1]
    around, since = _mean(sorted(train, key=lambda point: abs(point[0] - at))[:5]), recent(train)
    interval = run.interval("eval/reward_ci", last)
    margin = (interval[1] - interval[0]) / 2 if sign > 0 and interval else 0.05 * abs(best)
    scale = max(abs(around), known(early(run.finite("reward/std")), 0.0) if sign > 0 else 0.0)
    if not (sign * (best - end) > margin and sign * (since - around) > 0.05 * scale):
        return None
    return Finding(
        "train up, held-out down" if sign > 0 else "overfitting",
        f"The held-out {'reward' if sign > 0 else 'loss'} was {best:.3g} at step {at} and is {end:.3g} at step {last}, "
        f"while training's went from {around:.3g} to {since:.3g}.",
        f"Take a checkpoint of about step {at}; tinyrl show RUN lists those that were kept.",
        {"best_step": float(at), "best": best, "last": end, "train_then": around, "train": since},
        kind="eval",
        rank=lambda row: -known(row.get("reward"), 0.0),
    )


def idle_critic(run: Run) -> Finding | None:
    """The critic explains none of the returns after 60 steps, or is much worse than no critic after 20."""
    points = run.finite("value/explained_variance")
    explained = recent(points)
    worse = explained < -0.2
    if not (explained < 0.02 and len(points) >= CRITIC_STEPS // (3 if worse else 1)):
        return None
    rate = number(run.setting("optim.critic_learning_rate"))
    faster = f"={3 * rate:.2g}" if math.isfinite(rate) else ""
    return Finding(
        "critic explains nothing",
        f"The critic explains {explained:.0%} of the variance of the returns after {len(points)} steps, so advantages "
        "are little else than the rewards' noise.",
        "Let it learn first: critic.warmup=10."  # values of one that has never seen a return are noise
        if worse
        else f"Let it learn faster: optim.critic_learning_rate{faster}.",
        {"explained_variance": explained},
        rank=lambda row: abs(known(row.get("advantage"), 0.0)),
    )


def mismatch(run: Run) -> Finding | None:
    """Sampling and training give a token other probabilities, or many weights that correct for it are capped."""
    gap, capped = recent(run.finite("policy/sampling_gap")), recent(run.finite("policy/capped_weights"))
    if not (gap > MOST_GAP or capped > 0.05):
        return None
    share = f"; {capped:.0%} of the weights that correct it are at their cap" if capped > 0 else ""
    return Finding(
        "mismatch",
        f"Log-probabilities of sampling and of training differ by {gap:.2g} a token{share}: the policy that learns is "
        "not the one that wrote.",
        "Sample with the modules that train: generation.engine=hf.",
        {"sampling_gap": gap, "capped_weights": capped},
    )


def nonfinite_steps(run: Run) -> Finding | None:
    """Optimizer steps were lately skipped. The step that a run stopped in has no line: its kept batches tell of it."""
    points = [(0, 0.0), *run.finite("optim/skipped_steps")]
    (since, before), (_, now) = points[-len(recent_points(points[1:])) - 1], points[-1]
    skipped = max(now - before, sum(step >= since for step in run.nonfinite))
    if not skipped > MOST_NONFINITE:
        return None
    rate = number(run.setting("optim.learning_rate"))
    lower = f"optim.learning_rate={rate / 3:.2g}" if math.isfinite(rate) else "a lower optim.learning_rate"
    return Finding(
        "non-finite steps",
        f"{skipped:.0f} optimizer steps after step {since} had a loss or a gradient that is not finite and changed no "
        "weight; the batches are in nonfinite/.",
        f"Take {'model.dtype=float32' if run.setting('model.dtype') == 'float16' else lower}.",
        {"skipped_steps": skipped},
    )


def loss_is_none(run: Run) -> Finding | None:
    """A loss of training or of held-out rows was no finite number in the last ten lines that have it."""
    values: dict[str, list[float]] = {}
    for line in [*run.steps.values()][-500:]:
        for key in (key for key in line if key.endswith("loss")):
            values.setdefault(key, []).append(number(line[key]))
    bad = sorted(key for key, found in values.items() if all(map(math.isnan, found[-10:])))
    if not bad:
        return None
    lines = len(values[bad[0]])
    return Finding(
        "loss is no number",
        f"{', '.join(one_line(key, 40) for key in bad)}: not a finite number in any of the last {min(10, lines)} "
        "lines, so nothing is learnt from it, or it cannot be told whether.",
        "Look for what overflows: model.dtype=float32, and the model's numbers in `tinyrl check`.",
        {"lines": float(lines)},
        kind="eval" if bad[0].startswith("eval/") else "train",
    )


def far_from_teacher(run: Run) -> Finding | None:
    """The teacher finds the policy's own tokens unlikely, so it says of texts that it would never write."""
    said = recent(run.finite("teacher/logprob"))
    if not (said < LEAST_LIKELY and len(run.finite("teacher/logprob")) >= FEWEST_STEPS):
        return None
    return Finding(
        "far from the teacher",
        f"The teacher gives the policy's tokens a probability of {math.exp(said):.1%} (geometric mean): it is asked "
        "about texts that it would never write, where it knows little.",
        "Begin nearer to it: answers of the teacher's first (distill.on_policy=0.5, or `tinyrl train sft` on them).",
        {"teacher_logprob": said},
    )


# Most telling first. Those AT_ONCE compare no windows of the reward.
CHECKS = (
    nonfinite_steps, dropped_rewards, hardly_asked, zero_spread, ceiling, loss_is_none, held_out_falls, reward_conflict,
    far_from_teacher, kl_blow_up, entropy_collapse, length_creep, truncation, idle_critic, mismatch,
)  # fmt: skip
AT_ONCE = (nonfinite_steps, dropped_rewards, hardly_asked, loss_is_none, held_out_falls)
