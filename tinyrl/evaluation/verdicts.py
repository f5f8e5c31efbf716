"""Numbers of a verifier's verdicts on the samples of each prompt: pass@k, majority@k, distinct answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tinyrl.evaluation.intervals import mean


def verdict_metrics(
    verdicts: list[float], answers: list[Any] | None, samples: int, *, is_pass: Callable[[float], bool]
) -> dict[str, Any]:
    """pass@1 (pass@k and majority@k for k samples), the verifier's mean score, the number of distinct answers.

    Over the prompts with a verdict (NaN: the row has no answer to compare with); nothing where no prompt has one.
    """
    starts = [i for i in range(0, len(verdicts), samples) if not all(map(math.isnan, verdicts[i : i + samples]))]
    if not starts:
        return {}
    groups = [[is_pass(v) for v in verdicts[i : i + samples]] for i in starts]
    out: dict[str, Any] = {"pass@1": mean([pass_at_k(len(g), sum(g), 1) for g in groups])}
    out["verifier_mean"] = mean([v for v in verdicts if not math.isnan(v)])
    if samples > 1:
        out[f"pass@{samples}"] = mean([pass_at_k(len(g), sum(g), samples) for g in groups])
    if answers is not None:
        said = [answers[i : i + samples] for i in starts]
        out["distinct_answers"] = len({a for group in said for a in group if a is not None})
        if samples > 1:
            out[f"majority@{samples}"] = mean([majority_passes(a, g) for a, g in zip(said, groups, strict=True)])
    return out


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples of which c passed: 1 - C(n - c, k) / C(n, k). Chen et al. (2107.03374) Eq. 1."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_passes(answers: Sequence[Any], passed: Sequence[bool]) -> float:
    """Whether the most frequent answer is right (ties share the verdict). Completions without an answer do not vote."""
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [a for a, n in votes.items() if n == most]
    return mean([max(ok for a, ok in zip(answers, passed, strict=True) if a == w) for w in winners])
