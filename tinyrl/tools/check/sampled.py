"""Sample answers to some training prompts before a run, in the time that the largest step leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tinyrl.data.rows import seeded_permutation
from tinyrl.evaluation.statistics import grouped
from tinyrl.rewards.holes import answer_in
from tinyrl.rollout.collect import Collector
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.tools.check.images import Look, compare_without_images
from tinyrl.tools.check.loaded import Answer, answers
from tinyrl.tools.check.right_answers import PaidForm
from tinyrl.tools.check.trial import Trial

FEWEST_SAMPLES = 8  # completions of a prompt, so that its pass rate is one
ROWS_AT_A_TIME = 64
STEP_TO_ROLLOUT = 3  # a guess: reference and update take about twice as long as sampling
MOST_EVAL_TOKENS = 1 << 17  # of an evaluation that is tried, beyond as many rows as a step has


def look(
    collector: Collector,
    *,
    knows_gold: bool,
    is_environment_alone: bool = False,
    paid: PaidForm | None = None,
    prompts: int = 64,
    samples: int | None = None,
    minutes: float = 2.0,
) -> Trial:
    """Sample answers to at most so many training prompts, in as much of the minutes as the largest step leaves, which
    nothing else can show; at least to one. No weight is changed. knows_gold, is_environment_alone: as `Trial` has them;
    paid: right answers that the reward pays for.
    """
    started = time.perf_counter()
    config = collector.config
    there = collector.train_prompts
    samples = samples or max(FEWEST_SAMPLES, config.on_policy.group_size)
    chosen = [there[i] for i in seeded_permutation(f"probe {config.run.seed}", len(there))[:prompts]]
    groups = list[list[Answer]]()
    greedy = list[Answer]()
    looks = list[Look]()
    pace = Pace(collector, samples=samples)
    fitting = 1  # the first prompt tells how long one takes
    while fitting and len(groups) < len(chosen):
        some = chosen[len(groups) : len(groups) + fitting]
        before = time.perf_counter()
        sampled = answers(collector, some, samples, greedy=False)
        sampled_at = time.perf_counter()
        groups += [with_gold(of, prompt, paid) for of, prompt in zip(grouped(sampled, samples), some, strict=True)]
        best = answers(collector, some, 1, greedy=True)
        greedy += best
        looks += compare_without_images(collector, some, best)
        now = time.perf_counter()
        pace.add(sampled, prompts=len(some), sampling=sampled_at - before, seconds=now - before)
        fitting = pace.fitting(60 * minutes - (now - started))
    environment = None if collector.runner is None else collector.runner.environment
    between = collector.longest_response - config.generation.max_new_tokens
    return Trial(
        config,
        groups,
        greedy,
        looks=looks,
        player="the environment" if environment is None else f"{environment.noun} `{environment.name}`",
        is_environment_alone=is_environment_alone,
        knows_gold=knows_gold,
        paid_example=None if paid is None else paid.example,
        rollout_seconds=pace.row_seconds * config.on_policy.batch_size,
        step_seconds=pace.step_seconds,
        positions=collector.policy.positions - max(len(prompt.tokens) for prompt in there) - between,
        prompts_there=len(there),
        prompts_wanted=len(chosen),
        seconds=time.perf_counter() - started,
    )


def with_gold(answers: list[Answer], prompt: PreparedPrompt, paid: PaidForm | None) -> list[Answer]:
    """Return answers to a prompt with the right one, where that is in a column that only the reward knows."""
    if paid is None or paid.answers.column is None:
        return answers
    right = answer_in(prompt.row.get(paid.answers.column))
    return [answer._replace(gold=right) for answer in answers]


@dataclass(frozen=True)
class Timed:
    """Prompts that were sampled together: the seconds to sample their completions, with greedy ones too, and the tokens
    of the longest, for which the others wait.
    """

    prompts: int
    sampling: float
    seconds: float
    longest: int


class Pace:
    """Predicts how long prompts take that are sampled together, and the largest step. State: the times so far."""

    def __init__(self, collector: Collector, *, samples: int) -> None:
        self.collector = collector
        self.samples = samples
        self.most = max(1, min(collector.config.on_policy.num_prompts, ROWS_AT_A_TIME // samples))
        self.timed = list[Timed]()

    def add(self, sampled: list[Answer], *, prompts: int, sampling: float, seconds: float) -> None:
        longest = max(answer.tokens for answer in sampled)
        self.timed.append(Timed(prompts, sampling, seconds, longest))

    @property
    def largest(self) -> Timed:
        """Return the most prompts that were sampled together, the quickest of them: the first ones warm up."""
        return max(self.timed, key=lambda one: (one.prompts, -one.seconds))

    @property
    def row_seconds(self) -> float:
        return self.largest.sampling / (self.samples * self.largest.prompts)

    @property
    def step_seconds(self) -> float:
        """Estimate the seconds of the largest step, whose responses are as long as they may be, and of an evaluation
        behind it, of a sample and a greedy one a row.
        """
        batch_size = self.collector.config.on_policy.batch_size
        longer = self.collector.longest_response / max(1, self.largest.longest)
        rows = STEP_TO_ROLLOUT * batch_size + 2 * eval_rows_tried(self.collector)
        return self.row_seconds * longer * rows

    def predicted(self, prompts: int) -> float:
        """Predict the seconds of so many prompts: on the line through the fewest and the most that were tried."""
        fewest = min(self.timed, key=lambda one: (one.prompts, one.seconds))
        most = self.largest
        if most.prompts == fewest.prompts:
            return most.seconds * prompts / most.prompts
        each = max(0.0, most.seconds - fewest.seconds) / (most.prompts - fewest.prompts)
        return most.seconds + each * (prompts - most.prompts)

    def fitting(self, left: float) -> int:
        """Return how many prompts to sample next in the seconds that are left, without those of the largest step where
        it fits: at most twice as many as ever before.
        """
        if self.step_seconds <= left:
            left -= self.step_seconds
        count = min(self.most, 2 * self.largest.prompts)
        while count and self.predicted(count) > left:
            count -= 1
        return count


def eval_rows_tried(collector: Collector) -> int:
    """Return the rows of the evaluation behind the largest step: not all of many, which would only take longer."""
    config = collector.config
    most = max(config.on_policy.batch_size, MOST_EVAL_TOKENS // collector.longest_response)
    return min(config.run.eval_prompts, len(collector.eval_prompts), most)
