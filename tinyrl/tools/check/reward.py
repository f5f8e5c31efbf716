"""Try a reward on rows, in the worker processes of a run, without a model.

A finding is a function of the trial, as those of a run are of its records (runs/findings.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from tinyrl.config.schema import Config
from tinyrl.data.messages import as_completion, asked_of
from tinyrl.data.readers import Row
from tinyrl.data.rows import solved_from
from tinyrl.environments.environment import NONSENSE
from tinyrl.formatting import format_number
from tinyrl.nan import mean
from tinyrl.rewards.functions import AS_MESSAGES, FunctionReward, verifier_of
from tinyrl.rewards.holes import Hole, RightAnswers, dressed, find_holes, known_answers
from tinyrl.runs.finding import Finding, found_by
from tinyrl.runs.records import json_safe
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import row_columns
from tinyrl.text import one_line
from tinyrl.tools.check.right_answers import PaidForm, columns_to_try, paid_column, paid_form
from tinyrl.tools.check.section import CheckSection, words_of_kind
from tinyrl.training.failing_rewards import MAX_FAILED_SHARE
from tinyrl.workers.progress import Progress
from tinyrl.workers.values import RowResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_ROWS = 64
ATTACKED_ROWS = 8
SLOW_CALL_S = 0.25  # a call of so many seconds is not made for each of some thousand wrong texts
SHOWN_HOLES = 6
SHOWN = 80
SHOWN_FORMS = 3
IN_FULL = 0.95  # share of the best score from which on a right answer is paid in full: a penalty on length takes some
SHOWN_FORM = 40
IDS = "completion_ids"
CALLED = "Print what the function gets and returns; it is called with the arguments shown in docs/rewards.md."


@dataclass
class ScoredTexts:
    """Scores of texts for each row by kind: gold (if the task knows reference answers), nothing and nonsense; NaN where
    a function failed or none applies.

    again: the first kind once more; failed: the share of the rows of all calls that failed; why: the first reason;
    other: where rewards may come from else, "" where a reward is needed here; gets_messages: completions are lists of
    messages; seconds: of a call; lacking: the share of reference answers without full marks by the task's own verifier;
    paid: the form of right answers that is paid for, which reference answers alone need not have; holes, is_blind: what
    an attack has found.
    """

    scores: dict[str, list[float]]
    again: list[float]
    failed: float
    why: str
    other: str
    gets_messages: bool
    seconds: float = 0.0
    lacking: float = 0.0
    paid: PaidForm | None = None
    holes: list[Hole] = field(default_factory=list)
    is_blind: bool = False

    @cached_property
    def known(self) -> list[float]:
        return [score for scores in self.scores.values() for score in scores if not math.isnan(score)]

    @property
    def lowest(self) -> float:
        return min(self.known, default=math.nan)

    @property
    def highest(self) -> float:
        return max(self.known, default=math.nan)

    @property
    def is_flat(self) -> bool:
        """Return whether every text has a score, and all the same."""
        complete = len(self.known) == sum(map(len, self.scores.values()))
        return complete and self.lowest == self.highest

    @property
    def advice(self) -> str:
        return f"{CALLED} {AS_MESSAGES}" if self.gets_messages else CALLED


# ---- findings ----


def no_rewards(trial: ScoredTexts) -> Finding | None:
    """No text has a score, and not because the function failed."""
    if trial.known or trial.paid is not None or trial.failed > MAX_FAILED_SHARE or trial.other:
        return None
    what = "No completion gets a score"
    if "gold" in trial.scores:
        what += ", not the reference answer either"
    return Finding(name="no rewards", what=f"{what}.", change=trial.advice)


def one_reward_for_everything(trial: ScoredTexts) -> Finding | None:
    if "gold" not in trial.scores or not trial.is_flat or trial.paid is not None:
        return None
    return Finding(
        name="one reward for everything",
        what=f"Reference answers, nothing and nonsense all score {trial.lowest:.4g}.",
        change=trial.advice,
        figures={"low": trial.lowest},
    )


def gold_answers_do_not_win(trial: ScoredTexts) -> Finding | None:
    """In more than a fifth of the rows the reference answer scores no more than nothing or nonsense, and no other form
    of right answers is paid for.
    """
    if "gold" not in trial.scores or trial.is_flat or not trial.known or trial.paid is not None:
        return None
    rivals = np.array([trial.scores["nothing"], trial.scores["nonsense"]])
    gold = np.array(trial.scores["gold"])
    some_rival = ~np.isnan(rivals).all(0)
    beaten = fmean(np.where(np.isnan(gold), some_rival, gold <= np.nan_to_num(rivals).max(0)))
    if beaten <= MAX_FAILED_SHARE:
        return None
    return Finding(
        name="reference answers do not win",
        what=f"In {beaten:.0%} of the rows the reference answer scores no more than nothing or nonsense.",
        change=trial.advice,
        figures={"beaten": beaten},
    )


def gold_answers_lack_full_marks(trial: ScoredTexts) -> Finding | None:
    if not trial.lowest < trial.highest or trial.lacking <= MAX_FAILED_SHARE:
        return None
    return Finding(
        name="reference answers lack full marks",
        what=f"In {trial.lacking:.0%} of the rows the task's reference answer has less than full marks, which are 1.",
        change="Correct `verify` or `gold` of the task: docs/data.md.",
        figures={"lacking": trial.lacking},
    )


def rewards_by_chance(trial: ScoredTexts) -> Finding | None:
    first = next(iter(trial.scores.values()))
    if not trial.known or str(trial.again) == str(first):  # as text, where NaN is equal to itself
        return None
    return Finding(
        name="rewards by chance",
        what="The same completions got other scores the second time.",
        change="Draw random numbers from the row alone.",
    )


def rewards_fail(trial: ScoredTexts) -> Finding | None:
    if trial.failed <= MAX_FAILED_SHARE:
        return None
    return Finding(
        name="rewards fail",
        what=f"{trial.failed:.0%} of the calls' rows failed, the first so: {trial.why}.",
        change="Correct the function (reward.timeout_s limits a call). Training stops after three such batches."
        + (f" {AS_MESSAGES}" if trial.gets_messages else ""),
        figures={"failed": trial.failed},
    )


def holes_in_the_reward(trial: ScoredTexts) -> Finding | None:
    if not trial.holes:
        return None
    return Finding(
        name="holes in the reward",
        what=f"Wrong texts score nearly as much as right answers: {', '.join(hole.name for hole in trial.holes[:3])}.",
        change="Read one marked answer, the last one, and compare all of it.",
    )


def blind_reward(trial: ScoredTexts) -> Finding | None:
    if not trial.is_blind or trial.holes:
        return None
    return Finding(
        name="blind reward",
        what="No right answer scores more than the worst wrong text of its row, in any form that was tried.",
        change="Judge a right answer as the data has it by hand.",
    )


FINDINGS = (
    no_rewards,
    one_reward_for_everything,
    gold_answers_do_not_win,
    gold_answers_lack_full_marks,
    rewards_by_chance,
    rewards_fail,
    holes_in_the_reward,
    blind_reward,
)


# ---- the trial ----


@dataclass
class RewardSection(CheckSection):
    """The section about a reward. paid: right answers that it pays for."""

    paid: PaidForm | None = None

    def knows_right(self, solved: float) -> bool:
        """Return whether right answers are known to score at least `solved`, as the data has them or in a form."""
        gold = self.facts.get("gold")
        best = max(-math.inf if gold is None else gold, -math.inf if self.paid is None else self.paid.score)
        return best >= solved


def check_reward(config: Config, task: Task, rows: list[Row], *, is_replaced: bool = False) -> RewardSection:
    """Score reference answers, nothing and nonsense, and look for texts that score high and are wrong. Judges and
    reward models are left out: they are tried when the model is loaded. is_replaced: an environment rewards every
    episode, in place of the task's verifier.
    """
    section = RewardSection("reward")
    if is_replaced and config.reward.is_verifier:
        section.lines = ["get_reward of the environment, which rewards every episode"]
        return section
    rows = rows[:REWARD_ROWS]
    functions = functions_of(config, task)
    if not functions:
        section.lines = ["none of its own" if config.reward.is_verifier else "judged by a model; see below"]
        return section
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(function).start()  # its imports are not part of a call's time
        scorer = TextScorer(config, task, rows, functions)
        trial = _scored(scorer, section)
        _try_right_answers(trial, scorer, section)
    for function in functions:
        section.lines += [f"printed: {one_line(line, SHOWN)}" for line in list(function.printed.kept)[-2:]]
    section.findings = found_by(FINDINGS, trial)
    return section


def _scored(scorer: TextScorer, section: CheckSection) -> ScoredTexts:
    """Score reference answers, nothing and nonsense; add lines and facts about them to a section."""
    config = scorer.config
    task = scorer.task
    rows = scorer.rows
    golds = [task.gold(row) for row in rows]
    texts = {"nothing": [""] * len(rows), "nonsense": [NONSENSE] * len(rows)}
    if None not in golds:
        texts = {"gold": [str(gold) for gold in golds], **texts}
    begun = time.perf_counter()
    scores = {kind: scorer(range(len(rows)), of) for kind, of in texts.items()}
    again = scorer(range(len(rows)), next(iter(texts.values())))
    trial = ScoredTexts(
        scores,
        again,
        failed=scorer.failed_rows / scorer.scored_rows,
        why=next(iter(scorer.failures), ""),
        other=other_source(config, task),
        gets_messages=scorer.gets_messages,
        seconds=(time.perf_counter() - begun) / (len(texts) + 1),
    )
    is_verified = config.reward.is_verifier and task.grader is None
    if "gold" in scores and is_verified:
        lacking = [not task.is_pass(score) for score in scores["gold"] if not math.isnan(score)]
        trial.lacking = fmean(lacking) if lacking else 0.0
    section.lines = lines_of(trial, name=scorer.name, rows=len(rows))
    section.facts = {kind: json_safe(mean(of)) for kind, of in scores.items()}
    section.facts |= {"seconds": trial.seconds, "failed": trial.failed}
    if config.reward.is_verifier and not scorer.failures:
        unread = sum(map(math.isnan, scores.get("gold", [])))
        if unread:
            section.facts["unread"] = unread
            section.lines.append(
                f"warning: {unread} of {len(rows)} reference answers cannot be read: those rows have no score"
            )
    return trial


def _try_right_answers(trial: ScoredTexts, scorer: TextScorer, section: RewardSection) -> None:
    """Find right answers that are paid for, try them as chat models write them, and look for holes."""
    config = scorer.config
    task = scorer.task
    rows = scorer.rows[:ATTACKED_ROWS]
    if trial.seconds >= SLOW_CALL_S or trial.failed > MAX_FAILED_SHARE:
        return
    answers = known_answers(task, rows)
    if answers.values:
        trial.paid = paid_form(scorer, answers, enough=solved_from(config.task.solved_reward))
    else:
        trial.paid = paid_column(scorer, rows, scorer.answer_columns(), enough=solved_from(config.task.solved_reward))
        answers = answers if trial.paid is None else trial.paid.answers
    section.paid = trial.paid
    section.facts["right answers"] = None
    if trial.paid is not None:
        section.lines += line_of_paid(trial.paid)
        section.facts["right answers"] = {
            "column": answers.column,
            "form": trial.paid.form,
            "score": trial.paid.score,
            "example": trial.paid.example,
        }
    if found_by(FINDINGS, trial):
        return
    is_tried = trial.paid is not None or "gold" in trial.scores
    if is_tried and (config.reward.functions or task.right_or_wrong):
        section.lines += dresses(section, scorer, answers, trial.paid)
    if config.reward.functions:
        section.lines += attack(trial, scorer, rows, answers)
        section.facts["holes"] = [{"name": hole.name, "share": hole.share, "text": hole.text} for hole in trial.holes]


def functions_of(config: Config, task: Task) -> list[FunctionReward]:
    """Return the reward functions of a run, not started: those of the settings, or the task's verifier."""
    reward = config.reward
    if reward.is_verifier:
        return [verifier_of(task, timeout_s=reward.timeout_s)] if task.has_verifier else []
    used = [function for function in reward.functions if not function.is_judge]
    return [FunctionReward(of.use, weight=of.weight, timeout_s=reward.timeout_s) for of in used]


def has_environment(config: Config, task: Task) -> bool:
    return bool(config.environment.name or config.environment.tools or task.has_turns)


def other_source(config: Config, task: Task) -> str:
    """Return why rows may do without a reward here; "" where they may not."""
    if has_environment(config, task):
        return "it is the environment's alone"
    is_asked = config.trains.rewarded or config.reward.functions
    return "" if is_asked else f"{config.method} needs none"


def lines_of(trial: ScoredTexts, *, name: str, rows: int) -> list[str]:
    """Return a line with the mean score of each kind of text, and a warning where some rows failed."""
    means = list[str]()
    for kind, scores in trial.scores.items():
        means.append(f"{words_of_kind(kind)} {format_number(mean(scores), missing='no score')}")
    lines = [f"{name}: {', '.join(means)}; {trial.seconds * 1e3:.1f} ms for {rows} rows"]
    if not trial.known and not trial.failed and trial.other:
        lines = [f"{name} gives none: {trial.other}"]
    if 0 < trial.failed <= MAX_FAILED_SHARE:
        lines.append(f"warning: {trial.failed:.0%} of the rows failed, the first so: {trial.why}")
    return lines


def line_of_paid(paid: PaidForm) -> list[str]:
    """Return a line about right answers that are in a column of any name, or are paid for in another form alone."""
    if paid.is_given and paid.answers.column is None:
        return []
    whose = "right answers" if paid.answers.column is None else f"right answers of the column `{paid.answers.column}`"
    how = "" if paid.is_given else ", in another form than the rows have"
    return [f"{whose}: {format_number(paid.score)} as {one_line(paid.example, SHOWN)!r}{how}"]


class TextScorer:
    """Scores texts for some of the rows: the weighted sum over the reward functions; NaN where one that weighs
    something fails or none applies. It counts the rows scored, and those that failed.
    """

    def __init__(self, config: Config, task: Task, rows: list[Row], functions: list[FunctionReward]) -> None:
        self.config = config
        self.task = task
        self.rows = rows
        self.functions = functions
        self.name = " + ".join(function.name for function in functions)
        self.prompts = [asked_of(task.prompt(row)) for row in rows]
        self.columns = row_columns(rows)
        self.progress = Progress.at(None, config.run.num_steps)
        self.is_played = has_environment(config, task)
        self.gets_messages = self.is_played or not isinstance(self.prompts[0], str)
        self.failures = list[str]()
        self.scored_rows = 0
        self.failed_rows = 0
        facts = [function.start() for function in functions]
        self.takes_any = any(of.parameters is None for of in facts)
        self.named = {name for of in facts for name in (*(of.parameters or []), *of.required)}
        wants_ids = IDS in self.named
        self.tokenizer = tokenizer_of(config) if wants_ids else None

    def __call__(self, where: Iterable[int], texts: list[str]) -> list[float]:
        places = [*where]
        prompts = [self.prompts[i] for i in places]
        columns = {name: [column[i] for i in places] for name, column in self.columns.items()}
        forms = [[] if self.is_played else prompt for prompt in prompts]
        completions = [as_completion(text, form) for text, form in zip(texts, forms, strict=True)]
        if self.tokenizer is not None:
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            columns[IDS] = [of[: self.config.generation.max_new_tokens] for of in ids]  # no completion is longer
        calls: list[tuple[RowResults, float]] = []
        for function in self.functions:
            calls.append((function(prompts, completions, columns, progress=self.progress), function.weight))
        scores = np.array([weight * np.array(call.values) for call, weight in calls])
        total = np.where(np.isnan(scores).all(0), math.nan, np.nansum(scores, 0))
        failed = set[int]()
        for call, weight in calls:
            self.failures += [failure.reason for failure in call.failures]
            failed |= {failure.row for failure in call.failures}
            if weight:
                total[[failure.row for failure in call.failures]] = math.nan
        self.scored_rows += len(places)
        self.failed_rows += len(failed)
        return total.tolist()

    def answer_columns(self) -> list[list[str]]:
        """Return the columns that may hold the right answers that the functions read."""
        return columns_to_try(self.rows, named=self.named, takes_any=self.takes_any)


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model, without its weights."""
    from tinyrl.models.loading import load_tokenizer  # transformers, and torch with it

    return load_tokenizer(config.model.path, revision=config.model.revision)


def dresses(section: CheckSection, scorer: TextScorer, answers: RightAnswers, paid: PaidForm | None) -> list[str]:
    """Score right answers in the forms in which chat models write one; return a line on those that score about as much
    as the form that is paid for does (None: as the rows have them).
    """
    tried = [(i, name, text) for i, value in answers.values.items() for name, text in dressed(value).items()]
    if not tried or scorer.is_played:
        return []
    whole = answers.given if paid is None else paid.texts
    best = dict(zip(whole, scorer(whole, [*whole.values()]), strict=True))
    scores = scorer([i for i, _, _ in tried], [text for _, _, text in tried])
    missed = dict[str, str]()
    for (i, name, text), score in zip(tried, scores, strict=True):
        enough = best[i] - (1 - IN_FULL) * abs(best[i])
        if not score >= enough and not math.isnan(best[i]):
            missed.setdefault(name, text)
    names = dict.fromkeys(name for _, name, _ in tried)
    section.facts["dresses"] = {name: name not in missed for name in names}
    scored = len(names) - len(missed)
    line = f"right answers in the forms of chat models: {scored} of {len(names)} are paid in full"
    shown = ", ".join(f"{name} ({one_line(text, SHOWN_FORM)!r})" for name, text in [*missed.items()][:SHOWN_FORMS])
    more = f" and {len(missed) - SHOWN_FORMS} more" if len(missed) > SHOWN_FORMS else ""
    return [f"{line}; not {shown}{more}" if missed else line]


NO_HOLES_TRIED = (
    "holes: not looked for, which takes two rows with different right answers: in a column `answer`, `gold` of a task, "
    "or a column whose values the reward pays for as answers. task.columns.answer=NAME names one (with "
    "task.columns.NAME=NAME it keeps its own name too)"
)


def attack(trial: ScoredTexts, scorer: TextScorer, rows: list[Row], answers: RightAnswers) -> list[str]:
    """Look for holes; return lines about them."""
    if not answers.are_different:
        return [NO_HOLES_TRIED]
    found = find_holes(scorer, scorer.task, rows, answers)
    trial.holes = found.holes
    trial.is_blind = found.is_blind
    tried, kinds = found.tried
    lines = [f"holes: {tried:,} wrong texts of {kinds} kinds tried, {len(found.holes) or 'none'} found"]
    for hole in found.holes[:SHOWN_HOLES]:
        ends = f"{hole.score:.3g} of a right answer's {hole.right:.3g}"
        lines.append(f"  {hole.name} ({hole.share:.0%} of the rows, {ends}): {one_line(hole.text, SHOWN)!r}")
    return lines
