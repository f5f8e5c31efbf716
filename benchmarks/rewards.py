"""The benchmarks' rewards, with TRL's signature, for both sides: even-numbered words, letters in the right
order, and right sums.

Each side loads this file by itself, so it needs nothing beyond the standard library.
"""

from __future__ import annotations

import re
from typing import Any


def even_words(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share of words "w<number>" of each completion whose number is even, of others whose length is; 0 for an
    empty one.
    """
    rewards = []
    for words in (completion.split() for completion in completions):
        even = [word for word in words if (int(word[1:]) if word[1:].isdigit() else len(word)) % 2 == 0]
        rewards.append(len(even) / len(words) if words else 0.0)
    return rewards


def sorted_letters(prompts: list[str], completions: list[str], *, answer: list[str], **columns: Any) -> list[float]:
    """1.0 where a completion's letters, spaces aside, are exactly the answer ("abd"), else 0.0."""
    return [float("".join(text.split()) == right) for text, right in zip(completions, answer, strict=True)]


def right_sums(prompts: list[str], completions: list[str], *, answer: list[int], **columns: Any) -> list[float]:
    """1.0 where the last number of a completion is the answer, else 0.0."""
    last = [(re.findall(r"\d+", text) or [""])[-1] for text in completions]
    return [float(number == str(right)) for number, right in zip(last, answer, strict=True)]


def zero_and_one(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """0 and 1 in turn, so that a group of two has advantages whatever its completions are."""
    return [float(number % 2) for number in range(len(completions))]
