"""Which training prompts were tried, and how many of their completions were right, step by step: prompts.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.runs.records import json_lines
from tinyrl.text import one_line

Standing = Literal["never", "always", "forgotten", "sometimes"]
MEANING: dict[Standing, str] = {
    "never": "never solved: every completion was wrong",
    "forgotten": "forgotten: solved once, and not at the last try",
    "sometimes": "in between",
    "always": "always solved: every completion was right",
}
HARD: tuple[Standing, ...] = ("never", "forgotten")
SOLVED = "right, or solved: a completion whose reward is task.solved_reward or more"
MOST_TRIES = 8  # shown of a prompt
PROMPT_CHARACTERS = 60


@dataclass
class PromptRecord:
    """A training prompt: its row's number and key, and for each step that had it (step, tried, solved) completions."""

    index: int
    key: str
    tries: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Completions that had a reward."""
        return sum(tried for _, tried, _ in self.tries)

    @property
    def solved(self) -> int:
        """Completions whose reward was task.solved_reward or more."""
        return sum(solved for _, _, solved in self.tries)

    @property
    def standing(self) -> Standing:
        """What its tries come to."""
        if self.solved in (0, self.tried):
            return "always" if self.solved else "never"
        return "sometimes" if self.tries[-1][2] else "forgotten"


def read_ledger(path: Path, notes: list[str]) -> list[PromptRecord]:
    """The prompts of prompts.jsonl that had a completion with a reward, by number. What cannot be read is left out, and
    said in `notes`. Raises ValueError where there is nothing.
    """
    found: dict[str, PromptRecord] = {}
    odd = 0
    for line in json_lines(path, notes) if path.is_file() else ():
        entries: Any = line.get("prompts")
        for entry in entries if isinstance(entries, list) else [entries]:
            if not _is_entry(entry):
                odd += 1
            elif entry[2]:
                index, key, tried, solved = entry
                record = found.setdefault(key, PromptRecord(index, key))
                record.index = index
                record.tries.append((line["step"], tried, solved))
    if odd:
        notes.append(f"{path.name}: {odd} entr{'ies' if odd > 1 else 'y'} could not be read and are left out.")
    if not found:
        raise ValueError(f"{path}: no prompt was tried yet; runs of grpo and ppo keep this record")
    return sorted(found.values(), key=lambda record: record.index)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[1], str):
        return False
    counts = [entry[0], *entry[2:]]
    return all(type(n) is int and 0 <= n < 2**53 for n in counts) and entry[3] <= entry[2]


def hard_keys(ledger: Iterable[PromptRecord]) -> set[str]:
    """The keys of prompts that were never solved, or forgotten."""
    return {record.key for record in ledger if record.standing in HARD}


def prompt_texts(path: Path, indices: set[int]) -> dict[int, str]:
    """The texts of training prompts, as far as samples.jsonl has them."""
    texts: dict[int, str] = {}
    for row in json_lines(path, [], containing=b'"train"') if path.is_file() else ():
        index = row.get("prompt_index")
        if row.get("kind") == "train" and isinstance(index, int) and index in indices:
            texts.setdefault(index, str(row.get("prompt", "")))
    return texts


def render_ledger(ledger: list[PromptRecord], texts: dict[int, str], *, num: int) -> str:
    """How many prompts stand how, and of those that are hard the `num` that were tried most, with their last tries."""
    steps = [step for record in ledger for step, _, _ in record.tries]
    lines = [f"training prompts tried: {len(ledger):,}, in steps {min(steps):,} to {max(steps):,}", SOLVED]
    counts = {standing: sum(record.standing == standing for record in ledger) for standing in MEANING}
    lines += [f"{counts[standing]:7,}  {meaning}" for standing, meaning in MEANING.items()]
    for standing in HARD:
        records = sorted(of_standing(ledger, standing), key=lambda record: (-record.tried, record.index))
        if records:
            more = f" ({num} of {len(records):,})" if len(records) > num else ""
            lines += ["", f"{MEANING[standing].partition(':')[0]}{more}"]
            lines += [_line(record, texts.get(record.index, "")) for record in records[:num]]
    return "\n".join(lines)


def of_standing(ledger: list[PromptRecord], standing: Standing) -> list[PromptRecord]:
    """The prompts that stand so."""
    return [record for record in ledger if record.standing == standing]


def _line(record: PromptRecord, text: str) -> str:
    shown = " ".join(f"{solved}/{tried}" for _, tried, solved in record.tries[-MOST_TRIES:])
    earlier = "... " if len(record.tries) > MOST_TRIES else ""
    return f"  prompt {record.index:<6} {earlier}{shown}  {one_line(text, PROMPT_CHARACTERS)}".rstrip()
