"""The reward on gold answers before step 1: a run whose reward cannot tell them from nonsense is warned of, or refused.

A judge is asked of gold answers, other rows', nothing and nonsense; one that does not prefer the gold ones is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments.environment import NONSENSE
from tinyrl.rewards.judge import JudgeReward
from tinyrl.tasks import Task
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt, row_columns
from tinyrl.workers.calls import RowFailure

if TYPE_CHECKING:
    from tinyrl.rewards.scorer import Scorer

FEW = 4  # prompts whose answers all fail before a run is refused: the row of one may be at fault
LEAST_AUC = 0.6
JUDGED_PROMPTS = 8
RIVALS = ("another row's", "nothing", "nonsense")


def as_the_data_has_it(text: str, prompt: Prompt) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


@dataclass(frozen=True)
class GoldCheck:
    """A prompt's reward on its gold answer (None: the task has none), on nothing and on nonsense; NaN: no score.

    chat_hint: a function takes completions for text that are messages; failure: the first of the three that failed.
    """

    gold: float | None
    empty: float
    nonsense: float
    chat_hint: str | None = None
    failure: str | None = None

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


def check_gold(scorer: Scorer, prompts: list[PreparedPrompt]) -> GoldCheck:
    """Score the first prompt's gold answer, an empty completion and nonsense, as training would score them.

    Raises ValueError where a function fails on all three, and on those of the next few prompts.
    """
    check, all_failed = _checked(scorer, prompts[0])
    if all_failed and scorer.workers and all(_checked(scorer, prompt)[1] for prompt in prompts[1:FEW]):
        what = "the gold answer, nothing and nonsense" if check.gold is not None else "nothing and nonsense"
        raise ValueError(f"the reward fails on {what}, so no completion would have one: {check.failure}")
    return check


def _checked(scorer: Scorer, prompt: PreparedPrompt) -> tuple[GoldCheck, bool]:
    """Return the scores of a prompt's three answers, and whether all of them failed."""
    gold = scorer.task.gold(prompt.row)
    how = {"chat": scorer.policy_format.chat, "variables": scorer.policy_format.chat_template}
    tokens = [answer_tokens(scorer.tokenizer, prompt, text, **how) for text in (gold or "", "", NONSENSE)]
    sheet = scorer([prompt] * len(tokens), tokens)
    rewards, failures = sheet.rewards.tolist(), sorted(sheet.failures, key=lambda failure: failure.row)
    hint = next((function.chat_hint for function in scorer.functions if function.chat_hint), None)
    failure = failures[0].reason if failures else None
    check = GoldCheck(rewards[0] if gold is not None else None, rewards[1], rewards[2], hint, failure)
    return check, len({failure.row for failure in failures}) == len(tokens)


@dataclass(frozen=True)
class JudgeTrial:
    """What a judge says of gold answers beside others.

    means: mean reward by what was judged (NaN: no reply could be read); auc: how often the gold answer got more than
    another one of its row, ties half (NaN: never compared); agreement: share of pairs ordered alike when shown in the
    opposite order (None: it sees one answer at a time).
    """

    means: dict[str, float]
    auc: float
    agreement: float | None
    failures: list[RowFailure]
    rows: int

    @property
    def is_weak(self) -> bool:
        return not self.auc >= LEAST_AUC

    @property
    def verdict(self) -> str:
        if math.isnan(self.auc):
            first = f": {self.failures[0].reason}" if self.failures else ""
            return f"no reply of the judge could be read{first}"
        said = f"the judge prefers the gold answer to another one in {self.auc:.0%} of {self.rows} rows' pairs (AUC)"
        return said if self.agreement is None else f"{said}; in the opposite order {self.agreement:.0%} of pairs agree"


def try_judge(judge: JudgeReward, task: Task, rows: list[Row]) -> JudgeTrial:
    """Ask a judge of each row's gold answer, another row's, nothing and nonsense; rows have gold answers."""
    golds, size = [str(task.gold(row)) for row in rows], 1 + len(RIVALS)
    answers = [[gold, golds[(i + 1) % len(golds)], "", NONSENSE] for i, gold in enumerate(golds)]
    each = [row for row in rows for _ in range(size)]
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
    return JudgeTrial(means, _mean(won), agreement, failures, len(rows))


def check_judges(scorer: Scorer, prompts: list[PreparedPrompt]) -> list[str]:
    """Return a line for each judge of a run. Raises ValueError for one that does not tell gold answers from others."""
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


def _mean(values: list[float]) -> float:
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else math.nan
