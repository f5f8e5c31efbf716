"""Held-out samples of a run as a page shows them: the same prompts at several steps, and all samples of the last one.

A record may hold thousands of steps: of those between the first and the last, some are kept, with the first prompts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.runs.lines import json_lines, messages_of, number
from tinyrl.text import Excerpt, excerpt

PROMPT_CHARACTERS = 500
CHARACTERS = {"policy": 900, "environment": 500}
MOST_MESSAGES = 16  # of an episode, an even number
MOST_STEPS = 64
MOST_PROMPTS = 16  # at a step that is neither the first nor the last


@dataclass(frozen=True)
class Sample:
    """One held-out completion, with its texts already cut to what the page shows.

    messages: who said what, "policy" or "environment", by turns; `omitted` of them are left out in the middle.
    length: characters that the policy wrote.
    """

    prompt_index: int
    sample: int
    prompt: Excerpt
    messages: tuple[tuple[str, Excerpt], ...]
    omitted: int
    reward: float
    finish_reason: str
    length: int

    @property
    def written(self) -> tuple[Excerpt, ...]:
        """What the policy said."""
        return tuple(text for who, text in self.messages if who == "policy")


@dataclass(frozen=True)
class HeldOut:
    """by_step: step to prompt_index to its first sample, by step. last: every sample of the last step, as recorded."""

    by_step: dict[int, dict[int, Sample]] = field(default_factory=dict)
    last: tuple[Sample, ...] = ()

    @property
    def first_step(self) -> int:
        """The first step with samples; there must be one."""
        return min(self.by_step)

    @property
    def last_step(self) -> int:
        """The last step with samples; there must be one."""
        return max(self.by_step)


def read_held_out(path: Path, notes: list[str]) -> HeldOut:
    """The samples of kind "eval" in a samples.jsonl; none where there is no such file."""
    by_step: dict[int, dict[int, Sample]] = {}
    last: list[Sample] = []
    rows = json_lines(path, notes, containing=b'"eval"') if path.is_file() else iter(())
    for row in rows:
        step, index = row["step"], row.get("prompt_index")
        if row.get("kind") != "eval" or not isinstance(index, int):
            continue
        if step not in by_step:
            by_step[step] = {}
            last = [] if step == max(by_step) else last
            _thin(by_step)
        sample = _sample(row, index)
        if step == max(by_step):
            last.append(sample)
        kept = by_step.setdefault(step, {}).get(index)
        if kept is None or sample.sample < kept.sample:
            by_step[step][index] = sample
    return HeldOut(dict(sorted(by_step.items())), tuple(last))


def _thin(by_step: dict[int, dict[int, Sample]]) -> None:
    """Drop prompts of the steps in the middle, and every second of these steps where they are too many."""
    between = sorted(by_step)[1:-1]
    for step in between:
        by_step[step] = dict(sorted(by_step[step].items())[:MOST_PROMPTS])
    for step in between[::2] if len(between) > 2 * MOST_STEPS else ():
        del by_step[step]


def _sample(row: dict[str, Any], index: int) -> Sample:
    sample, said = row.get("sample"), messages_of(row)
    length = sum(len(text) for who, text in said if who == "policy")
    omitted = max(0, len(said) - MOST_MESSAGES)
    if omitted:
        said = [*said[: MOST_MESSAGES // 2], *said[-MOST_MESSAGES // 2 :]]
    return Sample(
        prompt_index=index,
        sample=sample if isinstance(sample, int) else 0,
        prompt=excerpt(str(row.get("prompt", "")), PROMPT_CHARACTERS),
        messages=tuple((who, excerpt(text, CHARACTERS[who])) for who, text in said),
        omitted=omitted,
        reward=number(row.get("reward")),
        finish_reason=str(row.get("finish_reason", "")),
        length=length,
    )
