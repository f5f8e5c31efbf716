"""Find what is wrong with a run: findings with figures, and one setting to change.

A finding is a function of the run's records: it has the condition, the figures, the sentence and the advice; its
docstring says when there is one, here and in docs/runs.md. `find` calls them for `tinyrl doctor RUN` and for the
warnings of a run that is training (Watch). Figures that several share, of windows of steps, are in windows.py.
Thresholds keep a margin to everything seen in runs that go well.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from tinyrl.runs.finding import Finding, counted, found_by, in_words
from tinyrl.runs.metrics import REWARD_STATISTICS
from tinyrl.runs.records import Points, RunRecords, float_or, read_steps, to_float
from tinyrl.runs.resolve import positions_named
from tinyrl.runs.windows import (
    early,
    is_constant,
    is_far_from_reference,
    is_near_top,
    is_solved,
    kl_from_reference,
    kl_per_token,
    largest_std,
    last_quarter,
    mean,
    method_of,
    recent,
    setting,
)
from tinyrl.text import one_line

FEWEST_STEPS = 12  # of training, before windows are compared


# ---- findings that need no windows of the reward ----


def diverged(run: RunRecords) -> Finding | None:
    """The KL blows up, and the held-out reward is below its start by more than the intervals."""
    rewards = run.finite("eval/reward_mean")
    if len(rewards) < 2 or not is_far_from_reference(run):
        return None
    (first_step, start), (last_step, now) = rewards[0], rewards[-1]
    before = run.interval("eval/reward_ci", first_step) or (start, start)
    after = run.interval("eval/reward_ci", last_step) or (now, now)
    if after[1] >= before[0]:
        return None
    kl = kl_from_reference(run)
    return Finding(
        name="diverged",
        what=f"The held-out reward fell from {start:.3g} to {now:.3g} and the KL to the reference is {kl:.3g} nats a "
        "response: the updates are too large.",
        change=f"Take a lower optim.learning_rate: a tenth of {setting(run, 'optim.learning_rate'):.2g}.",
        figures={"held_out_start": start, "held_out": now, "kl": kl},
    )


def nonfinite_steps(run: RunRecords) -> Finding | None:
    """At least three recent optimizer steps were skipped; three in a row stop a run."""
    counts = [(0, 0.0), *run.finite("optim/skipped_steps")]
    since, before = counts[-len(last_quarter(counts[1:])) - 1]
    now = counts[-1][1]
    # The step in which a run stopped has no line; the batches that it wrote to nonfinite/ count its skips.
    kept = [step for step in run.nonfinite if step >= since]
    skipped = max(now - before, len(kept))
    if skipped <= 2:
        return None
    lower_rate = setting(run, "optim.learning_rate") / 3
    return Finding(
        name="non-finite steps",
        what=f"{skipped:.0f} optimizer steps after step {since} had a loss or a gradient that is not finite and "
        "changed no weight; the batches are in nonfinite/.",
        change=f"Take a lower optim.learning_rate, such as {lower_rate:.2g}, and no model.dtype=float16.",
        figures={"skipped_steps": float(skipped), "since": float(since)},
    )


def rewards_dropped(run: RunRecords) -> Finding | None:
    """At least 25 % of the completions got no reward."""
    shares = list[tuple[int, float]]()
    for step, line in run.steps.items():
        dropped = to_float(line.get("reward/dropped"))
        mean_length = float_or(line.get("completion/mean_length"), 0.0)
        completions = to_float(line.get("completion/tokens")) / max(mean_length, 1e-9)
        if dropped >= 0:
            share = 0.0
            if completions >= 1:
                share = min(1.0, dropped / completions)
            elif completions == 0 and dropped > 0:  # every episode failed before a token was sampled
                share = 1.0
            shares.append((step, share))
    share = recent(shares)
    if not share >= 0.25:
        return None
    return Finding(
        name="rewards dropped",
        what=f"{share:.0%} of the completions have no reward: a reward, the environment or the agent failed, or all "
        "scores were None.",
        change="See failed_rewards.jsonl, which has the reasons; without a line there every function returned None.",
        figures={"dropped": share},
    )


def environment_hardly_asked(run: RunRecords) -> Finding | None:
    """Episodes (before training, held-out ones) have 1.2 turns or fewer where more are allowed."""
    in_training = bool(run.finite("environment/turns"))
    turns = recent(run.finite("environment/turns" if in_training else "eval/environment/turns"))
    cut = recent(run.finite("completion/truncated" if in_training else "eval/truncated"))
    allowed = setting(run, "environment.max_turns")
    if run.setting("environment.agent") or not (turns <= 1.2 and allowed >= 2):
        return None
    return Finding(
        name="environment hardly asked",
        what=f"An episode has {turns:.3g} of {allowed:.0f} turns, and {cut:.0%} are cut at generation.max_new_tokens.",
        change="Show how to ask (task.system_prompt, or `tinyrl train sft` on episodes first). Where turns are cut, "
        "let them end: a string that closes a question in generation.stop.",
        figures={"turns": turns, "max_turns": allowed, "turns_cut": cut},
    )


def tools_fail(run: RunRecords) -> Finding | None:
    """In at least 25 % of the turns (before training, held-out ones) a tool raised an exception other than
    `ValueError`.
    """
    place = "environment" if run.finite("environment/turns") else "eval/environment"
    errors = recent(run.finite(f"{place}/tool_errors"))
    turns = recent(run.finite(f"{place}/turns"))
    if not (errors > 0 and errors >= 0.25 * turns):
        return None
    return Finding(
        name="tools fail",
        what=f"In {errors / turns:.0%} of the turns a tool raised an exception of its own, which the policy reads as a "
        "failed call and its episode is scored with.",
        change="Read the replies (tinyrl show RUN --samples), and mend the tool or what it asks. Where that may be "
        "down, raise tinyrl.DropEpisode there, so that no episode is scored for it; where the policy's arguments are "
        "at fault, a ValueError.",
        figures={"tool_errors": errors, "turns": turns},
    )


def train_up_held_out_down(run: RunRecords) -> Finding | None:
    """While training improved, the held-out reward fell below its best by more than its interval, or the held-out loss
    rose above it.
    """
    return _overfitted_reward(run) or _overfitted_loss(run)


def _overfitted_reward(run: RunRecords) -> Finding | None:
    train = run.finite("reward/mean")
    held_out = run.finite("eval/reward_mean")
    if len(held_out) < 3 or len(train) < FEWEST_STEPS:
        return None
    best_step, best = max(held_out, key=lambda point: (point[1], point[0]))
    last_step, last = held_out[-1]
    interval = run.interval("eval/reward_ci", last_step)
    margin = (interval[1] - interval[0]) / 2 if interval else 0.05 * abs(best)
    then = _mean_around(train, best_step)
    now = recent(train)
    scale = max(abs(then), float_or(early(run.finite("reward/std")), 0.0))
    if not (best - last > margin and now - then > 0.05 * scale):
        return None
    return _overfitted("reward", best=(best_step, best), last=(last_step, last), train=(then, now))


def _overfitted_loss(run: RunRecords) -> Finding | None:
    train = run.finite("loss")
    held_out = run.finite("eval/loss")
    if len(held_out) < 3 or len(train) < FEWEST_STEPS:
        return None
    best_step, best = min(held_out, key=lambda point: (point[1], -point[0]))
    last_step, last = held_out[-1]
    then = _mean_around(train, best_step)
    now = recent(train)
    if not (last - best > 0.05 * abs(best) and then - now > 0.05 * abs(then)):
        return None
    return _overfitted("loss", best=(best_step, best), last=(last_step, last), train=(then, now))


def _mean_around(points: Points, step: int) -> float:
    """Return the mean of the five points nearest to a step."""
    return mean(sorted(points, key=lambda point: abs(point[0] - step))[:5])


def _overfitted(
    measure: str, *, best: tuple[int, float], last: tuple[int, float], train: tuple[float, float]
) -> Finding:
    best_step, best_value = best
    last_step, last_value = last
    then, now = train
    return Finding(
        name="train up, held-out down",
        what=f"The held-out {measure} was {best_value:.3g} at step {best_step} and is {last_value:.3g} at step "
        f"{last_step}, while that of training went from {then:.3g} to {now:.3g}.",
        change=f"Take a checkpoint of about step {best_step}; tinyrl show RUN lists those there are.",
        figures={
            "best": best_value,
            "best_step": float(best_step),
            "last": last_value,
            "last_step": float(last_step),
            "train_then": then,
            "train": now,
        },
    )


# ---- findings that compare windows ----


def constant_reward(run: RunRecords) -> Finding | None:
    """Every completion of the run has the same reward, and the verifier does not call it right."""
    if not is_constant(run):
        return None
    reward = recent(run.finite("reward/mean"))
    return Finding(
        name="constant reward",
        what=f"Every completion has had the same reward in each step, {reward:.3g}, so nothing was learned.",
        change="Correct the reward function: `tinyrl check` scores right and wrong answers with it. Where it is right, "
        "take easier prompts, or give rewards in steps.",
        figures={"reward": reward},
    )


def zero_spread_groups(run: RunRecords) -> Finding | None:
    """At least 75 % of the groups have equal rewards, far from the top."""
    share = recent(run.finite("reward/zero_spread_groups"))
    if not share >= 0.75 or is_near_top(run) or is_constant(run):
        return None
    reward = recent(run.finite("reward/mean"))
    easier = "easier prompts, or a reward that is given in steps."
    change = f"Take {easier}"
    if method_of(run) == "grpo":
        fresh = "Replace such groups by fresh prompts: grpo.dynamic_sampling_rounds=2"
        change = f"{fresh}. Where the reward is near its lowest: {easier}"
    return Finding(
        name="zero-spread groups",
        what=f"{share:.0%} of the groups have the same reward for all their completions, which teaches nothing; the "
        f"mean reward is {reward:.3g}.",
        change=change,
        figures={"zero_spread_groups": share, "reward": reward},
    )


def reward_at_its_ceiling(run: RunRecords) -> Finding | None:
    """90 % of the groups have equal rewards and are solved; without groups, the reward is 0.98 or hardly varies."""
    share = recent(run.finite("reward/zero_spread_groups"))
    reward = recent(run.finite("reward/mean"))
    std = recent(run.finite("reward/std"))
    hardly_differs = is_near_top(run) and std <= 0.1 * largest_std(run)
    if math.isnan(share):
        at_ceiling = hardly_differs or (is_solved(run) and reward >= 0.98)
    else:
        at_ceiling = share >= 0.9 and is_near_top(run)
    if not at_ceiling or is_constant(run):
        return None
    return Finding(
        name="reward at its ceiling",
        what=f"The reward is {reward:.3g} with a standard deviation of {std:.2g}: there is hardly anything left to "
        "learn here.",
        change="Go on with harder prompts, or with task.sampler=difficulty, which draws solved ones seldom.",
        figures={"reward": reward, "reward_std": std},
    )


def one_reward_up_another_down(run: RunRecords) -> Finding | None:
    """One reward function rose and another fell, by a tenth of their size and four standard errors; or the held-out
    reward rose and the verifier fell.
    """
    moves = _moves_of_functions(run)
    if not moves or not min(moves.values()) < 0 < max(moves.values()):
        return _reward_up_verifier_down(run)
    up = max(moves, key=lambda name: moves[name])
    down = min(moves, key=lambda name: moves[name])
    risen = run.finite(f"reward/{up}")
    fallen = run.finite(f"reward/{down}")
    fallen_name = one_line(down, 40)
    return _one_up_another_down(
        one_line(up, 40),
        fallen_name,
        rise=(early(risen), recent(risen)),
        fall=(early(fallen), recent(fallen)),
        change=f"Give {fallen_name} a larger weight in reward.functions.",
    )


def _moves_of_functions(run: RunRecords) -> dict[str, float]:
    """Return by how much reward functions moved, of those that did by a tenth of their size and beyond the noise. The
    fall of one with a negative weight is a rise.
    """
    functions = run.setting("reward.functions")
    punished = set[str]()
    for function in functions if isinstance(functions, list) else []:
        if isinstance(function, dict) and to_float(function.get("weight")) < 0:
            punished.add(str(function.get("use")).rpartition(":")[2])
    keys = set[str]().union(*[*run.steps.values()][-FEWEST_STEPS:])
    moves: dict[str, float] = {}
    for key in sorted(keys - REWARD_STATISTICS):
        points = run.finite(key)
        if not key.startswith("reward/") or len(points) < FEWEST_STEPS:
            continue
        last = last_quarter(points)
        change = mean(last) - early(points)
        squares = fmean((after - before) ** 2 for (_, before), (_, after) in pairwise(last))
        standard_error = math.sqrt(squares / 2 / len(last))
        if abs(change) > max(0.1 * max(abs(value) for _, value in points), 4 * standard_error):
            name = key.removeprefix("reward/")
            moves[name] = -change if name in punished else change
    return moves


def _reward_up_verifier_down(run: RunRecords) -> Finding | None:
    """The held-out reward rose beyond its intervals while the task's verifier, which scores from 0 to 1, fell by two
    standard errors (of independent scores with the largest variance there can be).
    """
    reward = run.finite("eval/reward_mean")
    verifier = run.finite("eval/verifier_mean")
    if len(reward) < 2 or len(verifier) < 2:
        return None
    first = run.interval("eval/reward_ci", reward[0][0])
    last = run.interval("eval/reward_ci", reward[-1][0])
    if first is None or last is None or last[0] <= first[1]:
        return None
    before = verifier[0][1]
    last_step, after = verifier[-1]
    if not 0 <= after < before <= 1:
        return None
    variance = before * (1 - before) + after * (1 - after)
    prompts = float_or(run.steps[last_step].get("eval/num_prompts"), 1.0)
    if before - after <= 2 * math.sqrt(variance / prompts):
        return None
    return _one_up_another_down(
        "The held-out reward",
        "the task's verifier",
        rise=(reward[0][1], reward[-1][1]),
        fall=(before, after),
        change="Read completions (tinyrl show RUN), and reward what the verifier judges.",
    )


def _one_up_another_down(
    up: str, down: str, *, rise: tuple[float, float], fall: tuple[float, float], change: str
) -> Finding:
    return Finding(
        name="one reward up, another down",
        what=f"{up} went from {rise[0]:.3g} to {rise[1]:.3g} while {down} went from {fall[0]:.3g} to {fall[1]:.3g}: "
        "the policy may be gaming the first.",
        change=change,
        figures={"up_from": rise[0], "up_to": rise[1], "down_from": fall[0], "down_to": fall[1]},
    )


def far_from_the_teacher(run: RunRecords) -> Finding | None:
    """The teacher's (geometric) mean probability of the policy's tokens is below 5 %."""
    points = run.finite("teacher/logprob")
    logprob = recent(points)
    if len(points) < FEWEST_STEPS or not logprob < -3:
        return None
    probability = math.exp(logprob)
    change = "Begin nearer to it: `tinyrl train sft` on answers of the teacher's first."
    if method_of(run) == "distill":
        change = (
            "Begin nearer to it: answers of the teacher's first (distill.on_policy_fraction=0.5, or `tinyrl train sft` "
            "on them)."
        )
    return Finding(
        name="far from the teacher",
        what=f"The teacher gives the policy's tokens a probability of {probability:.1%} (geometric mean): it scores "
        "texts that it would never write, where it knows little.",
        change=change,
        figures={"teacher_probability": probability},
    )


def kl_blow_up(run: RunRecords) -> Finding | None:
    """The policy is 10 nats per response and half a nat per token from its reference."""
    if not is_far_from_reference(run):
        return None
    kl = kl_from_reference(run)
    per_token = kl_per_token(run)
    section = method_of(run)
    present = float_or(run.setting(f"{section}.kl_coef"), 0.0)
    advised = 2 * present or 0.02
    return Finding(
        name="KL blow-up",
        what=f"The KL to the reference is {kl:.3g} nats per response ({per_token:.2g} per token): the text is no "
        "longer that of the model it started from.",
        change=f"Hold it closer: {section}.kl_coef={advised:.3g}.",
        figures={"kl": kl, "kl_per_token": per_token},
    )


def entropy_collapse(run: RunRecords) -> Finding | None:
    """The entropy is below a tenth of its start, with prompts unsolved."""
    entropy = run.finite("policy/entropy")
    start = early(entropy[:5])
    now = recent(entropy)
    if is_solved(run) or not now < 0.1 * start:
        return None
    reward = recent(run.finite("reward/mean"))
    return Finding(
        name="entropy collapse",
        what=f"The entropy has fallen from {start:.3g} to {now:.2g} nats per token, with the reward at {reward:.3g}: "
        "samples hardly differ, so nothing better can be found.",
        change=f"Keep some of it, from an earlier checkpoint on: {method_of(run)}.entropy_coef=0.01.",
        figures={"entropy_start": start, "entropy": now, "reward": reward},
    )


def length_creep(run: RunRecords) -> Finding | None:
    """Completions are half as long again as at the start and still growing, and the reward is not."""
    lengths = run.finite("completion/mean_length")
    rewards = run.finite("reward/mean")
    start = early(lengths)
    now = recent(lengths)
    growth = now / max(early(lengths, halfway=True), 1e-9) - 1
    gain = recent(rewards) - early(rewards, halfway=True)
    reward_grows = not gain < 0.1 * early(run.finite("reward/std"))
    if reward_grows or not (now >= 1.5 * start and growth >= 0.3):
        return None
    return Finding(
        name="length creep",
        what=f"Completions have grown from {start:.0f} to {now:.0f} tokens, by {growth:.0%} since halfway, while the "
        f"reward changed by {gain:+.2g} since then.",
        change="Charge for length: a reward function of len(completion_ids), with a small negative weight.",
        figures={"length_start": start, "length": now, "growth": growth, "reward_gain": gain},
    )


def truncation(run: RunRecords) -> Finding | None:
    """At least 20 % of the completions are cut at `generation.max_new_tokens`."""
    share = recent(run.finite("completion/truncated"))
    if not share >= 0.2:
        return None
    limit = setting(run, "generation.max_new_tokens")
    positions = positions_named(str(run.setting("model.path")))
    longer = f"Raise the limit: generation.max_new_tokens={2 * limit:.0f}"
    if positions is not None and 2 * limit >= positions:
        longer = f"Ask for shorter answers, or take a model with more than {positions:,} positions"
    if run.setting("environment.agent"):
        return Finding(
            name="truncation",
            what=f"{share:.0%} of the episodes have a conversation that is cut off, by environment.max_call_tokens or "
            f"generation.max_new_tokens={limit:.0f}, and are scored as they stand.",
            change=f"{longer}. Each call may have an equal share of it, or environment.max_call_tokens, where one "
            "call needs more than the others.",
            figures={"truncated": share, "max_new_tokens": limit},
        )
    return Finding(
        name="truncation",
        what=f"{share:.0%} of the completions are cut off at {limit:.0f} tokens (generation.max_new_tokens) before "
        "they end, and are scored as they stand.",
        change=f"{longer}. Where nearly all are cut, see whether this model writes its end-of-text token: tinyrl "
        "check.",
        figures={"truncated": share, "max_new_tokens": limit},
    )


def critic_explains_nothing(run: RunRecords) -> Finding | None:
    """The explained variance is below 0.02 after 60 steps, or below -0.2 after 20."""
    points = run.finite("value/explained_variance")
    steps = len(points)
    explained = recent(points)
    limit = 0.02 if steps >= 60 else -0.2
    if steps < 20 or not explained < limit:
        return None
    faster = 3 * setting(run, "optim.critic_learning_rate")
    return Finding(
        name="critic explains nothing",
        what=f"The critic explains {explained:.0%} of the variance of the returns after {steps} steps, so advantages "
        "are little else than the rewards' noise.",
        change=f"Let it learn first (critic.warmup_steps=10) or faster (optim.critic_learning_rate={faster:.2g}).",
        figures={"explained_variance": explained, "critic_steps": float(steps)},
    )


def mismatch(run: RunRecords) -> Finding | None:
    """Log-probabilities of sampling and training differ by 0.05 per token (0.01 is normal in bfloat16), or 5 % of the
    weights are capped.
    """
    gap = recent(run.finite("policy/sampling_gap"))
    capped = float_or(recent(run.finite("policy/capped_weights")), 0.0)
    if not (gap > 0.05 or capped > 0.05):
        return None
    return Finding(
        name="mismatch",
        what=f"Log-probabilities of sampling and of training differ by {gap:.2g} per token, and {capped:.0%} of the "
        "weights that correct it are at their cap: the policy that learns is not the one that wrote.",
        change="Sample with the modules that train: generation.engine=hf.",
        figures={"sampling_gap": gap, "capped_weights": capped},
    )


# Most telling first.
AT_ONCE = (nonfinite_steps, rewards_dropped, environment_hardly_asked, tools_fail, train_up_held_out_down)
AFTER_SOME_STEPS = (
    constant_reward,
    zero_spread_groups,
    reward_at_its_ceiling,
    one_reward_up_another_down,
    far_from_the_teacher,
    kl_blow_up,
    entropy_collapse,
    length_creep,
    truncation,
    critic_explains_nothing,
    mismatch,
)

# What a distillation, which learns from its teacher's log-probabilities and is to leave its start, does not have.
OF_REWARDED = (
    constant_reward,
    zero_spread_groups,
    reward_at_its_ceiling,
    kl_blow_up,
    entropy_collapse,
    length_creep,
)


def find(run: RunRecords) -> list[Finding]:
    """Return what is wrong with a run by its metrics; [] for one that goes well, or is too short."""
    if (finding := diverged(run)) is not None:
        return [finding]  # the others are its consequences
    has_windows = len(run.finite("reward/mean")) >= FEWEST_STEPS
    checks = (*AT_ONCE, *AFTER_SOME_STEPS) if has_windows else AT_ONCE
    if method_of(run) == "distill":
        checks = tuple(check for check in checks if check not in OF_REWARDED)
    return found_by(checks, run)


class Watch:
    """The findings of a run while it trains, each reported once. Looks get farther apart as its record grows."""

    def __init__(self, record: Path, config: dict[str, Any]) -> None:
        self._record = record
        self._config = config
        self._next = 0
        self._warned = set[str]()

    def look(self, step: int) -> list[str]:
        """Read metrics.jsonl, which ends with `step`, where a look is due; return a warning for each new finding."""
        if step < self._next or not self._record.is_file():
            return []
        self._next = step + max(5, step // 20)
        found = find(RunRecords(self._record.parent, read_steps(self._record, []), self._config))
        new = [one for one in found if one.name not in self._warned]
        self._warned |= {one.name for one in new}
        return [f"{one.name}: {one.what} {one.change}" for one in new]


def render(run: RunRecords, found: list[Finding]) -> str:
    """Write findings as text for a terminal."""
    steps = "1 step" if run.last_step == 1 else f"{run.last_step:,} steps"
    if found:
        head = f"{run.name}: {steps}, {counted(found)}"
        return "\n\n".join([head, *in_words(found), "Completions: tinyrl show RUN --worst"])
    is_short = 0 < len(run.finite("reward/mean")) < FEWEST_STEPS
    more = f"; most findings need {FEWEST_STEPS} steps" if is_short else ""
    return f"{run.name}: {steps}, nothing found{more}."
