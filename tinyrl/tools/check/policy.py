"""Find what would keep a run from learning by answers to some of its training prompts.

A finding is a function of the trial, as those of a run are of its records (runs/findings.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise

from tinyrl.config.advice import longer_responses
from tinyrl.formatting import format_number, format_seconds
from tinyrl.nan import mean, numbers
from tinyrl.runs.finding import Finding, found_by
from tinyrl.tasks.rewarded import HOW_TO_REWARD
from tinyrl.text import one_line
from tinyrl.tools.check.environment import REWARD_OF_REPLY
from tinyrl.tools.check.section import CheckSection
from tinyrl.tools.check.trial import Trial, rewarded, with_spread

LONG_RUN_S = 48 * 3600
FEWEST_GREEDY = 8  # prompts, before greedy and sampled rewards are compared
FEWEST_LENGTHS = 32  # completions, before rewards and lengths are compared
SHOWN = 60
LEAST_MISSED = 0.2  # share of the completions that hold the reference answer and score less, for a finding
BAR = 24
FACTS = ("prompts", "prompts_there", "samples", "reward_mean", "reward_greedy", "mean_length", "longest", "truncated",
         "stopped_in_thought", "entropy", "distinct", "seconds", "rollout_seconds")  # fmt: skip
RATES = {"never": 0.0, "to 25 %": 0.25, "to 50 %": 0.5, "to 75 %": 0.75, "over 75 %": 1 - 1e-9, "always": 1.0}


# ---- findings ----

LOOK = "Look at the reward in this page: the arguments it gets, and what it gives to reference answers."
FORMAT_FIRST = (
    "Teach the format first by some steps of tinyrl train sft, show an example of it in the prompt "
    "(task.system_prompt), or give a partial reward for parts of it."
)


def rewards_dropped(trial: Trial) -> Finding | None:
    """A quarter of the completions or more have no reward, where the method needs one; all of them are `no_reward_yet`
    unless something failed.
    """
    share = trial.dropped
    if not trial.config.trains.rewarded or share < 0.25 or is_never_rewarded(trial):
        return None
    episodes = [answer.failed for answer in trial.answers if answer.play_failed]
    if trial.play_failed > share / 2:  # most of those without a reward
        return Finding(
            name="rewards dropped",
            what=f"{share:.0%} of the completions have no reward: {trial.player} failed in {len(episodes)} of "
            f"{len(trial.answers)} episodes, at first: {episodes[0]}",
            change=f"Mend what {trial.player} failed on, or what it calls; the reward has no part in it.",
            figures={"dropped": share},
        )
    reasons = [answer.failed for answer in trial.answers if answer.failed and not answer.play_failed]
    if trial.is_environment_alone and not reasons:
        return Finding(
            name="rewards dropped",
            what=f"{share:.0%} of the episodes have no reward, since {trial.player} gave them none: each is left out "
            "of its group, so only rewarded ones are compared.",
            change=f"{REWARD_OF_REPLY}.",
            figures={"dropped": share},
        )
    why = f"its functions failed, at first: {reasons[0]}" if reasons else "its functions say that they do not apply"
    return Finding(
        name="rewards dropped",
        what=f"{share:.0%} of the completions have no reward: {why}.",
        change=LOOK,
        figures={"dropped": share},
    )


def is_never_rewarded(trial: Trial) -> bool:
    """Return whether no completion has a reward, although nothing failed: functions gave None for each."""
    return not trial.rewards and not any(answer.failed for answer in trial.answers)


def no_reward_yet(trial: Trial) -> Finding | None:
    """No completion has a reward, as the policy never writes the format that the reward reads."""
    if not trial.config.trains.rewarded or not is_never_rewarded(trial):
        return None
    change = FORMAT_FIRST
    if trial.is_environment_alone:
        return Finding(
            name="no reward yet",
            what=f"None of {len(trial.answers)} episodes had a reward, so nothing can be learnt: no reply of "
            f"{trial.player} held one, and nothing else rewards an episode. {format_beside_text(trial)}",
            change=f"{REWARD_OF_REPLY}. Or give {HOW_TO_REWARD}.",
            figures={"dropped": trial.dropped},
        )
    if trial.paid_example is None:
        change += " If completions do have the right format, print what the function gets (docs/rewards.md)."
    return Finding(
        name="no reward yet",
        what=f"None of {len(trial.answers)} completions had a reward, so nothing can be learnt. "
        f"{format_beside_text(trial)}",
        change=change,
        figures={"dropped": trial.dropped},
    )


def format_beside_text(trial: Trial) -> str:
    """Return sentences with what the policy writes and, where it is known, an answer that the reward pays for."""
    written = f"The policy writes {one_line(trial.answers[0].text, SHOWN)!r}"
    if trial.paid_example is None:
        return f"{written}."
    return f"{written}, and the reward pays for {one_line(trial.paid_example, SHOWN)!r}."


def is_constant(trial: Trial) -> bool:
    """Return whether all rewards are the same although the texts differ, too easy and too hard aside."""
    one_reward = len({answer.reward for answer in rewarded(trial.answers)}) == 1
    many_texts = trial.texts >= trial.prompts * trial.samples / 8
    return one_reward and many_texts and not trial.knows_gold and trial.truncated < 0.98


def one_reward_for_everything(trial: Trial) -> Finding | None:
    if not is_constant(trial):
        return None
    return Finding(
        name="one reward for everything",
        what=f"All completions, {trial.texts} different texts, have the reward {trial.reward_mean:.3g}. "
        f"{format_beside_text(trial)}",
        change=f"If the reward reads another format: {FORMAT_FIRST} If not: {LOOK}",
        figures={"texts": float(trial.texts), "reward_mean": trial.reward_mean},
    )


def right_answers_in_another_form(trial: Trial) -> Finding | None:
    """A fifth of the completions or more hold the reference answer and are not scored as right."""
    missed = trial.missed
    share = len(missed) / len(trial.answers)
    if share < LEAST_MISSED:
        return None
    gold = trial.paid_example or str(missed[0].gold)
    form = f"...{gold[-SHOWN:]!r}" if len(gold) > SHOWN else repr(gold)
    return Finding(
        name="right answers in another form",
        what=f"{share:.0%} of the completions hold the reference answer and are not scored as right, such as "
        f"{one_line(missed[0].text, SHOWN)!r}: the reward reads it as in {form}.",
        change="Ask for that form in task.system_prompt, or teach it first by some steps of tinyrl train sft.",
        figures={"missed": share},
    )


def reward_follows_length(trial: Trial) -> Finding | None:
    """Among completions of one prompt, rewards go with lengths; not where right answers may well be longer."""
    right_or_wrong = trial.knows_gold and len({*trial.rewards}) <= 2
    correlation = math.nan if right_or_wrong else length_correlation(trial)
    if not abs(correlation) >= 0.8:
        return None
    return Finding(
        name="reward follows length",
        what=f"Among completions of one prompt the {'longer' if correlation > 0 else 'shorter'} get more (correlation "
        f"{correlation:.2f}).",
        change="Do not pay for length alone.",
        figures={"correlation": correlation},
    )


def length_correlation(trial: Trial) -> float:
    """Return the correlation of rewards with lengths, both less the mean of their group; NaN where few are known."""
    rewards = list[float]()
    lengths = list[float]()
    for group in trial.groups:
        whole = [answer for answer in rewarded(group) if not answer.cut]
        mean_reward = mean([answer.reward for answer in whole])
        mean_length = mean([answer.tokens for answer in whole])
        rewards += [answer.reward - mean_reward for answer in whole]
        lengths += [answer.tokens - mean_length for answer in whole]
    least = min(math.fsum(x * x for x in rewards), math.fsum(x * x for x in lengths))
    if len(rewards) < FEWEST_LENGTHS or least <= 1e-9:
        return math.nan
    return statistics.correlation(rewards, lengths)


def nothing_ends(trial: Trial) -> Finding | None:
    if trial.truncated < 0.98:
        return None
    return _cut(
        trial,
        name="nothing ends",
        change="See whether the model's end of text, above, is one that it writes; a base model ends where "
        "generation.stop says, such as generation.stop=['\\n'].",
    )


def cut_off(trial: Trial) -> Finding | None:
    """A fifth of the completions or more are cut off; the advice is a longer limit where there are positions for it."""
    if not 0.2 <= trial.truncated < 0.98:
        return None
    room = int(min(2 * trial.limit, trial.positions))
    advice = longer_responses(trial.config, [room] if room >= 1.5 * trial.limit else [], room=room)
    change = "Ask for shorter answers (task.system_prompt), or take a model with a longer context."
    if advice is not None:
        change = f"Raise the limit: {advice}."
    return _cut(trial, name="cut off", change=change)


def _cut(trial: Trial, *, name: str, change: str) -> Finding:
    cut = mean([answer.reward for answer in trial.answers if answer.cut])
    ended = mean([answer.reward for answer in trial.answers if not answer.cut])
    beside = "" if math.isnan(ended + cut) else f"; their mean reward is {cut:.3g}, of those that end {ended:.3g}"
    return Finding(
        name=name,
        what=f"{trial.truncated:.0%} of the completions are cut off at {trial.limit} tokens "
        f"(generation.max_new_tokens){beside}.",
        change=change,
        figures={"truncated": trial.truncated, "limit": float(trial.limit)},
    )


def empty_completions(trial: Trial) -> Finding | None:
    share = mean([not answer.text.strip() for answer in trial.answers])
    if share < 0.2:
        return None
    return Finding(
        name="empty completions",
        what=f"{share:.0%} of the completions hold no text: the policy ends its turn at once.",
        change="Look at how the prompt ends, above: task.chat and task.chat_template_kwargs decide on that.",
        figures={"empty": share},
    )


def larger_group(trial: Trial) -> int:
    """Return the group size, doubled until half of the groups would have spread, as far as the samples tell."""
    size = trial.group_size
    while 2 * size <= trial.samples and with_spread(trial.groups, size) < 0.5:
        size *= 2
    return size


def group_is_too_small(trial: Trial) -> bool:
    return trial.spread < 0.5 and with_spread(trial.groups, larger_group(trial)) >= max(1.5 * trial.spread, 0.25)


def group_too_small(trial: Trial) -> Finding | None:
    """Larger groups would have rewards that differ much more often."""
    if not group_is_too_small(trial):
        return None
    size = trial.group_size
    larger = larger_group(trial)
    spread_then = with_spread(trial.groups, larger)
    return Finding(
        name="group too small",
        what=f"{trial.spread:.0%} of groups of {size} would have rewards that differ, and {spread_then:.0%} of groups "
        f"of {larger}.",
        change=f"{trial.config.trains.section}.group_size={larger}, with as many prompts fewer for the same time.",
        figures={
            "spread": trial.spread,
            "size": float(size),
            "spread_then": spread_then,
            "larger": float(larger),
        },
    )


def decided_prompts(trial: Trial) -> Finding | None:
    """Most groups would have one reward for all: too hard, too easy, or some of both."""
    is_known = trial.knows_right or trial.spread < 0.05  # else a prompt's best reward may be any
    if not is_known or not trial.spread <= 0.25 or is_constant(trial) or group_is_too_small(trial):
        return None
    if trial.pass_rate <= 0.2 and trial.spread < 0.05:
        name = "too hard"
        change = (
            "Easier prompts, some steps of tinyrl train sft on worked answers, an example in the prompt, or a reward "
            "given in steps."
        )
    elif trial.pass_rate >= 0.9:
        name = "too easy"
        change = "Harder prompts; of these, task.sampler=difficulty draws those that are solved seldom."
    else:
        name = "prompts that are decided"
        change = (
            "Draw the prompts that teach: task.sampler=difficulty, from rates of --write ROWS.jsonl with "
            "task.data=ROWS.jsonl."
        )
    flat = 1 - trial.spread
    what = f"{flat:.0%} of the groups would have one reward for all, which teaches nothing"
    if not trial.has_groups:
        what = f"{flat:.0%} of the prompts have one reward for all completions, which teaches little"
    right = f"{trial.pass_rate:.1%} of the completions are right."
    if not trial.knows_right:
        right = f"the mean reward is {trial.reward_mean:.3g}, the highest {max(trial.rewards):.3g}."
    elif not any(trial.pass_rates):
        right = f"none of {len(trial.answers)} completions is right. {format_beside_text(trial)}"
    return Finding(
        name=name,
        what=f"{what}; {right}",
        change=change,
        figures={"flat": flat, "pass_rate": trial.pass_rate},
    )


def all_completions_alike(trial: Trial) -> Finding | None:
    """Most prompts have one text for all samples, or half of the texts repeat under narrow sampling."""
    drawn = trial.config.generation
    wider = list[str]()
    if drawn.temperature < 0.7:
        wider.append("generation.temperature=1.0")
    if 0 < drawn.top_k < 5:
        wider.append("generation.top_k=0")
    if drawn.top_p < 0.9:
        wider.append("generation.top_p=1.0")
    repeated = 1 - trial.distinct
    alike = mean([count == 1 for count in trial.texts_by_prompt]) >= 0.75 or (bool(wider) and repeated >= 0.5)
    nearly_all_right = trial.knows_right and trial.pass_rate > 0.8
    if not alike or nearly_all_right:
        return None
    advice = " ".join(wider) or "generation.temperature=1.3; or begin from a model trained for less long"
    return Finding(
        name="all completions alike",
        what=f"{repeated:.0%} of the completions repeat another of their prompt (entropy {trial.entropy:.2g} nats a "
        "token).",
        change=f"Sample more widely: {advice}.",
        figures={"repeated": repeated, "entropy": trial.entropy},
    )


def temperature_too_high(trial: Trial) -> Finding | None:
    """Above 1, sampling loses reward against greedy decoding: beyond chance, and a tenth of the rewards' range."""
    temperature = trial.config.generation.temperature
    pairs = zip(trial.greedy, trial.groups, strict=True)
    lost = numbers([best.reward - mean([answer.reward for answer in group]) for best, group in pairs])
    if temperature <= 1 or len(lost) < FEWEST_GREEDY:
        return None
    noise = statistics.stdev(lost) / math.sqrt(len(lost))
    least = min(trial.rewards + [answer.reward for answer in rewarded(trial.greedy)])
    if mean(lost) <= 0 or mean(lost) < max(3 * noise, 0.1 * (max(trial.rewards) - least)):
        return None
    return Finding(
        name="temperature too high",
        what=f"At temperature {temperature:g} the mean reward is {trial.reward_mean:.3g}, greedily it is "
        f"{trial.reward_greedy:.3g}.",
        change="generation.temperature=1.0.",
        figures={
            "temperature": temperature,
            "reward_mean": trial.reward_mean,
            "reward_greedy": trial.reward_greedy,
        },
    )


def a_long_run(trial: Trial) -> Finding | None:
    steps = trial.config.run.num_steps
    seconds = trial.rollout_seconds * steps
    if seconds < LONG_RUN_S:
        return None
    return Finding(
        name="a long run",
        what=f"The rollouts of {steps:,} steps alone take about {format_seconds(seconds)}.",
        change="Fewer steps at first (run.num_steps); later more of them: tinyrl train --from RUN run.num_steps=N.",
        figures={"steps": float(steps)},
        is_harmless=True,
    )


FINDINGS = (
    no_reward_yet,
    rewards_dropped,
    one_reward_for_everything,
    right_answers_in_another_form,
    reward_follows_length,
    nothing_ends,
    cut_off,
    empty_completions,
    group_too_small,
    decided_prompts,
    all_completions_alike,
    temperature_too_high,
    a_long_run,
)
OF_TEXTS = (
    right_answers_in_another_form,
    nothing_ends,
    cut_off,
    empty_completions,
    all_completions_alike,
)
OF_REWARDS = (
    one_reward_for_everything,
    reward_follows_length,
    group_too_small,
    decided_prompts,
    temperature_too_high,
)


def findings_in(trial: Trial) -> list[Finding]:
    """Return the findings of a trial, without those that follow from failed episodes or missing rewards alone, and
    without those about rewards where the method learns from none.
    """
    left_out = list[Callable[[Trial], Finding | None]]()
    if not trial.config.trains.rewarded:
        left_out += [*OF_REWARDS, right_answers_in_another_form]
    elif trial.dropped > 0.5:
        left_out += OF_REWARDS
    if trial.play_failed > 0.5:
        left_out += OF_TEXTS
    return found_by([check for check in FINDINGS if check not in left_out], trial)


# ---- the page ----


def section(trial: Trial) -> CheckSection:
    """Return pass rates, rewards, lengths and the answers with the highest and the lowest reward."""
    took = format_seconds(trial.seconds)
    lines = [f"{trial.prompts} of {trial.prompts_there:,} prompts, {trial.samples} completions each, in {took}"]
    if trial.prompts < trial.prompts_wanted:
        lines[0] += f" (--minutes left no time for {trial.prompts_wanted - trial.prompts} more)"
    rates = None
    if trial.knows_right and trial.rewards:
        edges = pairwise([-1.0, *RATES.values()])
        counts = [sum(low < rate <= high for rate in trial.pass_rates) for low, high in edges]
        rates = dict(zip(RATES, counts, strict=True))
        largest = max(counts) or 1
        for name, count in rates.items():
            lines.append(f"pass rate {name:9} {count:4} {'#' * math.ceil(BAR * count / largest)}")
    if trial.rewards:
        lines.append(
            f"reward {format_number(trial.reward_mean)} on average, greedily {format_number(trial.reward_greedy)}"
        )
        if not math.isnan(trial.spread):  # fewer samples than a group
            groups = f"groups of {trial.group_size}" if trial.has_groups else "prompts"
            lines.append(f"{trial.spread:.0%} of {groups} have rewards that differ")
        best = max(rewarded(trial.answers), key=lambda answer: answer.reward)
        worst = min(rewarded(trial.answers), key=lambda answer: answer.reward)
        for answer in (best, worst):
            lines.append(f"  reward {format_number(answer.reward)}: {one_line(answer.text, SHOWN)!r}")
    if (best := trial.best_beyond_solved) is not None:
        of_turns = "; those of an episode's turns are added up" if trial.most_rewarded_turns > 1 else ""
        lines.append(
            f"a completion counts as solved from a reward of {trial.config.task.solved_reward:g} on "
            f"(task.solved_reward, not given), and some have up to {best:.4g}{of_turns}"
        )
    if 0 < len(trial.missed) < LEAST_MISSED * len(trial.answers):  # more of them are a finding
        shown = one_line(trial.missed[0].text, SHOWN)
        hold = f"{len(trial.missed)} completions hold the reference answer and are"
        if len(trial.missed) == 1:
            hold = "1 completion holds the reference answer and is"
        lines.append(f"{hold} not scored as right: {shown!r}")
    lines.append(
        f"{trial.mean_length:.1f} tokens on average, at most {trial.longest}; {trial.truncated:.0%} cut off at "
        f"{trial.limit}"
    )
    if trial.stopped_in_thought > 0:
        lines.append(
            f"{trial.stopped_in_thought:.0%} end at a stop string inside a thought, so they have no answer: take "
            "strings that no thought holds (generation.stop, or those of the environment)"
        )
    lines.append(
        f"entropy {trial.entropy:.2g} nats per token; {trial.distinct:.0%} of a prompt's completions are different; "
        f"{trial.rollout_seconds:.2g} s to sample a step like this"
    )
    facts = {name: getattr(trial, name) for name in FACTS}
    facts |= {"pass_rates": rates, "groups_with_spread": trial.spread}
    facts["pass_rate"] = trial.pass_rate if trial.knows_right else None
    return CheckSection("policy", lines, facts, findings_in(trial))
