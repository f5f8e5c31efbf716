"""What a probe has seen, in words: facts (pass rates, groups with spread, lengths, time, memory) and, as of a run,
findings: what is wrong, with figures, completions that show it, and one thing to change.

A finding is a pure function of a `Probe`.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import pairwise
from typing import Any

from tinyrl.evaluation.statistics import mean, numbers
from tinyrl.runs.diagnosis import as_json, columns, counted, examples, in_words, row_line
from tinyrl.runs.findings import Finding, Row
from tinyrl.runs.records import known
from tinyrl.runs.run_dir import finite
from tinyrl.tasks.grading import last_number, marked_answer, normalised_text, parse_number
from tinyrl.text import number
from tinyrl.tools.probe import Probe, rewards_of
from tinyrl.tools.report.outcome import show_seconds

LONG_RUN_S = 48 * 3600
GOLD_SHOWN = 60  # characters of the end of a gold answer
BAR = 24  # characters
RATES = {"never": 0.0, "to 25 %": 0.25, "to 50 %": 0.5, "to 75 %": 0.75, "over 75 %": 1 - 1e-9, "always": 1.0}


def failing(seen: Probe) -> Finding | None:
    share, unrewarded = seen.share(lambda line: bool(line["failed"])), 1 - len(seen.rewards) / len(seen.lines)
    if not seen.config.trains.rewarded or unrewarded < 0.25:
        return None
    first = next((line["failed"] for line in seen.lines if line["failed"]), None)
    why = f"its functions failed, the first time so: {first}" if first else "its functions say that they do not apply"
    return Finding(
        "rewards dropped",
        f"{unrewarded:.0%} of the completions have no reward: {why}.",
        "Try it on rows without a model: tinyrl reward test FILE.py:FUNCTION --data ROWS.",
        {"dropped": unrewarded, "failed": share},
        rank=lambda row: float(math.isnan(row["reward"])),
    )


def cut_off(seen: Probe) -> Finding | None:
    share, most = seen.share(_is_cut), seen.config.generation.max_new_tokens
    if share < 0.2:
        return None
    whole, cut = (mean(rewards_of([one for one in seen.lines if _is_cut(one) == it])) for it in (False, True))
    beside = "" if math.isnan(whole) or math.isnan(cut) else f"; their mean reward is {cut:.3g}, of those that end "
    beside += f"{whole:.3g}" if beside else ""
    room = int(min(2 * most, seen.positions - seen.longest_prompt))
    if share >= 0.98:
        change = (
            "See whether its end of text is one that this model writes (tinyrl doctor MODEL); a base model ends where "
            "generation.stop says, such as generation.stop=['\\n']."
        )
    elif room < 1.5 * most:
        change = "Ask for shorter answers (task.system_prompt), or take a model with more positions."
    else:
        change = f"Raise the limit: generation.max_new_tokens={room}."
    return Finding(
        "nothing ends" if share >= 0.98 else "cut off",
        f"{share:.0%} of the completions are cut off at {most} tokens (generation.max_new_tokens){beside}.",
        change,
        {"truncated": share, "reward_cut": cut, "reward_whole": whole},
        rank=_is_cut,
    )


def _is_cut(line: Row) -> bool:
    return line["finish_reason"] == "length"


def empty(seen: Probe) -> Finding | None:
    share = seen.share(lambda line: not line["completion"].strip())
    if share < 0.2:
        return None
    return Finding(
        "empty completions",
        f"{share:.0%} of the completions hold no text: the policy ends its turn at once.",
        "Look at how the prompt ends (tinyrl train ... --dry-run): task.chat and task.chat_template decide on that.",
        {"empty": share},
        rank=lambda row: float(not row["completion"].strip()),
    )


def other_form(seen: Probe) -> Finding | None:
    """Right answers that get nothing, because they are written in another way than the reward reads."""
    if seen.gold is None or seen.gold.gold is None or seen.gold.gold < seen.config.task.solved_reward:
        return None
    wrong = [line for line in seen.lines if line["gold"] and not seen.is_right(line)]
    missed = [line for line in wrong if _says(line["completion"], line["gold"])]
    if len(missed) < 0.2 * len(seen.lines):
        return None
    gold = str(missed[0]["gold"])
    return Finding(
        "right answers in another form",
        f"{len(missed) / len(seen.lines):.0%} of the completions say the gold answer, and are not scored as right: "
        f"the reward reads it as in {'...' * (len(gold) > GOLD_SHOWN)}{gold[-GOLD_SHOWN:]!r}.",
        "Ask for that form in task.system_prompt, or teach it first by some steps of tinyrl train sft.",
        {"missed": len(missed) / len(seen.lines)},
        rank=lambda row: float(bool(row["gold"]) and not seen.is_right(row) and _says(row["completion"], row["gold"])),
    )


def _says(text: str, gold: str) -> bool:
    answer = marked_answer(gold) or gold
    if (wanted := parse_number(answer)) is not None:
        return parse_number(last_number(text)) == wanted
    said = normalised_text(answer)
    return len(said) > 2 and said in normalised_text(text)


def constant(seen: Probe) -> Finding | None:
    values, texts = set(seen.rewards), {line["completion"] for line in seen.lines}
    if len(values) != 1 or len(texts) < len(seen.lines) / 8 or seen.share(_is_cut) >= 0.98:
        return None
    [value] = values
    gold = seen.gold.gold if seen.gold is not None else None
    if gold is not None and gold > value:
        return None  # too hard, not blind
    if gold is not None and value >= seen.config.task.solved_reward and seen.gold and not seen.gold.warning:
        return None  # too easy
    return Finding(
        "one reward for everything",
        f"All {len(seen.rewards)} completions, {len(texts)} of them different, have the reward {value:.3g}.",
        "Try the reward on rows without a model: tinyrl reward test FILE.py:FUNCTION --data ROWS.",
        {"reward": value, "distinct": float(len(texts))},
    )


def decided(seen: Probe) -> Finding | None:
    """Groups without spread: too hard, too easy, or some of both."""
    if not seen.knows_right or seen.spread > 0.25 or constant(seen) is not None or bigger_group(seen) is not None:
        return None
    rate, spread = mean(seen.pass_rates), seen.spread
    said = f"{1 - spread:.0%} of the groups would have the same reward for all their completions, which teaches nothing"
    name, best_first = "prompts that are decided", 0.0
    change = (
        "Draw the prompts that teach: task.sampler=difficulty, from these rates with --write ROWS.jsonl and "
        "task.data=ROWS.jsonl."
    )
    if rate <= 0.2 and spread < 0.05:
        name, best_first = "too hard", 1.0
        change = "Easier prompts, some steps of tinyrl train sft on worked answers first, or a reward given in steps."
    elif rate >= 0.9:
        name, best_first = "too easy", -1.0
        change = "Harder prompts; of these, task.sampler=difficulty draws those that are solved seldom."
    return Finding(
        name,
        f"{said}; {rate:.1%} of the completions are right.",
        change,
        {"with_spread": spread, "pass_rate": rate},
        rank=lambda row: best_first and best_first * known(row["reward"], -math.inf),
    )


def bigger_group(seen: Probe) -> Finding | None:
    size = seen.config.on_policy.group_size
    now, larger = seen.with_spread(size), size
    while 2 * larger <= seen.samples and seen.with_spread(larger) < 0.5:
        larger *= 2
    if size == 1 or not now < 0.5 or seen.with_spread(larger) < max(1.5 * now, 0.25):
        return None
    return Finding(
        "group too small",
        f"{now:.0%} of groups of {size} would have rewards that differ, and {seen.with_spread(larger):.0%} of groups "
        f"of {larger}.",
        f"{seen.config.trains.own}.group_size={larger}, with as many prompts fewer for the same time.",
        {"with_spread": now, "with_spread_then": seen.with_spread(larger)},
    )


def repeating(seen: Probe) -> Finding | None:
    """The completions of a group are the same, and not because they are right."""
    generation = seen.config.generation
    distinct = [len({line["completion"] for line in group}) for group in seen.groups]
    same = sum(count == 1 for count in distinct) / len(distinct)
    narrow = ["generation.temperature=1.0"] * (generation.temperature < 0.7)
    narrow += ["generation.top_k=0"] * (0 < generation.top_k < 5) + ["generation.top_p=1.0"] * (generation.top_p < 0.9)
    repeated = 1 - mean(distinct) / seen.samples
    if (seen.knows_right and mean(seen.pass_rates) > 0.8) or not (same >= 0.75 or (narrow and repeated >= 0.5)):
        return None
    return Finding(
        "all completions alike",
        f"{repeated:.0%} of the completions repeat another of the same prompt (entropy {seen.entropy:.2g} nats a "
        "token), so that groups have nothing to compare.",
        f"Sample more widely: {' '.join(narrow)}."
        if narrow
        else "Sample more widely: generation.temperature=1.3; or begin from a model that was trained for less long.",
        {"repeated": repeated, "entropy": seen.entropy},
    )


def too_hot(seen: Probe) -> Finding | None:
    """Sampled above temperature 1, much is lost of what the policy can do."""
    temperature = seen.config.generation.temperature
    lost = numbers([g["reward"] - mean(rewards_of(group)) for g, group in zip(seen.greedy, seen.groups, strict=True)])
    if temperature <= 1.0 or len(lost) < 8:
        return None
    gap, noise = mean(lost), statistics.stdev(lost) / math.sqrt(len(lost))
    greedily = rewards_of(seen.greedy)
    spread = max(seen.rewards) - min([*seen.rewards, *greedily])
    if gap < 3 * noise or gap < 0.1 * spread or gap <= 0:
        return None
    greedy = mean(greedily)
    return Finding(
        "temperature too high",
        f"At temperature {temperature:g} the mean reward is {mean(seen.rewards):.3g}, greedily it is {greedy:.3g}.",
        "generation.temperature=1.0.",
        {"sampled": mean(seen.rewards), "greedy": greedy},
    )


def by_length(seen: Probe) -> Finding | None:
    """Within groups the reward goes with the number of tokens, among completions that end."""
    pairs = list[tuple[float, float]]()
    for group in seen.groups:
        ended = [line for line in group if not _is_cut(line) and not math.isnan(line["reward"])]
        rewards, tokens = [line["reward"] for line in ended], [line["tokens"] for line in ended]
        pairs += [(r - mean(rewards), t - mean(tokens)) for r, t in zip(rewards, tokens, strict=True)]
    spread = [math.fsum(x * x for x in column) for column in zip(*pairs, strict=True)] if pairs else [0.0]
    if len(pairs) < 32 or min(spread) < 1e-9:
        return None
    correlation = math.fsum(r * t for r, t in pairs) / math.sqrt(math.prod(spread))
    if abs(correlation) < 0.8:
        return None
    way = "longer" if correlation > 0 else "shorter"
    return Finding(
        "reward follows length",
        f"Among completions of one prompt the {way} get more (correlation {correlation:.2f}), whatever else they say.",
        "See whether it pays for length alone: tinyrl reward attack FILE.py:FUNCTION --data ROWS.",
        {"correlation": correlation},
        rank=lambda row: known(row["reward"], -math.inf),
    )


def long_run(seen: Probe) -> Finding | None:
    seconds = seen.rollout_seconds * seen.config.run.num_steps
    if seconds < LONG_RUN_S:
        return None
    return Finding(
        "a long run",
        f"The rollouts of {seen.config.run.num_steps:,} steps alone take about {show_seconds(seconds)}.",
        "Fewer steps at first (run.num_steps); later more of them: tinyrl train --from RUN run.num_steps=N.",
        {"seconds": seconds},
    )


CHECKS = (
    failing, cut_off, empty, other_form, constant, decided, bigger_group, repeating, too_hot, by_length, long_run
)  # fmt: skip


def findings(seen: Probe) -> list[Finding]:
    return [found for check in CHECKS if (found := check(seen)) is not None]


# ---- in words ----


def histogram(seen: Probe) -> dict[str, int]:
    """How many prompts have which pass rate."""
    edges = pairwise([-1.0, *RATES.values()])
    return {
        name: sum(least < rate <= most for rate in seen.pass_rates)
        for name, (least, most) in zip(RATES, edges, strict=True)
    }


def facts(seen: Probe) -> dict[str, Any]:
    """The numbers, by name; None: not known."""
    found = {
        "prompts": len(seen.groups),
        "prompts_there": seen.num_there,
        "samples": seen.samples,
        "pass_rates": histogram(seen) if seen.knows_right else None,
        "pass_rate": mean(seen.pass_rates) if seen.knows_right else None,
        "groups_with_spread": seen.spread,
        "reward_mean": mean(seen.rewards),
        "reward_greedy": mean(rewards_of(seen.greedy)),
        "mean_length": mean([line["tokens"] for line in seen.lines]),
        "longest": max(line["tokens"] for line in seen.lines),
        "truncated": seen.share(_is_cut),
        "entropy": seen.entropy,
        "distinct": mean([len({line["completion"] for line in group}) for group in seen.groups]) / seen.samples,
        "seconds": seen.seconds,
        "rollout_seconds": seen.rollout_seconds,
        "memory_measured_gb": seen.peak_gb,
    }
    return finite(found)


def to_json(seen: Probe) -> dict[str, Any]:
    return {**facts(seen), "findings": as_json(findings(seen), partial(examples, seen.lines))}


def render(seen: Probe) -> str:
    """The facts, what the reward gives to which text, and the findings."""
    table = [
        f"{name if i == 0 else '':10} {line}" for name, lines in _table(seen).items() for i, line in enumerate(lines)
    ]
    found = findings(seen)
    told = "nothing found that would keep it from learning" if not found else counted(found)
    return "\n\n".join(["\n".join([*seen.notes, *table]), told, *in_words(found, partial(examples, seen.lines))])


def _table(seen: Probe) -> dict[str, list[str]]:
    config, size, fact = seen.config, seen.config.on_policy.group_size, facts(seen)
    table = {
        "prompts": [
            f"{fact['prompts']} of {seen.num_there:,}, {seen.samples} completions each, in {show_seconds(seen.seconds)}"
        ]
    }
    if seen.knows_right:
        most = max(histogram(seen).values()) or 1
        table["pass rate"] = [f"{n:9} {c:4} {'#' * math.ceil(BAR * c / most)}" for n, c in histogram(seen).items()]
    if seen.rewards:
        table["groups"] = [f"{seen.spread:.0%} of {size if size > 1 else seen.samples} have rewards that differ"]
        judged = [line.strip() for line in seen.gold.lines()] if seen.gold is not None else []
        means = f"mean {number(mean(seen.rewards))}, greedily {number(mean(rewards_of(seen.greedy)))}"
        table["reward"] = [means, *judged, *_highest_and_lowest(seen)]
    lengths = f"{fact['mean_length']:.1f} a completion, at most {fact['longest']}"
    table["tokens"] = [f"{lengths}; {fact['truncated']:.0%} cut off at {config.generation.max_new_tokens}"]
    different = f"{fact['distinct']:.0%} of a prompt's completions are different"
    table["sampling"] = [f"entropy {seen.entropy:.2g} nats a token; {different}"]
    a_step = f"{seen.rollout_seconds:.2g} s a step with completions like these"
    table["rollout"] = [f"{a_step}; the update is not timed"]
    table["memory"] = [f"{seen.peak_gb:.2f} GB so far, without an optimizer step"]
    return table


def _highest_and_lowest(seen: Probe) -> list[str]:
    """Completions of one prompt whose rewards are farthest apart."""
    judged = [[line for line in group if not math.isnan(line["reward"])] for group in seen.groups]
    ends = [sorted(group, key=lambda line: -line["reward"])[:: max(1, len(group) - 1)] for group in judged if group]
    shown = max(ends, key=lambda pair: pair[0]["reward"] - pair[-1]["reward"])
    shown = shown if shown[0]["reward"] > shown[-1]["reward"] else shown[:1]
    return [row_line(row, columns() - 11).strip() for row in shown]
