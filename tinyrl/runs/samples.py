"""Samples and training prompts of a run for a terminal (`tinyrl show RUN --samples` and `--prompts`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.runs.records import evenly, json_lines, messages_of, number, samples_of
from tinyrl.text import excerpt, listed, one_line, visible

Line = dict[str, Any]
MOST_CHARACTERS, MOST_LINES = 20_000, 1000  # of a text; what is in the middle of a longer one is left out
MOST_TRIES = 8  # shown of a prompt
PROMPT_CHARACTERS = 60

Outcome = Literal["never", "always", "forgotten", "sometimes"]
MEANING: dict[Outcome, str] = {
    "never": "never solved: every completion was wrong",
    "forgotten": "forgotten: solved once, and not at the last try",
    "sometimes": "in between",
    "always": "always solved: every completion was right",
}
HARD: tuple[Outcome, ...] = ("never", "forgotten")


def select_samples(
    path: Path,
    notes: list[str],
    *,
    kind: Literal["train", "eval", "eval-greedy"] | None = None,
    step: int | None = None,
    num: int | None = None,
    prompt: int | None = None,
    worst: bool = False,
    unsolved: float | None = None,
) -> list[Line]:
    """Return the first `num` lines (None: all) of samples.jsonl of a kind (None: any), a step (None: the last that has
    such lines) and a prompt (None: any; without a step its first sample at each of `num` steps).

    worst: those with the lowest rewards first; unsolved: those to prompts without a sample at that step of so high a
    reward. Raises ValueError where there is none, with the steps that there are.
    """
    by_step: dict[int, list[Line]] = {}
    for row in samples_of(path, notes, kind=kind):
        if prompt in (None, row.get("prompt_index")):
            by_step.setdefault(row["step"], []).append(row)
    if not by_step or step not in (None, *by_step):
        asked = {"of kind ": kind, "of prompt ": prompt, "at step ": step}
        which = "".join(f" {name}{value}" for name, value in asked.items() if value is not None)
        there = f"there are some of step {listed(map(str, sorted(by_step)))}" if by_step else "there are none"
        raise ValueError(f"{path}: no samples{which}; {there}")
    rows = by_step[max(by_step) if step is None else step]
    if prompt is not None and step is None:  # held-out ones where there are any: training numbers prompts otherwise
        kinds = [row.get("kind") for rows in by_step.values() for row in rows]
        one = "eval" if "eval" in kinds else kinds[0]
        firsts = [next((r for r in rows if r.get("kind") == one), None) for _, rows in sorted(by_step.items())]
        rows = [row for row in firsts if row is not None]
        return evenly(rows, num or len(rows)) or rows[-1:]
    if worst:
        rows = sorted(rows, key=lambda row: (math.isnan(reward := number(row.get("reward"))), reward))
    if unsolved is not None:
        solved = {_prompt(row) for row in rows if number(row.get("reward")) >= unsolved}
        rows = [row for row in rows if _prompt(row) not in solved]
    return rows[:num]


def _prompt(row: Line) -> tuple[str, str]:
    return str(row.get("kind")), str(row.get("prompt_index"))


def render(rows: list[Line], *, grey: Callable[[str], str]) -> str:
    """Sample after sample: what is known of it, the prompt, and its turns; `grey` is for what the policy only read."""
    blocks = []
    for row in rows:
        rewards = row.get("rewards")
        each = rewards if isinstance(rewards, dict) and len(rewards) > 1 else {}
        each = ", ".join(f"{name} {_value(score)}" for name, score in each.items())
        facts = [
            f"step {row['step']}",
            str(row.get("kind", "")),
            f"prompt {_value(row.get('prompt_index'))}, sample {_value(row.get('sample'))}",
            f"reward {_value(row.get('reward'))}{f' ({each})' if each else ''}",
            *([f"advantage {_value(row['advantage'])}"] if row.get("advantage") is not None else []),
            f"ended: {row.get('finish_reason', '')}",
        ]
        parts = [visible(" | ".join(facts)).replace("\n", " ")]
        for speaker, text in [("prompt", str(row.get("prompt", ""))), *messages_of(row)]:
            cut = excerpt(text or "(nothing)", MOST_CHARACTERS, lines=MOST_LINES)
            shown = [cut.head, f"[{cut.omitted:,} characters left out]", cut.tail] if cut.omitted else [cut.head]
            lines = [speaker, "\n".join(f"  {line}" for line in visible("\n".join(shown)).split("\n"))]
            parts += map(grey, lines) if speaker == "environment" else lines
        blocks.append("\n".join(parts))
    return "\n\n".join(blocks)


def _value(value: Any) -> str:
    found = number(value)
    return "-" if math.isnan(found) else str(int(found)) if found == int(found) else f"{found:.4g}"


# ---- training prompts ----


@dataclass
class PromptRecord:
    """A training prompt: its row's number and key, and for each step that had it (step, tried, solved): completions
    with a reward, and those whose reward was task.solved_reward or more.
    """

    index: int
    key: str
    tries: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(tried for _, tried, _ in self.tries)

    @property
    def outcome(self) -> Outcome:
        solved = sum(solved for _, _, solved in self.tries)
        if solved in (0, self.tried):
            return "always" if solved else "never"
        return "sometimes" if self.tries[-1][2] else "forgotten"


def read_prompt_stats(path: Path, notes: list[str]) -> list[PromptRecord]:
    """Read the prompts of prompts.jsonl that had a completion with a reward, by number. Entries that cannot be read are
    counted in `notes`. Raises ValueError where there is none.
    """
    found: dict[str, PromptRecord] = {}
    odd = 0
    for line in json_lines(path, notes):
        entries = line.get("prompts")
        for entry in entries if isinstance(entries, list) else [entries]:
            four: list[Any] = entry if isinstance(entry, list) and len(entry) == 4 else [None] * 4
            index, key, tried, solved = four
            counts = all(type(n) is int and 0 <= n < 2**53 for n in (index, tried, solved))
            if not (isinstance(key, str) and counts and solved <= tried):
                odd += 1
            elif tried:
                record = found.setdefault(key, PromptRecord(index, key))
                record.index = index
                record.tries.append((line["step"], tried, solved))
    if odd:
        notes.append(f"{path.name}: {odd} entries could not be read and are left out.")
    if not found:
        raise ValueError(f"{path}: no prompt was tried yet; runs of grpo and ppo keep this record")
    return sorted(found.values(), key=lambda record: record.index)


def hard_keys(prompt_stats: Iterable[PromptRecord]) -> set[str]:
    return {record.key for record in prompt_stats if record.outcome in HARD}


def prompt_texts(path: Path, indices: set[int]) -> dict[int, str]:
    """Return the texts of training prompts, as far as samples.jsonl has them."""
    rows = samples_of(path, [], kind="train")
    return {i: str(row.get("prompt", "")) for row in rows if type(i := row.get("prompt_index")) is int and i in indices}


def render_prompt_stats(prompt_stats: list[PromptRecord], texts: dict[int, str], *, num: int) -> str:
    """Count the prompts by outcome; list the `num` hard ones of each kind that were tried most, with their tries."""
    steps = [step for record in prompt_stats for step, _, _ in record.tries]
    of = {kind: [record for record in prompt_stats if record.outcome == kind] for kind in MEANING}
    lines = [
        f"training prompts tried: {len(prompt_stats):,}, in steps {min(steps):,} to {max(steps):,}",
        "right, or solved: a completion whose reward is task.solved_reward or more",
        *(f"{len(of[kind]):7,}  {meaning}" for kind, meaning in MEANING.items()),
    ]
    for kind in HARD:
        records = sorted(of[kind], key=lambda record: (-record.tried, record.index))
        if records:
            more = f" ({num} of {len(records):,})" if len(records) > num else ""
            lines += ["", f"{MEANING[kind].partition(':')[0]}{more}"]
        for record in records[:num]:
            shown = "... " if len(record.tries) > MOST_TRIES else ""
            shown += " ".join(f"{solved}/{tried}" for _, tried, solved in record.tries[-MOST_TRIES:])
            text = one_line(texts.get(record.index, ""), PROMPT_CHARACTERS)
            lines.append(f"  prompt {record.index:<6} {shown}  {text}".rstrip())
    return "\n".join(lines)
