"""The gold-answer check before step 1: whether it outscores an empty answer and nonsense, scored as in training.

A reward that raises on every answer to each of a few prompts would raise on every completion: the run does not begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyrl.environments.scripted import NONSENSE
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks.answers import ended
from tinyrl.tasks.prompts import PreparedPrompt, token_ids
from tinyrl.text import visible

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
    if prompt.opened and gold is not None:
        texts[0] = gold.removeprefix(prompt.opened.rstrip()) if gold.startswith(prompt.opened.rstrip()) else gold
    end = scorer.policy_format.end(scorer.tokenizer)
    tokens = [ended(token_ids(scorer.tokenizer, text), end) for text in texts]
    sheet = scorer([prompt] * len(tokens), tokens)
    rewards, failures = sheet.rewards.tolist(), sorted(sheet.failures, key=lambda failure: failure.row)
    hint = next((function.chat_hint for function in scorer.functions if function.chat_hint), None)
    failure = failures[0].reason if failures else None
    check = GoldCheck(prompt, gold, rewards[0] if gold is not None else None, rewards[1], rewards[2], hint, failure)
    return check, len({failure.row for failure in failures}) == len(texts)
