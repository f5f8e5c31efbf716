"""A sampling engine of tinyrl that returns given completions, so that an update of GRPO can be measured by itself.

Imported inside tinyrl's process only, when a question has such completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.work import read_rows
from tinyrl.generation.engine import BatchScheduler, SamplingEngine
from tinyrl.generation.request import DecodedSequence, SampledRole
from tinyrl.rollout import load


class GivenScheduler(BatchScheduler):
    """Ends every waiting sequence at once by the next completion of its prompt. Nothing has sampled these tokens, so a
    log-probability of 0 is recorded for each.
    """

    def __init__(self, engine: GivenEngine) -> None:
        super().__init__()
        self.engine = engine
        self.completions = {prompt: cycle(texts) for prompt, texts in engine.completions.items()}

    def step(self) -> list[DecodedSequence]:
        ended = list(self.waiting)
        self.waiting.clear()
        for sequence in ended:
            tokens = next(self.completions[tuple(sequence.request.prompt)])
            logprobs = [0.0] * len(tokens)
            sequence.append(tokens, logprobs, eos=self.engine.eos, tokenizer=self.engine.tokenizer)
        return ended


class GivenEngine(SamplingEngine):
    """Returns completions of `groups`: rows of a prompt and the token ids of its completions, EOS included."""

    name = "given"
    exact = False

    def __init__(self, *args: Any, groups: list[dict[str, Any]]) -> None:
        super().__init__(*args)
        self.completions: dict[tuple[int, ...], list[list[int]]] = {}
        for group in groups:
            prompt: Any = self.tokenizer(group["prompt"], add_special_tokens=False)["input_ids"]
            self.completions[tuple(prompt)] = group["completions"]

    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Any:
        return nullcontext(GivenScheduler(self))


@contextmanager
def given_completions(path: Path) -> Iterator[None]:
    """Have tinyrl take completions from the file at `path` instead of sampling them."""
    groups = read_rows(path)
    select = load.select_engine

    def select_given(config: Any, policy: Any, tokenizer: Any, **lengths: int) -> tuple[SamplingEngine, str]:
        return GivenEngine(policy, tokenizer, config, groups=groups), "a benchmark of the update"

    load.select_engine = select_given
    try:
        yield
    finally:
        load.select_engine = select
