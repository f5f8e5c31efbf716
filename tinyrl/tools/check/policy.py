"""Sample answers to some training prompts before a run, and find what would keep it from learning.

Findings are lines of TABLE, as those of a run (runs/findings.py): name, condition, a sentence with figures, one thing
to change.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.data.rows import PASS_RATE, row_key, seeded_permutation
from tinyrl.evaluation.statistics import grouped, mean, numbers
from tinyrl.runs.findings import Rule
from tinyrl.runs.records import json_safe
from tinyrl.runs.records import to_float as to_number
from tinyrl.runs.run_dir import write_atomic
from tinyrl.tasks import load_split, load_task
from tinyrl.tasks.grading import last_number, marked_answer, normalised_text, parse_number
from tinyrl.text import format_number, format_seconds, one_line
from tinyrl.tools.check.loaded import Answer, answers
from tinyrl.tools.check.offline import CheckSection

FEWEST_SAMPLES = 8  # completions of a prompt, so that its pass rate is one
ROWS_AT_A_TIME = 64
LONG_RUN_S = 48 * 3600
SHOWN, BAR = 60, 24
FACTS = ("prompts", "prompts_there", "samples", "reward_mean", "reward_greedy", "mean_length", "longest", "truncated",
         "entropy", "distinct", "seconds", "rollout_seconds")  # fmt: skip
RATES = {"never": 0.0, "to 25 %": 0.25, "to 50 %": 0.5, "to 75 %": 0.75, "over 75 %": 1 - 1e-9, "always": 1.0}


def look(
    trainer: Any, *, knows_gold: bool, prompts: int = 64, samples: int | None = None, minutes: float = 2.0
) -> tuple[CheckSection, dict[str, float]]:
    """Sample answers to so many training prompts, for about so many minutes at most. No weight is changed. Return
    the section, and the pass rates of the rows by their keys.
    """
    config, there, started = trainer.config, trainer.collector.train_prompts, time.perf_counter()
    samples = samples or max(FEWEST_SAMPLES, config.on_policy.group_size)
    chosen = [there[i] for i in seeded_permutation(f"probe {config.run.seed}", len(there))[:prompts]]
    groups, greedy, a_row, last = list[list[Answer]](), list[Answer](), 0.0, 0.0
    for some in grouped(chosen, max(1, min(config.on_policy.num_prompts, ROWS_AT_A_TIME // samples))):
        before = time.perf_counter()
        if groups and before - started + last > 60 * minutes:
            break
        groups += grouped(answers(trainer, some, samples, greedy=False), samples)
        a_row = (time.perf_counter() - before) / (samples * len(some))
        greedy += answers(trainer, some, 1, greedy=True)
        last = time.perf_counter() - before
    f = figures(
        config, groups, greedy, knows_gold=knows_gold, step_seconds=a_row * config.on_policy.batch_size,
        positions=trainer.policy.positions - max(len(prompt.tokens) for prompt in there),
    )  # fmt: skip
    f.prompts_there, f.seconds = len(there), time.perf_counter() - started
    return section(f), dict(zip([group[0].row for group in groups], f.pass_rates, strict=True))


# ---- findings ----


def figures(
    config: Config,
    groups: list[list[Answer]],
    greedy: list[Answer],
    *,
    knows_gold: bool = False,
    step_seconds: float = 0.0,
    positions: float = math.inf,
) -> SimpleNamespace:
    """Compute what the section shows and TABLE needs; NaN, for which no condition holds, where it is not known.

    groups: the answers to each prompt; greedy: one more of each; knows_gold: the reward gives full marks to gold
    answers; positions: tokens that an answer behind the longest prompt may have.
    """
    everything, solved = [answer for group in groups for answer in group], config.task.solved_reward
    f = SimpleNamespace(prompts=len(groups), samples=len(groups[0]), section=config.trains.own, prompts_there=0)
    f.seconds, f.rollout_seconds, f.steps = 0.0, step_seconds, config.run.num_steps
    f.run_seconds = step_seconds * f.steps
    f.lasting = format_seconds(f.run_seconds)
    rewards = numbers([answer.reward for answer in everything])
    f.reward_mean, f.reward_greedy = mean(rewards), mean([answer.reward for answer in greedy])
    f.pass_rates = [mean([answer.reward >= solved for answer in rewarded(group)]) for group in groups]
    f.pass_rate, f.knows_right = mean(f.pass_rates), knows_gold or any(rate > 0 for rate in f.pass_rates)
    f.ends = [of(rewarded(everything), key=lambda answer: answer.reward) for of in (max, min) if rewards]
    f.dropped = (1 - len(rewards) / len(everything)) * config.trains.rewarded
    reasons = [answer.failed for answer in everything if answer.failed]
    f.why = f"its functions failed, at first: {reasons[0]}" if reasons else "its functions say that they do not apply"
    missed = [a for a in everything if a.gold and not a.reward >= solved and _holds(a.text, str(a.gold))]
    f.missed, gold = len(missed) / len(everything) * knows_gold, str(missed[0].gold) if missed else ""
    f.form = f"{'...' * (len(gold) > SHOWN)}{gold[-SHOWN:]!r}"
    _lengths(f, config, groups, positions)
    if knows_gold and len({*rewards}) <= 2:  # right or wrong: what is right may well be longer
        f.correlation = math.nan
    _variety(f, config, groups, knows_gold=knows_gold)
    f.temperature, f.lost, f.least_lost = config.generation.temperature, math.nan, math.inf
    lost = numbers([best.reward - mean([a.reward for a in group]) for best, group in zip(greedy, groups, strict=True)])
    if len(lost) >= 8:  # by more than chance, and than a tenth of the rewards' range
        f.lost, noise = mean(lost), statistics.stdev(lost) / math.sqrt(len(lost))
        f.least_lost = max(3 * noise, 0.1 * (max(rewards) - min(rewards + [a.reward for a in rewarded(greedy)])))
    return f


def _lengths(f: SimpleNamespace, config: Config, groups: list[list[Answer]], positions: float) -> None:
    """Set what is known of lengths: how many answers are cut off, and whether rewards follow length."""
    everything = [answer for group in groups for answer in group]
    lengths = [answer.tokens for answer in everything]
    f.mean_length, f.longest, f.limit = mean(lengths), max(lengths), config.generation.max_new_tokens
    f.entropy = -sum(answer.logprob for answer in everything) / max(1, sum(lengths))
    f.truncated, f.empty = mean([a.cut for a in everything]), mean([not a.text.strip() for a in everything])
    ended, cut = (mean([a.reward for a in everything if a.cut == it]) for it in (False, True))
    known = not math.isnan(ended + cut)
    f.beside = f"; their mean reward is {cut:.3g}, of those that end {ended:.3g}" if known else ""
    f.room = int(min(2 * f.limit, positions))
    beside = list[tuple[float, float]]()  # of rewards and lengths, from the means of their groups
    for whole in ([a for a in rewarded(group) if not a.cut] for group in groups):
        reward, tokens = mean([a.reward for a in whole]), mean([a.tokens for a in whole])
        beside += [(a.reward - reward, a.tokens - tokens) for a in whole]
    varied = len(beside) >= 32 and min(math.fsum(x * x for x in column) for column in zip(*beside, strict=True)) > 1e-9
    f.correlation = statistics.correlation(*zip(*beside, strict=True)) if varied else math.nan
    f.way = "longer" if f.correlation > 0 else "shorter"


def _variety(f: SimpleNamespace, config: Config, groups: list[list[Answer]], *, knows_gold: bool) -> None:
    """Set how much answers to one prompt differ, in reward and in text."""
    drawn, own_size = config.generation, config.on_policy.group_size
    f.size = f.larger = own_size if own_size > 1 else f.samples
    f.spread = with_spread(groups, f.size)
    f.flat = 1 - f.spread
    while 2 * f.larger <= f.samples and with_spread(groups, f.larger) < 0.5:
        f.larger *= 2
    f.spread_then = with_spread(groups, f.larger)
    f.too_small = f.spread < 0.5 and f.spread_then >= max(1.5 * f.spread, 0.25)
    distinct = [len({answer.text for answer in group}) for group in groups]
    f.distinct, f.texts = mean(distinct) / f.samples, len({answer.text for group in groups for answer in group})
    f.repeated = 1 - f.distinct
    one_reward = len({answer.reward for group in groups for answer in rewarded(group)}) == 1
    f.constant = one_reward and f.texts >= f.prompts * f.samples / 8  # too easy and too hard aside
    f.constant = f.constant and not knows_gold and f.truncated < 0.98
    f.decided = f.knows_right and f.spread <= 0.25 and not f.constant and not f.too_small
    f.hard, f.easy = f.pass_rate <= 0.2 and f.spread < 0.05, f.pass_rate >= 0.9
    wider = ["generation.temperature=1.0"] * (drawn.temperature < 0.7)
    wider += ["generation.top_k=0"] * (0 < drawn.top_k < 5) + ["generation.top_p=1.0"] * (drawn.top_p < 0.9)
    f.wider = " ".join(wider) or "generation.temperature=1.3; or begin from a model trained for less long"
    f.alike = mean([count == 1 for count in distinct]) >= 0.75 or (bool(wider) and f.repeated >= 0.5)


def rewarded(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if not math.isnan(answer.reward)]


def with_spread(groups: list[list[Answer]], size: int) -> float:
    """Return the expected share of groups of this size whose rewards differ, drawn from the answers there are without
    putting back; NaN where there are fewer.
    """
    shares = []
    for group in groups if size <= len(groups[0]) else []:
        known = numbers([answer.reward for answer in group])
        drawn = min(size, len(known))
        alike = sum(math.comb(count, drawn) for count in Counter(known).values())
        shares.append(0.0 if drawn < 2 else 1 - alike / math.comb(len(known), drawn))
    return mean(shares)


def _holds(text: str, gold: str) -> bool:
    answer = marked_answer(gold) or gold
    if (wanted := parse_number(answer)) is not None:
        return parse_number(last_number(text)) == wanted
    words = normalised_text(answer)
    return len(words) > 2 and words in normalised_text(text)


LOOK = "Look at the reward in this page: the arguments it gets, and what it gives to gold answers."
CUT = "{truncated:.0%} of the completions are cut off at {limit} tokens (generation.max_new_tokens){beside}."
FLAT = "{flat:.0%} of the groups would have one reward for all, which teaches nothing; {pass_rate:.1%} of the "
FLAT += "completions are right."
TABLE = (
    Rule("rewards dropped", lambda f: f.dropped >= 0.25,
        "{dropped:.0%} of the completions have no reward: {why}.", LOOK),
    Rule("one reward for everything", lambda f: f.constant,
        "All completions, {texts} different texts, have the reward {reward_mean:.3g}.", LOOK),
    Rule("right answers in another form", lambda f: f.missed >= 0.2,
        "{missed:.0%} of the completions hold the gold answer and are not scored as right: the reward reads it as in "
        "{form}.", "Ask for that form in task.system_prompt, or teach it first by some steps of tinyrl train sft."),
    Rule("reward follows length", lambda f: abs(f.correlation) >= 0.8,
        "Among completions of one prompt the {way} get more (correlation {correlation:.2f}).",
        "Do not pay for length alone."),
    Rule("nothing ends", lambda f: f.truncated >= 0.98, CUT,
        "See whether the model's end of text, above, is one that it writes; a base model ends where generation.stop "
        "says, such as generation.stop=['\\n']."),
    Rule("cut off", lambda f: 0.2 <= f.truncated < 0.98 and f.room >= 1.5 * f.limit, CUT,
        "Raise the limit: generation.max_new_tokens={room}."),
    Rule("cut off", lambda f: 0.2 <= f.truncated < 0.98 and f.room < 1.5 * f.limit, CUT,
        "Ask for shorter answers (task.system_prompt), or take a model with more positions."),
    Rule("empty completions", lambda f: f.empty >= 0.2,
        "{empty:.0%} of the completions hold no text: the policy ends its turn at once.",
        "Look at how the prompt ends, above: task.chat and task.chat_template_kwargs decide on that."),
    Rule("group too small", lambda f: f.too_small,
        "{spread:.0%} of groups of {size} would have rewards that differ, and {spread_then:.0%} of groups of {larger}.",
        "{section}.group_size={larger}, with as many prompts fewer for the same time."),
    Rule("too hard", lambda f: f.decided and f.hard, FLAT,
        "Easier prompts, some steps of tinyrl train sft on worked answers, or a reward given in steps."),
    Rule("too easy", lambda f: f.decided and f.easy, FLAT,
        "Harder prompts; of these, task.sampler=difficulty draws those that are solved seldom."),
    Rule("prompts that are decided", lambda f: f.decided and not (f.hard or f.easy), FLAT,
        "Draw the prompts that teach: task.sampler=difficulty, from rates of --write ROWS.jsonl with "
        "task.data=ROWS.jsonl."),
    Rule("all completions alike", lambda f: f.alike and not (f.knows_right and f.pass_rate > 0.8),
        "{repeated:.0%} of the completions repeat another of their prompt (entropy {entropy:.2g} nats a token).",
        "Sample more widely: {wider}."),
    Rule("temperature too high", lambda f: f.temperature > 1 and f.lost > 0 and f.lost >= f.least_lost,
        "At temperature {temperature:g} the mean reward is {reward_mean:.3g}, greedily it is {reward_greedy:.3g}.",
        "generation.temperature=1.0."),
    Rule("a long run", lambda f: f.run_seconds >= LONG_RUN_S,
        "The rollouts of {steps:,} steps alone take about {lasting}.",
        "Fewer steps at first (run.num_steps); later more of them: tinyrl train --from RUN run.num_steps=N."),
)  # fmt: skip


def section(f: SimpleNamespace) -> CheckSection:
    """Return pass rates, rewards, lengths and the answers with the highest and the lowest reward."""
    took, rates = format_seconds(f.seconds), None
    lines = [f"{f.prompts} of {f.prompts_there:,} prompts, {f.samples} completions each, in {took}"]
    if f.knows_right:
        edges = pairwise([-1.0, *RATES.values()])
        counts = [sum(low < rate <= high for rate in f.pass_rates) for low, high in edges]
        rates = dict(zip(RATES, counts, strict=True))
        bars = {name: "#" * math.ceil(BAR * count / (max(counts) or 1)) for name, count in rates.items()}
        lines += [f"pass rate {name:9} {count:4} {bars[name]}" for name, count in rates.items()]
    if f.ends:
        lines += [f"reward {format_number(f.reward_mean)} on average, greedily {format_number(f.reward_greedy)}",
                  f"{f.spread:.0%} of groups of {f.size} have rewards that differ"]  # fmt: skip
        lines += [f"  reward {format_number(answer.reward)}: {one_line(answer.text, SHOWN)!r}" for answer in f.ends]
    lines += [f"{f.mean_length:.1f} tokens on average, at most {f.longest}; {f.truncated:.0%} cut off at {f.limit}",
              f"entropy {f.entropy:.2g} nats a token; {f.distinct:.0%} of a prompt's completions are different; "
              f"{f.rollout_seconds:.2g} s to sample a step like this"]  # fmt: skip
    facts = {name: getattr(f, name) for name in FACTS} | {"pass_rates": rates, "groups_with_spread": f.spread}
    facts["pass_rate"] = f.pass_rate if f.knows_right else None
    return CheckSection("policy", lines, facts, [rule.finding(f) for rule in TABLE if rule.when(f)])


def write_rates(path: Path, config: Config, rates: dict[str, float]) -> str:
    """Write the rows of task.data, or a task's own, with a column `pass_rate` for those that were tried. Read as
    task.data they fall into the same training and held-out rows as before.
    """
    where = config.task
    if load_task(where.name or "rows").generate is not None:
        raise ValueError("--write: rows that are made have no file to put rates into")
    everything = {"max_samples": None, "eval_data": where.eval_data or where.data}
    rows = load_split(config.model_copy(update={"task": where.model_copy(update=everything)}), "train")
    rated = [{**row, PASS_RATE: json_safe(to_number(rates.get(row_key(row), row.get(PASS_RATE))))} for row in rows]
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rated))
    return f"{path}: {len(rows):,} rows, {len(rates):,} of them with a pass rate"
