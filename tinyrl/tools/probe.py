"""`tinyrl probe`: what a run would begin with, before it costs anything.

The policy as it is answers some of the training prompts, and the run's own rewards judge them. What comes of it is said
by probe_findings.py.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.data.rows import PASS_RATE, keyed_order, row_key
from tinyrl.evaluation.evaluate import EVAL_STEP
from tinyrl.evaluation.statistics import mean, numbers
from tinyrl.models.device import peak_memory_gb
from tinyrl.rewards.trial import GoldCheck, check_gold
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import apply_length_rules, sample_and_score, sample_lines, written
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.runs.findings import Row
from tinyrl.runs.records import number
from tinyrl.runs.run_dir import finite, write_whole
from tinyrl.tasks import load_split, load_task
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.launch import out_of_memory_stops

FEWEST_SAMPLES = 8  # of a prompt, so that its pass rate is one
ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class Probe:
    """What was seen. lines: a completion each, as samples.jsonl has them, the `samples` of a prompt together, with its
    `tokens`, the `gold` answer of its row and why it `failed` (None: it did not); greedy: one for each prompt.

    seconds: of sampling and judging all of them; rollout_seconds: of a run's step, with completions as long as these,
    without its update; entropy in nats a token; positions: tokens that prompt and answer may have together, of which
    the longest prompt takes `longest_prompt`.
    """

    config: Config
    lines: list[Row]
    greedy: list[Row]
    samples: int
    num_there: int
    gold: GoldCheck | None
    entropy: float
    seconds: float
    rollout_seconds: float
    positions: float
    longest_prompt: int
    peak_gb: float = math.nan
    notes: tuple[str, ...] = ()

    @cached_property
    def groups(self) -> list[list[Row]]:
        return [self.lines[i : i + self.samples] for i in range(0, len(self.lines), self.samples)]

    @cached_property
    def rewards(self) -> list[float]:
        return rewards_of(self.lines)

    def is_right(self, line: Row) -> bool:
        return line["reward"] >= self.config.task.solved_reward

    @cached_property
    def pass_rates(self) -> list[float]:
        """Of each prompt; NaN where no completion of it has a reward."""
        solved = self.config.task.solved_reward
        return [mean([reward >= solved for reward in rewards_of(group)]) for group in self.groups]

    @property
    def knows_right(self) -> bool:
        """Whether some reward is that of a right answer, so that pass rates say something."""
        gold = self.gold is not None and self.gold.gold is not None and self.gold.gold >= self.config.task.solved_reward
        return gold or any(map(self.is_right, self.lines))

    def share(self, what: Callable[[Row], bool]) -> float:
        return mean([what(line) for line in self.lines])

    def with_spread(self, group_size: int) -> float:
        """The share of prompts a group of so many of whose completions has rewards that differ: expected, as if they
        were drawn from those there are without putting back. NaN where there are fewer.
        """
        if group_size > self.samples:
            return math.nan
        return mean([1 - _all_alike(rewards_of(group), group_size) for group in self.groups])

    @property
    def spread(self) -> float:
        """`with_spread` of the run's groups; without groups, of all that was sampled of a prompt."""
        size = self.config.on_policy.group_size
        return self.with_spread(size if size > 1 else self.samples)


def rewards_of(lines: list[Row]) -> list[float]:
    """Those of completions that have one."""
    return numbers([line["reward"] for line in lines])


def _all_alike(known: list[float], size: int) -> float:
    """The chance that `size` of these rewards, drawn without putting back, are all the same; 1 for fewer than two."""
    size = min(size, len(known))
    if size < 2:
        return 1.0
    return sum(math.comb(count, size) for count in Counter(known).values()) / math.comb(len(known), size)


# ---- sampling ----


def probe(config: Config, *, options: Options, num_prompts: int, samples: int | None, minutes: float) -> Probe:
    """Sample `samples` completions (None: a group, at least 8) of up to `num_prompts` training prompts, for about so
    many `minutes`. No weight is changed, nothing is written. Raises ValueError as a run would.
    """
    if not config.samples:
        raise ValueError(f"{config.method} learns from rows, and a probe looks at what a policy samples: tinyrl plan")
    when = "while the policy was probed"
    with out_of_memory_stops(when), closing(trainer_of(config.method)(config, options=options)) as trainer:
        notes = [resolve_threads(trainer), *trainer.check()]
        gold = check_gold(trainer.scorer, trainer.train_prompts) if trainer.scorer.names else None
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
        a_step = seconds / len(lines) * config.on_policy.batch_size
        return Probe(
            config,
            lines,
            greedy,
            samples,
            len(there),
            gold,
            -mean(logprobs),
            seconds,
            a_step,
            trainer.positions,
            longest,
            peak_gb=peak_memory_gb(trainer.accelerator.device),
            notes=tuple(note for note in notes if note.startswith(("warning", "device", "sampling engine"))),
        )


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
    tokens = rollout.num_actions[: len(repeated)].tolist()
    more = [
        {
            "tokens": tokens[i],
            "gold": trainer.task.gold(prompt.row),
            "row": row_key(prompt.row),
            "failed": failed.get(i),
        }
        for i, prompt in enumerate(repeated)
    ]
    return [line | of_row for line, of_row in zip(lines, more, strict=True)]


def rows_with_rates(config: Config, found: Probe) -> list[Row]:
    """The rows of task.data, or a task's own to train on, with a column `pass_rate` for those that were probed.

    Read as task.data under the same task.split_seed they fall into the same training and held-out rows as before.
    """
    where = config.task
    if load_task(where.name or "rows").generate is not None:
        raise ValueError("--write: rows that are made have no file to put rates into")
    rates = {group[0]["row"]: rate for group, rate in zip(found.groups, found.pass_rates, strict=True)}
    everything = {"max_samples": None, "eval_data": where.eval_data or where.data}
    rows = load_split(config.model_copy(update={"task": where.model_copy(update=everything)}), "train")
    return [{**row, PASS_RATE: finite(number(rates.get(row_key(row), row.get(PASS_RATE))))} for row in rows]


def write_rows(path: Path, rows: list[Row]) -> None:
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
