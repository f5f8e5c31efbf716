"""The gold-answer check before step 1: whether it outscores an empty answer and nonsense, scored as in training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyrl.environments.scripted import NONSENSE
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks.answers import ended
from tinyrl.tasks.prompts import PreparedPrompt, token_ids
from tinyrl.text import visible


@dataclass(frozen=True)
class GoldCheck:
    """One prompt's reward on its gold answer (None: the task has none), on nothing, on nonsense. NaN: no score."""

    prompt: PreparedPrompt
    gold_text: str | None
    gold: float | None
    empty: float
    nonsense: float
    chat_hint: str | None = None  # a function takes completions for text that are messages

    @property
    def warning(self) -> str | None:
        """A sentence when a function misreads completions, the gold answer does not win, or nothing is scored."""
        if self.chat_hint or self.gold is None:
            return self.chat_hint
        rivals = [s for s in (self.empty, self.nonsense) if not math.isnan(s)]
        if math.isnan(self.gold):
            return "the gold answer gets no score"
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


def check_gold(scorer: Scorer, prompt: PreparedPrompt) -> GoldCheck:
    """Score a prompt's gold answer, an empty completion, and nonsense, as training would score them."""
    gold = scorer.task.gold(prompt.row)
    texts = [gold or "", "", NONSENSE]
    if prompt.opened and gold is not None:
        texts[0] = gold.removeprefix(prompt.opened.rstrip()) if gold.startswith(prompt.opened.rstrip()) else gold
    end = scorer.policy_format.end(scorer.tokenizer)
    tokens = [ended(token_ids(scorer.tokenizer, text), end) for text in texts]
    rewards = scorer([prompt] * len(tokens), tokens).rewards.tolist()
    hint = next((function.chat_hint for function in scorer.functions if function.chat_hint), None)
    return GoldCheck(prompt, gold, rewards[0] if gold is not None else None, rewards[1], rewards[2], hint)
