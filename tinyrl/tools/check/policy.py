"""What the policy makes of some training prompts before a run, and whether it can learn from them.

Findings are pure functions of `Seen`: what is wrong, with figures, and one thing to change.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import PASS_RATE, keyed_order, row_key
from tinyrl.evaluation.statistics import mean, numbers
from tinyrl.runs.findings import Finding
from tinyrl.runs.records import number as to_number
from tinyrl.runs.run_dir import finite, write_whole
from tinyrl.tasks import load_split, load_task
from tinyrl.tasks.grading import last_number, marked_answer, normalised_text, parse_number
from tinyrl.text import number, one_line
from tinyrl.tools.check.page import CheckSection
from tinyrl.tools.report.outcome import show_seconds

if TYPE_CHECKING:
    from tinyrl.tools.check.loaded import Answer

FEWEST_SAMPLES = 8  # completions of a prompt, so that its pass rate is one
ROWS_AT_A_TIME = 64
LONG_RUN_S = 48 * 3600
SHOWN, BAR = 60, 24
RATES = {"never": 0.0, "to 25 %": 0.25, "to 50 %": 0.5, "to 75 %": 0.75, "over 75 %": 1 - 1e-9, "always": 1.0}
LOOK = "Look at the reward in this page: the arguments it gets, and what it gives to gold answers."


@dataclass(frozen=True)
class Seen:
    """Answers to some prompts, the `samples` of a prompt together, and one greedy answer to each prompt.

    num_there: training prompts in all; knows_gold: the reward gives full marks to gold answers; entropy in nats a
    token; step_seconds: of a step's rollout with answers as long as these; positions: tokens that a prompt, the longest
    of which has longest_prompt, and its answer may have together.
    """

    config: Config
    answers: list[Answer]
    greedy: list[Answer]
    samples: int
    num_there: int
    knows_gold: bool = False
    entropy: float = math.nan
    seconds: float = 0.0
    step_seconds: float = 0.0
    positions: float = math.inf
    longest_prompt: int = 0

    @cached_property
    def groups(self) -> list[list[Answer]]:
        return [self.answers[i : i + self.samples] for i in range(0, len(self.answers), self.samples)]

    @cached_property
    def rewards(self) -> list[float]:
        return rewards_of(self.answers)

    def is_right(self, answer: Answer) -> bool:
        return answer.reward >= self.config.task.solved_reward

    @cached_property
    def pass_rates(self) -> list[float]:
        """Return the share of right answers of each prompt; NaN where none of them has a reward."""
        solved = self.config.task.solved_reward
        return [mean([reward >= solved for reward in rewards_of(group)]) for group in self.groups]

    @property
    def knows_right(self) -> bool:
        """Return whether some reward is that of a right answer, so that pass rates mean something."""
        return self.knows_gold or any(map(self.is_right, self.answers))

    def share(self, what: Callable[[Answer], object]) -> float:
        return mean([bool(what(answer)) for answer in self.answers])

    def with_spread(self, group_size: int) -> float:
        """Return the expected share of groups of this size whose rewards differ, drawn from the answers there are
        without putting back; NaN where there are fewer.
        """
        if group_size > self.samples:
            return math.nan
        shares = []
        for group in self.groups:
            known = rewards_of(group)
            size = min(group_size, len(known))
            alike = sum(math.comb(count, size) for count in Counter(known).values())
            shares.append(0.0 if size < 2 else 1 - alike / math.comb(len(known), size))
        return mean(shares)

    @property
    def spread(self) -> float:
        """Return `with_spread` of the run's groups; without groups, of all answers to a prompt."""
        size = self.config.on_policy.group_size
        return self.with_spread(size if size > 1 else self.samples)


def rewards_of(answers: list[Answer]) -> list[float]:
    return numbers([answer.reward for answer in answers])


def look(trainer: Any, *, num_prompts: int, samples: int | None, minutes: float, knows_gold: bool) -> Seen:
    """Sample answers to up to `num_prompts` training prompts, for about so many minutes. No weight is changed."""
    from tinyrl.tools.check.loaded import answers

    config, there = trainer.config, trainer.train_prompts
    samples = samples or max(FEWEST_SAMPLES, config.on_policy.group_size)
    chosen = [there[i] for i in keyed_order(f"probe {config.run.seed}", len(there))[:num_prompts]]
    at_a_time = max(1, min(config.on_policy.num_prompts, ROWS_AT_A_TIME // samples))
    sampled, greedy = list["Answer"](), list["Answer"]()
    logprobs, last, started = 0.0, 0.0, time.perf_counter()
    for i in range(0, len(chosen), at_a_time):
        before = time.perf_counter()
        if i and before - started + last > 60 * minutes:
            break
        found, summed = answers(trainer, chosen[i : i + at_a_time], samples, greedy=False)
        last = (time.perf_counter() - before) / len(found)
        sampled, logprobs = sampled + found, logprobs + summed
        greedy += answers(trainer, chosen[i : i + at_a_time], 1, greedy=True)[0]
        last *= len(found)
    a_row = last / min(len(sampled), at_a_time * samples)
    return Seen(
        config,
        sampled,
        greedy,
        samples,
        len(there),
        knows_gold,
        entropy=-logprobs / max(1, sum(answer.tokens for answer in sampled)),
        seconds=time.perf_counter() - started,
        step_seconds=a_row * config.on_policy.batch_size,
        positions=trainer.positions,
        longest_prompt=max(len(prompt.tokens) for prompt in there),
    )


# ---- findings ----


def findings(seen: Seen) -> list[Finding]:
    return [found for check in (_of_rewards, _of_texts, _of_groups, _of_sampling) for found in check(seen)]


def _of_rewards(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with rewards by themselves: missing, or the same for everything."""
    unrewarded = 1 - len(seen.rewards) / len(seen.answers)
    if seen.config.trains.rewarded and unrewarded >= 0.25:
        first = next((answer.failed for answer in seen.answers if answer.failed), None)
        why = f"its functions failed, at first: {first}" if first else "its functions say that they do not apply"
        what = f"{unrewarded:.0%} of the completions have no reward: {why}."
        yield Finding("rewards dropped", what, LOOK, {"dropped": unrewarded})
    if is_constant(seen):
        texts, value = {answer.text for answer in seen.answers}, seen.rewards[0]
        what = f"All {len(seen.rewards)} completions, {len(texts)} of them different, have the reward {value:.3g}."
        yield Finding("one reward for everything", what, LOOK, {"reward": value, "distinct": float(len(texts))})
    wrong = [answer for answer in seen.answers if answer.gold and not seen.is_right(answer)]
    missed = [answer for answer in wrong if _holds(answer.text, str(answer.gold))]
    if seen.knows_gold and len(missed) >= 0.2 * len(seen.answers):
        gold = str(missed[0].gold)
        what = (
            f"{len(missed) / len(seen.answers):.0%} of the completions hold the gold answer and are not scored as "
            f"right: the reward reads it as in {'...' * (len(gold) > SHOWN)}{gold[-SHOWN:]!r}."
        )
        change = "Ask for that form in task.system_prompt, or teach it first by some steps of tinyrl train sft."
        yield Finding("right answers in another form", what, change, {"missed": len(missed) / len(seen.answers)})
    pairs = list[tuple[float, float]]()
    for group in seen.groups:
        ended = [answer for answer in group if not answer.cut and not math.isnan(answer.reward)]
        rewards, tokens = [answer.reward for answer in ended], [float(answer.tokens) for answer in ended]
        pairs += [(r - mean(rewards), t - mean(tokens)) for r, t in zip(rewards, tokens, strict=True)]
    spread = [math.fsum(x * x for x in column) for column in zip(*pairs, strict=True)] if pairs else [0.0]
    if len(pairs) >= 32 and min(spread) > 1e-9:
        correlation = math.fsum(r * t for r, t in pairs) / math.sqrt(math.prod(spread))
        if abs(correlation) >= 0.8:
            way = "longer" if correlation > 0 else "shorter"
            what = f"Among completions of one prompt the {way} get more (correlation {correlation:.2f})."
            yield Finding("reward follows length", what, "Do not pay for length alone.", {"correlation": correlation})


def is_constant(seen: Seen) -> bool:
    """Return whether different completions all have one reward, which is neither too easy nor too hard to get."""
    if len(set(seen.rewards)) != 1 or len({a.text for a in seen.answers}) < len(seen.answers) / 8:
        return False
    return not seen.knows_gold and seen.share(lambda answer: answer.cut) < 0.98


def _holds(text: str, gold: str) -> bool:
    answer = marked_answer(gold) or gold
    if (wanted := parse_number(answer)) is not None:
        return parse_number(last_number(text)) == wanted
    words = normalised_text(answer)
    return len(words) > 2 and words in normalised_text(text)


def _of_texts(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with completions: cut off, or empty."""
    share, most = seen.share(lambda answer: answer.cut), seen.config.generation.max_new_tokens
    if share >= 0.2:
        whole, cut = (mean(rewards_of([a for a in seen.answers if a.cut == it])) for it in (False, True))
        beside = "" if math.isnan(whole + cut) else f"; their mean reward is {cut:.3g}, of those that end {whole:.3g}"
        room = int(min(2 * most, seen.positions - seen.longest_prompt))
        change = f"Raise the limit: generation.max_new_tokens={room}."
        if share >= 0.98:
            change = (
                "See whether the model's end of text, above, is one that it writes; a base model ends where "
                "generation.stop says, such as generation.stop=['\\n']."
            )
        elif room < 1.5 * most:
            change = "Ask for shorter answers (task.system_prompt), or take a model with more positions."
        name = "nothing ends" if share >= 0.98 else "cut off"
        what = f"{share:.0%} of the completions are cut off at {most} tokens (generation.max_new_tokens){beside}."
        yield Finding(name, what, change, {"truncated": share, "reward_cut": cut, "reward_whole": whole})
    empty = seen.share(lambda answer: not answer.text.strip())
    if empty >= 0.2:
        what = f"{empty:.0%} of the completions hold no text: the policy ends its turn at once."
        change = "Look at how the prompt ends, above: task.chat and task.chat_template decide on that."
        yield Finding("empty completions", what, change, {"empty": empty})


def _of_groups(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with groups: no spread, too hard, too easy, too small, all alike."""
    size, spread, own = seen.config.on_policy.group_size, seen.spread, seen.config.trains.own
    now, larger = seen.with_spread(size), size
    while 2 * larger <= seen.samples and seen.with_spread(larger) < 0.5:
        larger *= 2
    if size > 1 and now < 0.5 and seen.with_spread(larger) >= max(1.5 * now, 0.25):
        then = seen.with_spread(larger)
        what = f"{now:.0%} of groups of {size} would have rewards that differ, and {then:.0%} of groups of {larger}."
        change = f"{own}.group_size={larger}, with as many prompts fewer for the same time."
        yield Finding("group too small", what, change, {"with_spread": now, "with_spread_then": then})
    elif seen.knows_right and spread <= 0.25 and not is_constant(seen):
        rate = mean(seen.pass_rates)
        name, change = "prompts that are decided", "Draw the prompts that teach: task.sampler=difficulty, from rates "
        change += "of --write ROWS.jsonl with task.data=ROWS.jsonl."
        if rate <= 0.2 and spread < 0.05:
            name = "too hard"
            change = "Easier prompts, some steps of tinyrl train sft on worked answers, or a reward given in steps."
        elif rate >= 0.9:
            name = "too easy"
            change = "Harder prompts; of these, task.sampler=difficulty draws those that are solved seldom."
        what = f"{1 - spread:.0%} of the groups would have one reward for all, which teaches nothing; {rate:.1%} of the"
        figures = {"with_spread": spread, "pass_rate": rate}
        yield Finding(name, f"{what} completions are right.", change, figures)
    generation = seen.config.generation
    distinct = [len({answer.text for answer in group}) for group in seen.groups]
    same, repeated = mean([float(count == 1) for count in distinct]), 1 - mean(distinct) / seen.samples
    narrow = ["generation.temperature=1.0"] * (generation.temperature < 0.7)
    narrow += ["generation.top_k=0"] * (0 < generation.top_k < 5) + ["generation.top_p=1.0"] * (generation.top_p < 0.9)
    solved = seen.knows_right and mean(seen.pass_rates) > 0.8
    if not solved and (same >= 0.75 or (narrow and repeated >= 0.5)):
        what = f"{repeated:.0%} of the completions repeat another of their prompt (entropy {seen.entropy:.2g} nats a"
        change = " ".join(narrow) or "generation.temperature=1.3; or begin from a model trained for less long"
        figures = {"repeated": repeated, "entropy": seen.entropy}
        yield Finding("all completions alike", f"{what} token).", f"Sample more widely: {change}.", figures)


def _of_sampling(seen: Seen) -> Iterator[Finding]:
    """Yield what is wrong with temperature and length of the run."""
    temperature = seen.config.generation.temperature
    pairs = zip(seen.greedy, seen.groups, strict=True)
    lost = numbers([greedy.reward - mean(rewards_of(group)) for greedy, group in pairs])
    if temperature > 1.0 and len(lost) >= 8:
        gap, noise, greedily = mean(lost), statistics.stdev(lost) / math.sqrt(len(lost)), rewards_of(seen.greedy)
        if gap > 0 and gap >= max(3 * noise, 0.1 * (max(seen.rewards) - min([*seen.rewards, *greedily]))):
            sampled, best = mean(seen.rewards), mean(greedily)
            what = f"At temperature {temperature:g} the mean reward is {sampled:.3g}, greedily it is {best:.3g}."
            change = "generation.temperature=1.0."
            yield Finding("temperature too high", what, change, {"sampled": sampled, "greedy": best})
    steps = seen.config.run.num_steps
    if seen.step_seconds * steps >= LONG_RUN_S:
        what = f"The rollouts of {steps:,} steps alone take about {show_seconds(seen.step_seconds * steps)}."
        change = "Fewer steps at first (run.num_steps); later more of them: tinyrl train --from RUN run.num_steps=N."
        yield Finding("a long run", what, change, {"seconds": seen.step_seconds * steps})


# ---- the section ----


def section(seen: Seen) -> CheckSection:
    """Return pass rates, rewards, lengths and the answers with the highest and the lowest reward."""
    config, size = seen.config, seen.config.on_policy.group_size
    lengths, different = [answer.tokens for answer in seen.answers], [len({a.text for a in g}) for g in seen.groups]
    cut, rates = seen.share(lambda answer: answer.cut), None
    lines = [f"{len(seen.groups)} of {seen.num_there:,} prompts, {seen.samples} completions each, in "
             f"{show_seconds(seen.seconds)}"]  # fmt: skip
    if seen.knows_right:
        edges = pairwise([-1.0, *RATES.values()])
        rates = {name: sum(low < rate <= high for rate in seen.pass_rates)
                 for name, (low, high) in zip(RATES, edges, strict=True)}  # fmt: skip
        most = max(rates.values()) or 1
        lines += [f"pass rate {n:9} {c:4} {'#' * math.ceil(BAR * c / most)}" for n, c in rates.items()]
    if seen.rewards:
        lines.append(
            f"reward {number(mean(seen.rewards))} on average, greedily {number(mean(rewards_of(seen.greedy)))}"
        )
        lines.append(f"{seen.spread:.0%} of groups of {size if size > 1 else seen.samples} have rewards that differ")
        for answer in sorted((a for a in seen.answers if not math.isnan(a.reward)), key=lambda a: -a.reward)[:: max(
            1, len(seen.rewards) - 1)]:  # fmt: skip
            lines.append(f"  reward {number(answer.reward)}: {one_line(answer.text, SHOWN)!r}")
    lines.append(f"{mean(lengths):.1f} tokens on average, at most {max(lengths)}; {cut:.0%} cut off at "
                 f"{config.generation.max_new_tokens}")  # fmt: skip
    lines.append(f"entropy {seen.entropy:.2g} nats a token; {mean(different) / seen.samples:.0%} of a prompt's "
                 f"completions are different; {seen.step_seconds:.2g} s to sample a step like this")  # fmt: skip
    facts = {
        "prompts": len(seen.groups), "prompts_there": seen.num_there, "samples": seen.samples, "pass_rates": rates,
        "pass_rate": mean(seen.pass_rates) if seen.knows_right else None, "groups_with_spread": seen.spread,
        "reward_mean": mean(seen.rewards), "reward_greedy": mean(rewards_of(seen.greedy)),
        "mean_length": mean(lengths), "longest": max(lengths), "truncated": cut, "entropy": seen.entropy,
        "distinct": mean(different) / seen.samples, "seconds": seen.seconds, "rollout_seconds": seen.step_seconds,
    }  # fmt: skip
    return CheckSection("policy", lines, facts, findings(seen))


def write_rates(path: Path, seen: Seen) -> str:
    """Write the rows of task.data, or a task's own, with a column `pass_rate` for those that were tried. Read as
    task.data they fall into the same training and held-out rows as before.
    """
    where = seen.config.task
    if load_task(where.name or "rows").generate is not None:
        raise ValueError("--write: rows that are made have no file to put rates into")
    rates = {group[0].row: rate for group, rate in zip(seen.groups, seen.pass_rates, strict=True)}
    everything = {"max_samples": None, "eval_data": where.eval_data or where.data}
    rows: list[Row] = load_split(seen.config.model_copy(update={"task": where.model_copy(update=everything)}), "train")
    rated = [{**row, PASS_RATE: finite(to_number(rates.get(row_key(row), row.get(PASS_RATE))))} for row in rows]
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rated))
    return f"{path}: {len(rows):,} rows, {len(rates):,} of them with a pass rate"
