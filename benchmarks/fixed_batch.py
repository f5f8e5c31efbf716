"""One batch of token ids with advantages, the same in every process, on which both sides' losses are compared."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.sizes import FIRST_WORD, PROMPT_WORDS

NUM_PROMPTS, GROUP_SIZE = 2, 4


@dataclass(frozen=True)
class Batch:
    """Sample i continues prompts[i // GROUP_SIZE]."""

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: list[float]


def fixed_batch(vocabulary: int, *, max_new_tokens: int) -> Batch:
    """Two prompts with four responses each, of all lengths up to the longest."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, vocabulary) for _ in range(count)]

    rows = NUM_PROMPTS * GROUP_SIZE
    lengths = [max_new_tokens, *(rng.randint(2, max_new_tokens) for _ in range(rows - 1))]
    return Batch(
        prompts=[words(rng.randint(*PROMPT_WORDS)) for _ in range(NUM_PROMPTS)],
        responses=[words(length) for length in lengths],
        advantages=[rng.uniform(-1.5, 1.5) for _ in range(rows)],
    )
