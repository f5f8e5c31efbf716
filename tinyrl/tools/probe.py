"""`tinyrl probe`: what a run would begin with, before it costs anything.

The policy as it is answers some of the training prompts, and the run's own rewards judge them. What comes of it is
facts (pass rates, groups with spread, lengths, time, memory) and, as for a run, findings: what is wrong, with figures,
completions that show it, and one thing to change. A finding is a pure function of a `Probe`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.data.rows import PASS_RATE, keyed_order, row_key
from tinyrl.evaluation.evaluate import EVAL_STEP
from tinyrl.models.device import peak_memory_gb
from tinyrl.rewards.trial import GoldCheck, check_gold
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import apply_length_rules, sample_and_score, sample_lines, written
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.runs.diagnosis import as_json, columns, counted, examples, in_words, row_line
from tinyrl.runs.metrics import Finding, Row, known
from tinyrl.tasks import load_split, load_task
from tinyrl.tasks.grading import last_number, marked_answer, normalised_text, parse_number
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.text import number
from tinyrl.training.launch import out_of_memory_stops
from tinyrl.training.planning import MemoryPlan, seconds_of_passes, tried_meta_models, tried_plan
from tinyrl.training.planning import size as bytes_in_words

FEWEST_SAMPLES = 8  # of a prompt, so that its pass rate is one
ROWS_AT_A_TIME = 64
LONG_RUN_S = 48 * 3600
BAR = 24  # characters
RATES = {"never": 0.0, "to 25 %": 0.25, "to 50 %": 0.5, "to 75 %": 0.75, "over 75 %": 1 - 1e-9, "always": 1.0}


@dataclass(frozen=True)
class Probe:
    """What was seen. lines: a completion each, as samples.jsonl has them, the `samples` of a prompt together, with its
    `tokens`, the `gold` answer of its row and why it `failed` (None: it did not); greedy: one for each prompt.

    seconds: of sampling and judging all of them; step: seconds of a run's step by phase, with completions as long as
    these; entropy in nats a token; positions: tokens that prompt and answer may have together, of which the longest
    prompt takes `longest_prompt`.
    """

    config: Config
    lines: list[Row]
    greedy: list[Row]
    samples: int
    num_there: int
    gold: GoldCheck | None
    entropy: float
    seconds: float
    step: dict[str, float]
    positions: float
    longest_prompt: int
    plan: MemoryPlan | None = None
    peak_gb: float = math.nan
    notes: tuple[str, ...] = ()

    @cached_property
    def groups(self) -> list[list[Row]]:
        return [self.lines[i : i + self.samples] for i in range(0, len(self.lines), self.samples)]

    @cached_property
    def rewards(self) -> list[float]:
        return _finite(self.lines)

    def is_right(self, line: Row) -> bool:
        return line["reward"] >= self.config.task.solved_reward

    @cached_property
    def pass_rates(self) -> list[float]:
        """Of each prompt; NaN where no completion of it has a reward."""
        solved = self.config.task.solved_reward
        return [_mean(reward >= solved for reward in _finite(group)) for group in self.groups]

    @property
    def mean_rate(self) -> float:
        return _mean(rate for rate in self.pass_rates if not math.isnan(rate))

    @property
    def knows_right(self) -> bool:
        """Whether some reward is that of a right answer, so that pass rates say something."""
        gold = self.gold is not None and self.gold.gold is not None and self.gold.gold >= self.config.task.solved_reward
        return gold or any(map(self.is_right, self.lines))

    def share(self, what: Callable[[Row], bool]) -> float:
        return _mean(what(line) for line in self.lines)

    def with_spread(self, group_size: int) -> float:
        """The share of prompts a group of so many of whose completions has rewards that differ: expected, as if they
        were drawn from those there are without putting back. NaN where there are fewer.
        """
        if group_size > self.samples:
            return math.nan
        return _mean(1 - _all_alike(_finite(group), group_size) for group in self.groups)

    @property
    def spread(self) -> float:
        """`with_spread` of the run's groups; without groups, of all that was sampled of a prompt."""
        size = self.config.on_policy.group_size
        return self.with_spread(size if size > 1 else self.samples)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else math.nan


def _finite(lines: list[Row]) -> list[float]:
    """The rewards of those that have one."""
    return [line["reward"] for line in lines if not math.isnan(line["reward"])]


def _all_alike(known: list[float], size: int) -> float:
    """The chance that `size` of these rewards, drawn without putting back, are all the same; 1 for fewer than two."""
    size = min(size, len(known))
    if size < 2:
        return 1.0
    return sum(math.comb(count, size) for count in Counter(known).values()) / math.comb(len(known), size)


# ---- sampling ----


def probe(config: Config, *, options: Options, num_prompts: int, samples: int | None, minutes: float) -> Probe:
    """Sample `samples` completions (None: a group, at least 8) of up to `num_prompts` training prompts, for about so
    many `minutes`, and time a step. No weight is changed, nothing is written. Raises ValueError as a run would.
    """
    if not config.samples:
        raise ValueError(f"{config.method} learns from rows, and a probe looks at what a policy samples: tinyrl plan")
    meta = tried_meta_models(config, options=options)
    when = "while the policy was probed"
    with out_of_memory_stops(when), closing(trainer_of(config.method)(config, options=options)) as trainer:
        notes = [resolve_threads(trainer), *trainer.check()]
        gold = check_gold(trainer.scorer, trainer.train_prompts) if trainer.scorer.names else None
        plan = tried_plan(trainer, meta)
        samples = samples or max(FEWEST_SAMPLES, config.on_policy.group_size)
        there = trainer.train_prompts
        chosen = [there[i] for i in keyed_order(f"probe {config.run.seed}", len(there))[:num_prompts]]
        at_a_time = max(1, min(config.on_policy.num_prompts, ROWS_AT_A_TIME // samples))
        lines, greedy, logprobs = list[Row](), list[Row](), list[float]()
        prompts, started, last = list[PreparedPrompt](), time.perf_counter(), 0.0
        for i in range(0, len(chosen), at_a_time):
            before = time.perf_counter()
            if before - started + last > 60 * minutes and i:
                break
            prompts = chosen[i : i + at_a_time]
            rollout = _sampled(trainer, prompts, samples, greedy=False)
            logprobs += rollout.sampling_logprobs[rollout.response_mask].tolist()
            lines += _lines(trainer, prompts, rollout, samples)
            last = time.perf_counter() - before
            greedy += _lines(trainer, prompts, _sampled(trainer, prompts, 1, greedy=True), 1)
        seconds = last * len(lines) / max(1, len(prompts) * samples)
        longest = max(len(prompt.tokens) for prompt in there)
        positions = getattr(trainer.roles.causal.config, "max_position_embeddings", None) or math.inf
        found = Probe(
            config, lines, greedy, samples, len(there), gold, -_mean(logprobs), seconds, {}, positions, longest, plan
        )
        step = _step_seconds(trainer, found, [len(prompt.tokens) for prompt in there])
        peak = peak_memory_gb(trainer.accelerator.device)
        said = tuple(note for note in notes if note.startswith(("warning", "device", "sampling engine")))
        return replace(found, step=step, peak_gb=peak, notes=said)


def _sampled(trainer: Any, prompts: list[PreparedPrompt], samples: int, *, greedy: bool) -> Rollout:
    rollout = sample_and_score(prompts, trainer, group_size=samples, step=EVAL_STEP, greedy=greedy)
    most = trainer.config.generation.max_new_tokens
    apply_length_rules(rollout, trainer.config.reward, max_new_tokens=most)
    return rollout


def _lines(trainer: Any, prompts: list[PreparedPrompt], rollout: Rollout, samples: int) -> list[Row]:
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    failed = {one.row: one.reason for one in rollout.failures}
    texts = [written(rollout, row, trainer.scorer) for row in range(len(rollout))]
    where = {prompt.index: prompt.text for prompt in prompts}
    lines = sample_lines(rollout, texts, kind="probe", prompts=where, group_size=samples, names=trainer.scorer.names)
    return [
        {
            **line,
            "tokens": tokens,
            "gold": trainer.task.gold(prompt.row),
            "row": row_key(prompt.row),
            "failed": failed.get(i),
        }
        for i, (line, prompt, tokens) in enumerate(
            zip(lines, repeated, rollout.num_actions[: len(repeated)].tolist(), strict=True)
        )
    ]


def _step_seconds(trainer: Any, found: Probe, prompts: list[int]) -> dict[str, float]:
    """By phase: sampling and judging as measured, the passes by a short calibration, for completions of this length."""
    section, planned = found.config.on_policy, trainer.longest_step()[0].sizes.lengths
    share = (_mean(prompts) + _mean(line["tokens"] for line in found.lines)) / _mean(planned)
    passes = seconds_of_passes(trainer)
    sampling = found.seconds / len(found.lines) * section.num_prompts * section.group_size
    return {"rollout": sampling} | {name: seconds * min(1.0, share) for name, seconds in passes.items()}


def rows_with_rates(config: Config, found: Probe) -> list[Row]:
    """The rows of task.data, or a task's own to train on, with a column `pass_rate` for those that were probed.

    Read as task.data under the same task.split_seed they fall into the same training and held-out rows as before.
    """
    where = config.task
    if where.sources or load_task(where.name or "rows").generate is not None:
        raise ValueError("--write: rows that are made, or come from several sources, have no file to put rates into")
    rates = {group[0]["row"]: rate for group, rate in zip(found.groups, found.pass_rates, strict=True)}
    whole = config.model_copy(update={"task": where.model_copy(update={"max_samples": None})})
    splits = ["train", "eval"] if where.data is not None and where.eval_data is None else ["train"]
    rows = [row for split in splits for row in load_split(whole, split)]
    return [{**row, PASS_RATE: _known(rates.get(row_key(row), row.get(PASS_RATE)))} for row in rows]


def _known(rate: Any) -> float | None:
    return rate if isinstance(rate, int | float) and not math.isnan(rate) else None


def write_rows(path: Path, rows: list[Row]) -> None:
    """As .jsonl, whole or not at all."""
    writing = path.with_name(f"{path.name}.writing")
    writing.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(writing, path)


# ---- findings ----


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
    whole, cut = (_mean(_finite([one for one in seen.lines if _is_cut(one) == it])) for it in (False, True))
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
    return Finding(
        "right answers in another form",
        f"{len(missed) / len(seen.lines):.0%} of the completions say the gold answer, and are not scored as right: "
        f"the reward reads it as in {_end_of(str(missed[0]['gold']))!r}.",
        "Ask for that form in task.system_prompt, or teach it first by some steps of tinyrl train sft.",
        {"missed": len(missed) / len(seen.lines)},
        rank=lambda row: float(bool(row["gold"]) and not seen.is_right(row) and _says(row["completion"], row["gold"])),
    )


def _end_of(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"


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
    rate, spread = seen.mean_rate, seen.spread
    said = f"{1 - spread:.0%} of the groups would have the same reward for all their completions, which teaches nothing"
    if rate <= 0.2 and spread < 0.05:
        return Finding(
            "too hard",
            f"{said}; {rate:.1%} of the completions are right.",
            "Easier prompts, some steps of tinyrl train sft on worked answers first, or a reward given in steps.",
            {"with_spread": spread, "pass_rate": rate},
            rank=lambda row: known(row["reward"], -math.inf),
        )
    if rate >= 0.9:
        return Finding(
            "too easy",
            f"{said}; {rate:.0%} of the completions are right.",
            "Harder prompts; of these, task.skip_solved=1 leaves out for an epoch those that are solved.",
            {"with_spread": spread, "pass_rate": rate},
            rank=lambda row: -known(row["reward"], -math.inf),
        )
    return Finding(
        "prompts that are decided",
        f"{said}; {rate:.0%} of the completions are right.",
        "Draw the prompts that teach: task.sampler=difficulty, from these rates with --write ROWS.jsonl and "
        "task.data=ROWS.jsonl.",
        {"with_spread": spread, "pass_rate": rate},
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
    narrow = [
        change
        for is_narrow, change in (
            (generation.temperature < 0.7, "generation.temperature=1.0"),
            (0 < generation.top_k < 5, "generation.top_k=0"),
            (generation.top_p < 0.9, "generation.top_p=1.0"),
        )
        if is_narrow
    ]
    repeated = 1 - _mean(distinct) / seen.samples
    if (seen.knows_right and seen.mean_rate > 0.8) or not (same >= 0.75 or (narrow and repeated >= 0.5)):
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
    pairs = [(g["reward"], _mean(_finite(group))) for g, group in zip(seen.greedy, seen.groups, strict=True)]
    lost = [greedy - sampled for greedy, sampled in pairs if not math.isnan(greedy - sampled)]
    if temperature <= 1.0 or len(lost) < 8:
        return None
    gap, noise = _mean(lost), statistics.stdev(lost) / math.sqrt(len(lost))
    spread = max(seen.rewards) - min([*seen.rewards, *(g for g, _ in pairs if not math.isnan(g))])
    if gap < 3 * noise or gap < 0.1 * spread or gap <= 0:
        return None
    greedy = _mean(greedy for greedy, _ in pairs if not math.isnan(greedy))
    return Finding(
        "temperature too high",
        f"At temperature {temperature:g} the mean reward is {_mean(seen.rewards):.3g}, greedily it is {greedy:.3g}.",
        "generation.temperature=1.0.",
        {"sampled": _mean(seen.rewards), "greedy": greedy},
    )


def by_length(seen: Probe) -> Finding | None:
    """Within groups the reward goes with the number of tokens, among completions that end."""
    pairs = list[tuple[float, float]]()
    for group in seen.groups:
        ended = [line for line in group if not _is_cut(line) and not math.isnan(line["reward"])]
        rewards, tokens = [line["reward"] for line in ended], [line["tokens"] for line in ended]
        pairs += [(r - _mean(rewards), t - _mean(tokens)) for r, t in zip(rewards, tokens, strict=True)]
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
    a_step = sum(seen.step.values())
    seconds = a_step * seen.config.run.num_steps
    if seconds < LONG_RUN_S:
        return None
    longest = max(seen.step, key=seen.step.__getitem__)
    return Finding(
        "a long run",
        f"{seen.config.run.num_steps:,} steps take about {in_time(seconds)}, {seen.step[longest] / a_step:.0%} of it "
        f"{longest}.",
        "Fewer steps at first (run.num_steps); a run goes on with more of them: tinyrl fork RUN run.num_steps=N.",
        {"seconds": seconds},
    )


CHECKS = (
    failing, cut_off, empty, other_form, constant, decided, bigger_group, repeating, too_hot, by_length, long_run
)  # fmt: skip


def findings(seen: Probe) -> list[Finding]:
    return [found for check in CHECKS if (found := check(seen)) is not None]


# ---- in words ----


def in_time(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s"


def histogram(seen: Probe) -> dict[str, int]:
    """How many prompts have which pass rate."""
    edges = [-1.0, *RATES.values()]
    return {
        name: sum(least < rate <= most for rate in seen.pass_rates)
        for name, least, most in zip(RATES, edges, edges[1:], strict=False)
    }


def facts(seen: Probe) -> dict[str, Any]:
    """The numbers, by name; None: not known."""
    found = {
        "prompts": len(seen.groups),
        "prompts_there": seen.num_there,
        "samples": seen.samples,
        "pass_rates": histogram(seen) if seen.knows_right else None,
        "pass_rate": seen.mean_rate if seen.knows_right else None,
        "groups_with_spread": seen.spread,
        "reward_mean": _mean(seen.rewards),
        "reward_greedy": _mean(_finite(seen.greedy)),
        "mean_length": _mean(line["tokens"] for line in seen.lines),
        "longest": max(line["tokens"] for line in seen.lines),
        "truncated": seen.share(_is_cut),
        "entropy": seen.entropy,
        "distinct": _mean(len({line["completion"] for line in group}) for group in seen.groups) / seen.samples,
        "seconds": seen.seconds,
        "seconds_a_step": seen.step,
        "memory_planned_gb": seen.plan.peak / 1e9 if seen.plan is not None else None,
        "memory_measured_gb": seen.peak_gb,
    }
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in found.items()}


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
            f"{fact['prompts']} of {seen.num_there:,}, {seen.samples} completions each, in {in_time(seen.seconds)}"
        ]
    }
    if seen.knows_right:
        most = max(histogram(seen).values()) or 1
        table["pass rate"] = [f"{n:9} {c:4} {'#' * math.ceil(BAR * c / most)}" for n, c in histogram(seen).items()]
    if seen.rewards:
        table["groups"] = [f"{seen.spread:.0%} of {size if size > 1 else seen.samples} have rewards that differ"]
        judged = [line.strip() for line in seen.gold.lines()] if seen.gold is not None else []
        means = f"mean {number(_mean(seen.rewards))}, greedily {number(_mean(_finite(seen.greedy)))}"
        table["reward"] = [means, *judged, *_highest_and_lowest(seen)]
    lengths = f"{fact['mean_length']:.1f} a completion, at most {fact['longest']}"
    table["tokens"] = [f"{lengths}; {fact['truncated']:.0%} cut off at {config.generation.max_new_tokens}"]
    different = f"{fact['distinct']:.0%} of a prompt's completions are different"
    table["sampling"] = [f"entropy {seen.entropy:.2g} nats a token; {different}"]
    a_step, steps = sum(seen.step.values()), config.run.num_steps
    phases = ", ".join(f"{name} {seconds:.2g}" for name, seconds in seen.step.items())
    whole = f"{in_time(a_step * steps)} for {steps:,}, with completions like these"
    table["time"] = [f"{a_step:.2g} s a step ({phases}), {whole}"]
    plan = f"{bytes_in_words(seen.plan.peak)} planned (while {seen.plan.highest}), " if seen.plan is not None else ""
    table["memory"] = [f"{plan}{seen.peak_gb:.2f} GB so far, without an optimizer step"]
    return table


def _highest_and_lowest(seen: Probe) -> list[str]:
    """Completions of one prompt whose rewards are farthest apart."""
    judged = [[line for line in group if not math.isnan(line["reward"])] for group in seen.groups]
    ends = [sorted(group, key=lambda line: -line["reward"])[:: max(1, len(group) - 1)] for group in judged if group]
    shown = max(ends, key=lambda pair: pair[0]["reward"] - pair[-1]["reward"])
    shown = shown if shown[0]["reward"] > shown[-1]["reward"] else shown[:1]
    return [row_line(row, columns() - 11).strip() for row in shown]
