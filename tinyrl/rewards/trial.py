"""The trial of a reward function before training, `tinyrl reward test`: scores of gold answers, nothing and nonsense.

It uses the user's own rows and the worker process that a run would use; no model is loaded.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments.trial import NONSENSE, Called, Tried
from tinyrl.rewards.functions import FunctionReward
from tinyrl.rewards.judge import JudgeReward, Usage
from tinyrl.tasks import Task
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt, row_columns
from tinyrl.text import visible
from tinyrl.workers.calls import RowFailure

if TYPE_CHECKING:
    from tinyrl.rewards.scorer import Scorer  # with torch, which the trial of a function does without


@dataclass(frozen=True)
class Batch(Called):
    """What was judged (gold, nothing, ...), with a score for each row (NaN: none)."""

    scores: list[float]

    @property
    def valid(self) -> list[float]:
        return [score for score in self.scores if not math.isnan(score)]


@dataclass
class Trial(Tried[Batch]):
    """Whether the first call of a function, made again, gave the same scores."""

    repeatable: bool = True
    chat_hint: str | None = None  # it takes completions for text that are messages

    def warnings(self) -> list[str]:
        found = [self.chat_hint] if self.chat_hint else []
        by_what = {batch.what: batch for batch in self.batches}
        gold, rivals = by_what.get("gold"), [by_what["nothing"], by_what["nonsense"]]
        if gold is not None:
            others = zip(*(rival.scores for rival in rivals), strict=True)
            pairs = [(g, [s for s in row if not math.isnan(s)]) for g, row in zip(gold.scores, others, strict=True)]
            beaten = sum(not math.isnan(g) and bool(row) and g <= max(row) for g, row in pairs)
            if beaten:
                found.append(
                    f"the gold answer scores no more than nothing or nonsense in {beaten} of {len(pairs)} rows"
                )
        valid = [score for batch in self.batches for score in batch.valid]
        if not valid:
            found.append("no completion got a score")
        elif min(valid) == max(valid):
            found.append(f"every completion scores {valid[0]:.4g}, so there is nothing to learn from")
        if not self.repeatable:
            found.append("the same completions got other scores when they were judged again")
        return found + super().warnings()


def try_function(use: str, task: Task, rows: list[Row], *, timeout_s: float) -> Trial:
    """Call the function at `use` on the gold answers of `rows` where the task knows them, on their `completion` column
    where there is one, on nothing and on nonsense. Raises ValueError where it cannot be loaded or lacks a column.
    """
    prompts, columns = [task.prompt(row) for row in rows], row_columns(rows)
    kinds: dict[str, list[str]] = {}
    gold = [task.gold(row) for row in rows]
    if all(answer is not None for answer in gold):
        kinds["gold"] = [str(answer) for answer in gold]
    if all(isinstance(row.get("completion"), str) for row in rows):
        kinds["completion"] = [row["completion"] for row in rows]
    kinds |= {"nothing": [""] * len(rows), "nonsense": [NONSENSE] * len(rows)}
    with FunctionReward(use, timeout_s=timeout_s) as function:
        function.start()  # its imports are not part of a call's time
        trial = Trial(function.name)
        for what, texts in [*kinds.items(), next(iter(kinds.items()))]:
            completions = [as_the_data_has_it(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
            begun = time.perf_counter()
            call = function(prompts, completions, columns)
            seconds = time.perf_counter() - begun
            trial.batches.append(Batch(what, len(rows), call.failures, seconds, call.scores))
        trial.printed, trial.chat_hint = [*function.printed.kept], function.chat_hint
    again = trial.batches.pop()
    trial.repeatable = str(again.scores) == str(trial.batches[0].scores)  # NaN is the same as NaN here
    return trial


def as_the_data_has_it(text: str, prompt: Prompt) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def render(trial: Trial) -> str:
    """A table of the calls, the first failure, and the warnings."""
    names = ("rows", "mean", "std", "min", "max", "none", "failed", "ms")
    lines = [f"{trial.name:12} {names[0]:>6} " + " ".join(f"{name:>9}" for name in names[1:])]
    for batch in trial.batches:
        valid = batch.valid
        deviation = statistics.stdev(valid) if len(valid) > 1 else 0.0
        spread = [statistics.mean(valid), deviation, min(valid), max(valid)] if valid else []
        cells = [f"{value:.4g}" for value in spread] or ["-"] * 4
        failed = len(batch.failed)
        cells += [str(batch.rows - len(valid) - failed), str(failed), f"{batch.seconds * 1e3:.1f}"]
        lines.append(f"{batch.what:12} {batch.rows:>6} " + " ".join(f"{cell:>9}" for cell in cells))
    median = statistics.median(batch.seconds for batch in trial.batches)
    of = f"{trial.batches[0].rows} (median), {trial.failed_share:.1%} failed"
    return "\n".join([*lines, "", f"{median * 1e3:.1f} ms a call of {of}", *trial.ending()])


# ---- The gold-answer check before step 1 ----
# A reward that raises on every answer to each of a few prompts would raise on every completion: the run does not begin.


FEW = 4  # prompts whose answers all fail before a run is refused: the row of one may be at fault


@dataclass(frozen=True)
class GoldCheck:
    """One prompt's reward on its gold answer (None: the task has none), on nothing, on nonsense. NaN: no score."""

    prompt: PreparedPrompt
    gold_text: str | None
    gold: float | None
    empty: float
    nonsense: float
    chat_hint: str | None = None  # a function takes completions for text that are messages
    failure: str | None = None  # what went wrong for the first of the three that failed

    @property
    def warning(self) -> str | None:
        """A sentence when a function misreads completions, the gold answer does not win, or nothing is scored."""
        if self.chat_hint or self.gold is None:
            return self.chat_hint
        rivals = [s for s in (self.empty, self.nonsense) if not math.isnan(s)]
        if math.isnan(self.gold):
            return f"the gold answer gets no score{f': {self.failure}' if self.failure else ''}"
        if rivals and self.gold <= max(rivals):
            return (
                f"the gold answer scores {self.gold:.3g}, no more than an empty one ({self.empty:.3g}) "
                f"or nonsense ({self.nonsense:.3g})"
            )
        return None

    def lines(self) -> list[str]:
        """The three scores, as `--dry-run` shows them."""
        gold = "  gold answer: this task has none"
        if self.gold is not None and self.gold_text is not None:
            gold = f"  gold answer {visible(self.gold_text)[:200]!r}: {self.gold:.4g}"
        return [gold, f"  nothing: {self.empty:.4g}", f"  nonsense: {self.nonsense:.4g}"]


def check_gold(scorer: Scorer, prompts: list[PreparedPrompt]) -> GoldCheck:
    """Score the first prompt's gold answer, an empty completion, and nonsense, as training would score them.

    Raises ValueError where a function fails on all of them, and on those of the next few prompts.
    """
    check, all_failed = _checked(scorer, prompts[0])
    if all_failed and scorer.workers and all(_checked(scorer, prompt)[1] for prompt in prompts[1:FEW]):
        what = "the gold answer, nothing and nonsense" if check.gold is not None else "nothing and nonsense"
        raise ValueError(f"the reward fails on {what}, so no completion would have one: {check.failure}")
    return check


def _checked(scorer: Scorer, prompt: PreparedPrompt) -> tuple[GoldCheck, bool]:
    """The scores of a prompt's three answers, and whether all of them failed."""
    gold = scorer.task.gold(prompt.row)
    texts = [gold or "", "", NONSENSE]
    how = {"chat": scorer.policy_format.chat, "variables": scorer.policy_format.chat_template}
    tokens = [answer_tokens(scorer.tokenizer, prompt, text, **how) for text in texts]
    sheet = scorer([prompt] * len(tokens), tokens)
    rewards, failures = sheet.rewards.tolist(), sorted(sheet.failures, key=lambda failure: failure.row)
    hint = next((function.chat_hint for function in scorer.functions if function.chat_hint), None)
    failure = failures[0].reason if failures else None
    check = GoldCheck(prompt, gold, rewards[0] if gold is not None else None, rewards[1], rewards[2], hint, failure)
    return check, len({failure.row for failure in failures}) == len(texts)


# ---- Judges: whether they tell gold answers from others ----


LEAST_AUC = 0.6
JUDGED_PROMPTS = 8  # before a run
RIVALS = ("another row's", "nothing", "nonsense")


@dataclass(frozen=True)
class JudgeTrial:
    """What a judge says of gold answers beside others. means: by what was judged (NaN: no reply could be read); auc:
    how often the gold answer got more than another one of its row, ties half (NaN: never compared); agreement: of pairs
    that were shown in the opposite order too, how many it ordered alike (None: it sees one answer at a time).
    """

    means: dict[str, float]
    auc: float
    agreement: float | None
    failures: list[RowFailure]
    rows: int
    usage: Usage

    @property
    def is_weak(self) -> bool:
        return not self.auc >= LEAST_AUC

    @property
    def verdict(self) -> str:
        if math.isnan(self.auc):
            first = f": {self.failures[0].reason}" if self.failures else ""
            return f"no reply of the judge could be read{first}"
        return f"the judge prefers the gold answer to another one in {self.auc:.0%} of {self.rows} rows' pairs (AUC)"


def try_judge(judge: JudgeReward, task: Task, rows: list[Row]) -> JudgeTrial:
    """Ask a judge of each row's gold answer, another row's, nothing and nonsense. ValueError without gold answers."""
    found = [(row, gold) for row in rows if (gold := task.gold(row)) is not None]
    if len(found) < 2:
        raise ValueError("a judge is tried on gold answers, of two rows at least, and the task knows none")
    golds, size = [gold for _, gold in found], 1 + len(RIVALS)
    answers = [[gold, golds[(i + 1) % len(golds)], "", NONSENSE] for i, gold in enumerate(golds)]
    each = [row for row, _ in found for _ in range(size)]
    prompts, columns = [task.prompt(row) for row in each], row_columns(each)
    texts = [text for row in answers for text in row]
    completions = [as_the_data_has_it(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    def asked(*, backwards: bool) -> tuple[list[list[float]], list[RowFailure]]:
        call = judge(prompts, completions, columns, group_size=size, backwards=backwards)
        return [call.scores[i : i + size] for i in range(0, len(each), size)], call.failures

    scores, failures = asked(backwards=False)
    agreement = None
    if judge.config.mode == "rank":
        again, _ = asked(backwards=True)
        places = [(i, j) for i in range(size) for j in range(i)]
        pairs = [(a[i] - a[j]) * (b[i] - b[j]) for a, b in zip(scores, again, strict=True) for i, j in places]
        agreement = _mean([float(pair > 0) for pair in pairs if not math.isnan(pair)])
    won = [
        0.5 * (row[0] == rival) + (row[0] > rival)
        for row, texts in zip(scores, answers, strict=True)
        for rival, text in zip(row[1:], texts[1:], strict=True)
        if text != texts[0] and not math.isnan(row[0] - rival)
    ]
    means = {what: _mean([row[i] for row in scores]) for i, what in enumerate(("gold", *RIVALS))}
    return JudgeTrial(means, _mean(won), agreement, failures, len(found), judge.usage)


def check_judges(scorer: Scorer, prompts: list[PreparedPrompt]) -> list[str]:
    """A line for each judge of a run. Raises ValueError for one that does not tell gold answers from others."""
    rows = [prompt.row for prompt in prompts if scorer.task.gold(prompt.row) is not None][:JUDGED_PROMPTS]
    if len(rows) < 2:
        return []
    trials = [(judge, try_judge(judge, scorer.task, rows)) for judge in scorer.judges]
    for judge, trial in trials:
        if trial.is_weak and not judge.config.allow_weak:
            raise ValueError(
                f"{trial.verdict}, and a run asks for {LEAST_AUC:.0%}; another rubric or model, or say allow_weak: true"
            )
    return [trial.verdict for _, trial in trials]


def render_judge(trial: JudgeTrial) -> str:
    lines = [f"{'judged':16} {'mean reward':>12}"]
    lines += [f"{what:16} {'-' if math.isnan(mean) else f'{mean:.3f}':>12}" for what, mean in trial.means.items()]
    lines += ["", trial.verdict]
    if trial.agreement is not None:
        lines.append(f"shown in the opposite order it puts {trial.agreement:.0%} of the pairs the same way round")
    usage = trial.usage
    lines.append(
        f"{usage.requests} requests, {usage.cached} from the cache, {usage.tokens} tokens, {usage.seconds:.1f} s"
    )
    if trial.failures:
        lines.append(f"{len(trial.failures)} without a score, the first: {visible(trial.failures[0].reason)}")
    if trial.is_weak:
        lines.append(f"warning: below {LEAST_AUC:.0%}; a run refuses it without allow_weak")
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    valid = [value for value in values if not math.isnan(value)]
    return statistics.fmean(valid) if valid else math.nan
