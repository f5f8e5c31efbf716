"""Find what is wrong with a run: findings with figures, and one setting to change.

TABLE has a rule for each: name, condition, sentence, change. `find` evaluates it on figures of metrics.jsonl, for
`tinyrl doctor RUN` and for the warnings of a run that is training (Watch). Windows: the first tenth of the steps (5 to
25) against the last quarter (10 to 50). Thresholds keep a margin to everything seen in runs that go well.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from string import Formatter
from types import SimpleNamespace
from typing import Any, NamedTuple

from tinyrl.runs.metrics import REWARD_STATISTICS
from tinyrl.runs.records import Points, RunRecords, float_or, json_safe, read_steps, to_float
from tinyrl.text import escape_control, one_line

FEWEST_STEPS = 12  # of training, before windows are compared
Figures = SimpleNamespace


@dataclass(frozen=True)
class Finding:
    """A finding: `what` is a sentence with figures, `change` one thing to change."""

    name: str
    what: str
    change: str
    figures: dict[str, float]


# ---- figures ----


def mean(points: Points) -> float:
    return fmean(value for _, value in points) if points else math.nan


def early(points: Points, *, halfway: bool = False) -> float:
    """Return the mean of the first tenth of the points, 5 to 25 of them; halfway: of those before the middle."""
    size = min(25, max(5, len(points) // 10))
    start = max(0, len(points) // 2 - size) if halfway else 0
    return mean(points[start : start + size])


def last_quarter(points: Points) -> Points:
    """Return the last quarter of the points, 10 to 50 of them."""
    return points[-min(50, max(10, len(points) // 4)) :]


def recent(points: Points) -> float:
    return mean(last_quarter(points))


def figures(run: RunRecords) -> Figures:
    """Compute the figures of TABLE. A missing metric or setting gives NaN, for which no condition holds."""
    points, setting = run.finite, lambda name: to_float(run.setting(name))
    means, std, lengths = points("reward/mean"), points("reward/std"), points("completion/mean_length")
    f = Figures(steps=len(means), section=run.setting("method") or "grpo", agent=run.setting("environment.agent"))

    # A reward between 0 and 1 is solved at 0.9; on another scale the top is a deviation above the start.
    f.reward, f.reward_std, f.largest_std = recent(means), recent(std), max((value for _, value in std), default=0.0)
    of_unit_scale = all(0 <= value <= 1 for _, value in means) and early(std) <= 0.6
    f.solved = of_unit_scale and f.reward >= 0.9
    f.near_top = f.solved or (not of_unit_scale and f.reward > early(means) + early(std))
    f.zero_spread_groups = recent(points("reward/zero_spread_groups"))
    verified = points("eval/verifier_mean")
    f.verifier = verified[-1][1] if verified else math.nan
    f.constant = bool(std) and f.largest_std < 1e-6 and not (f.solved and not f.verifier < 0.9)
    even = (f.solved and f.reward >= 0.98) or (f.near_top and f.reward_std <= 0.1 * f.largest_std)
    by_group = even if math.isnan(f.zero_spread_groups) else f.zero_spread_groups >= 0.9 and f.near_top
    f.at_ceiling = by_group and not f.constant

    f.truncated, f.max_new_tokens = recent(points("completion/truncated")), setting("generation.max_new_tokens")
    f.doubled = 2 * f.max_new_tokens
    f.length_start, f.length = early(lengths), recent(lengths)
    f.growth = f.length / max(early(lengths, halfway=True), 1e-9) - 1
    f.reward_gain, f.little_gain = f.reward - early(means, halfway=True), 0.1 * early(std)

    shares = []  # of a step's completions, counted by their tokens
    for step, line in run.steps.items():
        count = to_float(line.get("completion/tokens")) / max(float_or(line.get("completion/mean_length"), 0.0), 1e-9)
        if (dropped := to_float(line.get("reward/dropped"))) >= 0:
            shares.append((step, min(1.0, dropped / count) if count >= 1 else 0.0))
    f.dropped = recent(shares)

    before = "" if points("environment/turns") else "eval/"  # before training: held-out episodes
    f.turns, f.max_turns = recent(points(f"{before}environment/turns")), setting("environment.max_turns")
    f.turns_cut = recent(points(f"{before or 'completion/'}truncated"))

    f.entropy_start, f.entropy = early(points("policy/entropy")[:5]), recent(points("policy/entropy"))
    kl = points("objective/kl") or points("eval/kl")
    f.kl = recent(kl) if len(kl) > 10 else kl[-1][1] if kl else math.nan
    f.kl_per_token = f.kl / max(f.length, 1e-9)
    f.learning_rate = setting("optim.learning_rate")
    f.kl_coef = 2 * float_or(run.setting(f"{f.section}.kl_coef"), 0.0) or 0.02
    f.sampling_gap = recent(points("policy/sampling_gap"))
    f.capped_weights = float_or(recent(points("policy/capped_weights")), 0.0)

    explained, teacher = points("value/explained_variance"), points("teacher/logprob")
    f.explained_variance, f.critic_steps = recent(explained), len(explained)
    f.critic_rate, f.lower_rate = 3 * setting("optim.critic_learning_rate"), f.learning_rate / 3
    f.teacher_logprob = recent(teacher) if len(teacher) >= FEWEST_STEPS else math.nan
    f.teacher_probability = math.exp(f.teacher_logprob)

    # The step in which a run stopped has no line; the batches that it wrote to nonfinite/ count its skips.
    skipped = [(0, 0.0), *points("optim/skipped_steps")]
    (f.since, first), (_, now) = skipped[-len(last_quarter(skipped[1:])) - 1], skipped[-1]
    f.skipped_steps = max(now - first, sum(step >= f.since for step in run.nonfinite))

    compare_held_out(run, f)
    compare_functions(run, f)
    return f


def compare_held_out(run: RunRecords, f: Figures) -> None:
    """Set `diverged` where the held-out reward is below its start by more than the intervals, far from the reference;
    and `fell` to "reward" or "loss" where the held-out one is worse than its best, by more than its confidence
    interval, while that of training went on improving; else to "".
    """
    rewards = run.finite("eval/reward_mean")
    intervals = [run.interval("eval/reward_ci", step) or (value, value) for step, value in rewards]
    f.diverged = len(rewards) > 1 and intervals[-1][1] < intervals[0][0] and f.kl >= 10 and f.kl_per_token >= 0.5
    f.held_out_start, f.held_out = (rewards[0][1], rewards[-1][1]) if rewards else (math.nan, math.nan)
    f.fell = ""
    kinds = (("loss", "loss", "eval/loss", -1), ("reward", "reward/mean", "eval/reward_mean", 1))
    for fell, trained, held, sign in kinds:
        train, held_out = run.finite(trained), run.finite(held)
        if len(held_out) < 3 or len(train) < FEWEST_STEPS:
            continue
        at, best = max(held_out, key=lambda point: (sign * point[1], point[0]))
        last_step, last = held_out[-1]
        then, now = mean(sorted(train, key=lambda point: abs(point[0] - at))[:5]), recent(train)
        interval = run.interval("eval/reward_ci", last_step) if sign > 0 else None
        margin = (interval[1] - interval[0]) / 2 if interval else 0.05 * abs(best)
        scale = max(abs(then), float_or(early(run.finite("reward/std")), 0.0) if sign > 0 else 0.0)
        if sign * (best - last) > margin and sign * (now - then) > 0.05 * scale:
            f.fell, f.best_step, f.best, f.last_step, f.last = fell, at, best, last_step, last
            f.train_then, f.train = then, now


def compare_functions(run: RunRecords, f: Figures) -> None:
    """Set `up` and `down` to the reward functions that rose and fell most, by a tenth of their size and beyond the
    noise; "" where none does both. The fall of one with a negative weight is a rise.
    """
    functions = run.setting("reward.functions")
    functions = [each for each in functions if isinstance(each, dict)] if isinstance(functions, list) else []
    punished = {str(each.get("use")).rpartition(":")[2] for each in functions if to_float(each.get("weight")) < 0}
    moves: dict[str, float] = {}
    keys = {key for line in [*run.steps.values()][-FEWEST_STEPS:] for key in line if key.startswith("reward/")}
    for key in sorted(keys - REWARD_STATISTICS):
        points, name = run.finite(key), key.removeprefix("reward/")
        if len(points) < FEWEST_STEPS:
            continue
        last, change = last_quarter(points), recent(points) - early(points)
        noise = math.sqrt(fmean((b - a) ** 2 for (_, a), (_, b) in pairwise(last)) / 2 / len(last))  # standard error
        if abs(change) > max(0.1 * max(abs(value) for _, value in points), 4 * noise):
            moves[name] = -change if name in punished else change
    f.up = f.down = ""
    if moves and min(moves.values()) < 0 < max(moves.values()):
        f.up, f.down = max(moves, key=lambda name: moves[name]), min(moves, key=lambda name: moves[name])
        f.up_name, f.down_name = one_line(f.up, 40), one_line(f.down, 40)
        up, down = run.finite(f"reward/{f.up}"), run.finite(f"reward/{f.down}")
        f.up_from, f.up_to, f.down_from, f.down_to = early(up), recent(up), early(down), recent(down)
        f.remedy = f"Give {f.down_name} a larger weight in reward.functions"
    else:
        compare_verifier(run, f)


def compare_verifier(run: RunRecords, f: Figures) -> None:
    """Set `up` and `down` where the held-out reward rose beyond its intervals while the task's verifier, which scores
    from 0 to 1, fell by two standard errors (of independent scores with the largest variance there can be).
    """
    reward, verifier = run.finite("eval/reward_mean"), run.finite("eval/verifier_mean")
    if len(reward) < 2 or len(verifier) < 2:
        return
    first, last = (run.interval("eval/reward_ci", points[0]) for points in (reward[0], reward[-1]))
    before, after = verifier[0][1], verifier[-1][1]
    if first is None or last is None or last[0] <= first[1] or not (0 <= after < before <= 1):
        return
    variance = before * (1 - before) + after * (1 - after)
    prompts = float_or(run.steps[verifier[-1][0]].get("eval/num_prompts"), 1.0)
    if before - after > 2 * math.sqrt(variance / prompts):
        f.up, f.up_name, f.up_from, f.up_to = "reward", "The held-out reward", reward[0][1], reward[-1][1]
        f.down, f.down_name, f.down_from, f.down_to = "verifier", "the task's verifier", before, after
        f.remedy = "Read completions (tinyrl show RUN), and reward what the verifier judges"


# ---- the table ----


class Rule(NamedTuple):
    """`what` and `change` are formatted with the figures; at_once: no windows of the reward are compared."""

    name: str
    when: Callable[[Figures], bool]
    what: str
    change: str
    at_once: bool = False

    def finding(self, f: Figures) -> Finding:
        named = [name for _, name, _, _ in Formatter().parse(self.what) if name]
        numbers = {name: float(value) for name in named if isinstance(value := getattr(f, name), int | float)}
        return Finding(self.name, self.what.format_map(vars(f)), self.change.format_map(vars(f)), numbers)


TABLE = (  # most telling first
    Rule("diverged", lambda f: f.diverged,
        "The held-out reward fell from {held_out_start:.3g} to {held_out:.3g} and the KL to the reference is {kl:.3g} "
        "nats a response: the updates are too large.",
        "Take a lower optim.learning_rate: a tenth of {learning_rate:.2g}.", at_once=True),
    Rule("non-finite steps", lambda f: f.skipped_steps > 2,  # three in a row stop a run
        "{skipped_steps:.0f} optimizer steps after step {since} had a loss or a gradient that is not finite and "
        "changed no weight; the batches are in nonfinite/.",
        "Take a lower optim.learning_rate, such as {lower_rate:.2g}, and no model.dtype=float16.", at_once=True),
    Rule("rewards dropped", lambda f: f.dropped >= 0.25,
        "{dropped:.0%} of the completions have no reward: its functions failed, or returned None.",
        "See failed_rewards.jsonl, which has the reasons; without a line there every function returned None.",
        at_once=True),
    Rule("environment hardly asked", lambda f: f.turns <= 1.2 and f.max_turns >= 2 and not f.agent,
        "An episode has {turns:.3g} of {max_turns:.0f} turns, and {turns_cut:.0%} are cut at "
        "generation.max_new_tokens.",
        "Show how to ask (task.system_prompt, or `tinyrl train sft` on episodes first). Where turns are cut, let them "
        "end: a string that closes a question in generation.stop.", at_once=True),
    Rule("constant reward", lambda f: f.constant,
        "Every completion has had the same reward in each step, {reward:.3g}, so nothing was learned.",
        "Correct the reward function: `tinyrl check` scores right and wrong answers with it. Where it is right, take "
        "easier prompts, or give rewards in steps."),
    Rule("zero-spread groups", lambda f: f.zero_spread_groups >= 0.75 and not f.near_top and not f.constant,
        "{zero_spread_groups:.0%} of the groups have the same reward for all their completions, which teaches nothing; "
        "the mean reward is {reward:.3g}.",
        "Replace such groups by fresh prompts: grpo.dynamic_sampling_rounds=2. Where the reward is near its lowest: "
        "easier prompts, or a reward that is given in steps."),
    Rule("reward at its ceiling", lambda f: f.at_ceiling,
        "The reward is {reward:.3g} with a spread of {reward_std:.2g}: there is hardly anything left to learn here.",
        "Go on with harder prompts, or with task.sampler=difficulty, which draws solved ones seldom."),
    Rule("train up, held-out down", lambda f: bool(f.fell),
        "The held-out {fell} was {best:.3g} at step {best_step} and is {last:.3g} at step {last_step}, while that of "
        "training went from {train_then:.3g} to {train:.3g}.",
        "Take a checkpoint of about step {best_step}; tinyrl show RUN lists those there are.",
        at_once=True),
    Rule("one reward up, another down", lambda f: bool(f.up),
        "{up_name} went from {up_from:.3g} to {up_to:.3g} while {down_name} went from {down_from:.3g} to "
        "{down_to:.3g}: the policy may be gaming the first.",
        "{remedy}."),
    Rule("far from the teacher", lambda f: f.teacher_logprob < -3,  # 5 %
        "The teacher gives the policy's tokens a probability of {teacher_probability:.1%} (geometric mean): it scores "
        "texts that it would never write, where it knows little.",
        "Begin nearer to it: answers of the teacher's first (distill.on_policy_fraction=0.5, or `tinyrl train sft` on "
        "them)."),
    Rule("KL blow-up", lambda f: f.kl >= 10 and f.kl_per_token >= 0.5,
        "The KL to the reference is {kl:.3g} nats a response ({kl_per_token:.2g} a token): the text is no longer that "
        "of the model it started from.", "Hold it closer: {section}.kl_coef={kl_coef:.3g}."),
    Rule("entropy collapse", lambda f: f.entropy < 0.1 * f.entropy_start and not f.solved,
        "The entropy has fallen from {entropy_start:.3g} to {entropy:.2g} nats a token, with the reward at "
        "{reward:.3g}: samples hardly differ, so nothing better can be found.",
        "Keep some of it, from an earlier checkpoint on: {section}.entropy_coef=0.01."),
    Rule("length creep",
        lambda f: f.length >= 1.5 * f.length_start and f.growth >= 0.3 and f.reward_gain < f.little_gain,
        "Completions have grown from {length_start:.0f} to {length:.0f} tokens, by {growth:.0%} since halfway, while "
        "the reward changed by {reward_gain:+.2g} since then.",
        "Charge for length: a reward function of len(completion_ids), with a small negative weight."),
    Rule("truncation", lambda f: f.truncated >= 0.2,
        "{truncated:.0%} of the completions are cut off at {max_new_tokens:.0f} tokens (generation.max_new_tokens) "
        "before they end, and are scored as they stand.",
        "Raise the limit: generation.max_new_tokens={doubled:.0f}. Where nearly all are cut, see whether this model "
        "writes its end-of-text token: tinyrl check."),
    Rule("critic explains nothing",
        lambda f: f.explained_variance < (0.02 if f.critic_steps >= 60 else -0.2) and f.critic_steps >= 20,
        "The critic explains {explained_variance:.0%} of the variance of the returns after {critic_steps} steps, so "
        "advantages are little else than the rewards' noise.",
        "Let it learn first (critic.warmup_steps=10) or faster (optim.critic_learning_rate={critic_rate:.2g})."),
    Rule("mismatch", lambda f: f.sampling_gap > 0.05 or f.capped_weights > 0.05,  # in bfloat16 the gap is some 0.01
        "Log-probabilities of sampling and of training differ by {sampling_gap:.2g} a token, and {capped_weights:.0%} "
        "of the weights that correct it are at their cap: the policy that learns is not the one that wrote.",
        "Sample with the modules that train: generation.engine=hf."),
)  # fmt: skip


def find(run: RunRecords) -> list[Finding]:
    """Return what is wrong with a run by its metrics; [] for one that goes well, or is too short."""
    f = figures(run)
    found = [rule.finding(f) for rule in TABLE if (rule.at_once or f.steps >= FEWEST_STEPS) and rule.when(f)]
    return found[:1] if f.diverged else found  # the others are its consequences


class Watch:
    """The findings of a run while it trains, each reported once. Looks get farther apart as its record grows."""

    def __init__(self, record: Path, config: dict[str, Any]) -> None:
        self._record, self._config = record, config
        self._next, self._warned = 0, set[str]()

    def look(self, step: int) -> list[str]:
        """Read metrics.jsonl, which ends with `step`, where a look is due; return a warning for each new finding."""
        if step < self._next or not self._record.is_file():
            return []
        self._next = step + max(5, step // 20)
        found = find(RunRecords(self._record.parent, read_steps(self._record, []), self._config))
        new = [one for one in found if one.name not in self._warned]
        self._warned |= {one.name for one in new}
        return [f"{one.name}: {one.what} {one.change}" for one in new]


# ---- as text and JSON ----


def as_json(found: list[Finding]) -> list[dict[str, Any]]:
    return [
        {"finding": one.name, "what": one.what, "figures": json_safe(one.figures), "change": one.change}
        for one in found
    ]


def render(run: RunRecords, found: list[Finding]) -> str:
    last = f"{run.name}: {run.last_step:,} step{'s' * (run.last_step != 1)}"
    if found:
        return "\n\n".join([f"{last}, {counted(found)}", *in_words(found), "Completions: tinyrl show RUN --worst"])
    short = 0 < len(run.finite("reward/mean")) < FEWEST_STEPS
    return f"{last}, nothing found{f'; most findings need {FEWEST_STEPS} steps' * short}."


def counted(found: list[Finding]) -> str:
    return f"{len(found)} finding{'s' * (len(found) != 1)}"


def columns() -> int:
    """Return the columns of the terminal, 60 to 110."""
    return max(60, min(shutil.get_terminal_size().columns, 110))


def in_words(found: list[Finding]) -> Iterator[str]:
    """Yield a paragraph for each finding."""
    wrap = partial(textwrap.wrap, width=columns(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    for one in found:
        yield "\n".join(map(escape_control, [one.name, *wrap(one.what), *wrap(f"Change: {one.change}")]))
