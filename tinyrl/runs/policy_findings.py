"""Findings about the policy and the critic: entropy, KL, held-out scores, explained variance, mismatch of sampling; and
numbers that are none, which any method may have from its first step on.
"""

from __future__ import annotations

import math
from statistics import fmean

from tinyrl.runs.finding import FEWEST_STEPS, Finding, early, known, recent, recent_points, solved
from tinyrl.runs.records import Points, Run, number
from tinyrl.text import one_line

MOST_GAP = 0.05  # mean difference of log-probabilities; bfloat16 with other kernels comes to some 0.01
MOST_KL = 10.0  # nats per response, and half a nat per token
MOST_NONFINITE = 2  # optimizer steps that were skipped lately; three in a row stop a run
CRITIC_STEPS = 60  # after which a critic should explain something; a third of that where it is worse than none


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
        f"Keep some of it, from an earlier checkpoint on: {section}.entropy_target={start / 2:.2g}.",
        {"entropy_start": start, "entropy": end},
        rank=lambda row: -abs(known(row.get("advantage"), 1.0)),
    )


def kl_blow_up(run: Run) -> Finding | None:
    """The policy is far from its reference: 10 nats a response and half a nat a token."""
    points = run.finite("objective/kl") or run.finite("eval/kl")
    lengths = run.finite("completion/mean_length")
    if not points or not lengths:
        return None
    kl, a_token = recent(points) if len(points) > 10 else points[-1][1], recent(lengths)
    if not (kl >= MOST_KL and kl >= 0.5 * a_token):
        return None
    section = run.setting("method") or "grpo"
    coef = known(run.setting(f"{section}.kl_coef"), 0.0)
    instead = f"{section}.kl_coef={2 * coef:.3g}" if coef > 0 else f"{section}.kl_coef=0.02"
    return Finding(
        "KL blow-up",
        f"The KL to the reference is {kl:.3g} nats a response ({kl / a_token:.2g} a token): the text is no longer "
        "that of the model it started from.",
        f"Hold it closer: {instead}.",
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
    around, since = _around(train, at), recent(train)
    interval = run.interval("eval/reward_ci", last)
    margin = (interval[1] - interval[0]) / 2 if sign > 0 and interval else 0.05 * abs(best)
    scale = max(abs(around), known(early(run.finite("reward/std")), 0.0) if sign > 0 else 0.0)
    risen = sign * (since - around) > 0.05 * scale
    if not (sign * (best - end) > margin and risen):
        return None
    what = "reward" if sign > 0 else "loss"
    return Finding(
        "train up, held-out down" if sign > 0 else "overfitting",
        f"The held-out {what} was {best:.3g} at step {at} and is {end:.3g} at step {last}, while training's went from "
        f"{around:.3g} to {since:.3g}.",
        f"Take a checkpoint of about step {at}; tinyrl checkpoints RUN lists those that were kept.",
        {"best_step": float(at), "best": best, "last": end, "train_then": around, "train": since},
        kind="eval",
        rank=lambda row: -known(row.get("reward"), 0.0),
    )


def _around(points: Points, step: int) -> float:
    """The mean of the five points nearest to a step."""
    return fmean(value for _, value in sorted(points, key=lambda point: abs(point[0] - step))[:5])


def idle_critic(run: Run) -> Finding | None:
    """The critic explains none of the returns after 60 steps, or is much worse than no critic after 20."""
    points = run.finite("value/explained_variance")
    explained = recent(points)
    worse, none = explained < -0.2, explained < 0.02
    if not ((worse and len(points) >= CRITIC_STEPS // 3) or (none and len(points) >= CRITIC_STEPS)):
        return None
    rate = known(run.setting("optim.critic_learning_rate"), math.nan)
    instead = f"optim.critic_learning_rate={3 * rate:.2g}" if math.isfinite(rate) else "optim.critic_learning_rate"
    if worse:
        instead = "critic.pretrain_steps=10"  # values of a critic that has never seen a return are noise
    return Finding(
        "critic explains nothing",
        f"The critic explains {explained:.0%} of the variance of the returns after {len(points)} steps, so advantages "
        "are little else than the rewards' noise.",
        f"Let it learn {'first' if worse else 'faster'}: {instead}.",
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
    """Optimizer steps were lately skipped for numbers that are not finite. The step that a run stopped in has no line:
    of that its kept batches tell.
    """
    points = [(0, 0.0), *run.finite("optim/skipped_steps")]
    (since, before), (_, now) = points[-len(recent_points(points[1:])) - 1], points[-1]
    skipped = max(now - before, sum(step >= since for step in run.nonfinite))
    if not skipped > MOST_NONFINITE:
        return None
    rate = known(run.setting("optim.learning_rate"), math.nan)
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
    named = ", ".join(one_line(key, 40) for key in bad)
    return Finding(
        "loss is no number",
        f"{named}: not a finite number in any of the last {min(10, len(values[bad[0]]))} lines, so nothing is learnt "
        "from it, or it cannot be told whether.",
        "Look for what overflows: model.dtype=float32, and `tinyrl doctor MODEL`.",
        {"lines": float(len(values[bad[0]]))},
        kind="eval" if bad[0].startswith("eval/") else "train",
    )


OF_NUMBERS = (nonfinite_steps, loss_is_none)
OF_POLICY = (entropy_collapse, kl_blow_up, held_out_falls, idle_critic, mismatch)
