"""Samples and training prompts of a run for a terminal: which are shown, and as text, by role and by what became of
them (`tinyrl show RUN --samples` and `--prompts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.runs.records import evenly, json_lines, messages_of, number, samples_of
from tinyrl.text import excerpt, listed, one_line, visible

Kind = Literal["train", "eval", "eval-greedy"]
Line = dict[str, Any]
INDENT = "  "
MOST_CHARACTERS, MOST_LINES = 20_000, 1000  # of a text; what is in the middle of a longer one is left out

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


# ---- which samples ----


def select_samples(
    path: Path,
    notes: list[str],
    *,
    kind: Kind | None = None,
    step: int | None = None,
    num: int | None = None,
    prompt: int | None = None,
    worst: bool = False,
    most_changed: bool = False,
    unsolved: float | None = None,
) -> list[Line]:
    """The first `num` lines (None: all) of samples.jsonl of a kind (None: any), a step (None: the last that has such
    lines) and a prompt (None: any). What cannot be read is left out, and said in `notes`.

    worst: those with the lowest rewards, what has none last; unsolved: those to prompts with no sample at that step of
    so high a reward; most_changed: pairs (`_pairs`); of a prompt without a step: one at each of `num` steps. Raises
    ValueError where there is none, with the steps that there are.
    """
    by_step: dict[int, list[Line]] = {}
    for row in samples_of(path, notes, kind=kind):
        if prompt in (None, row.get("prompt_index")):
            by_step.setdefault(row["step"], []).append(row)
    if most_changed:
        return _pairs(path, by_step, kinds=(kind,) if kind else ("eval-greedy", "eval"), step=step, num=num)
    rows = by_step.get(max(by_step, default=0) if step is None else step, [])
    if not rows:
        which = f" of kind {kind}" if kind else ""
        which += "" if prompt is None else f" of prompt {prompt}"
        which += "" if step is None else f" at step {step}"
        there = f"there are some of step {listed(map(str, sorted(by_step)))}" if by_step else "there are none"
        raise ValueError(f"{path}: no samples{which}; {there}")
    if prompt is not None and step is None:
        return _over_time(by_step, num or len(by_step))
    if worst:
        rows = sorted(rows, key=lambda row: (math.isnan(_reward(row)), _reward(row)))
    if unsolved is not None:
        solved = {_of(row, "kind", "prompt_index") for row in rows if _reward(row) >= unsolved}
        rows = [row for row in rows if _of(row, "kind", "prompt_index") not in solved]
    return rows[:num]


def _pairs(
    path: Path, by_step: dict[int, list[Line]], *, kinds: tuple[Kind, ...], step: int | None, num: int | None
) -> list[Line]:
    """A sample of the first step that has any, behind it the same sample at `step` (None: the last): `num` pairs, those
    first whose rewards differ most, and of these whose texts agree least from their start. Greedy held-out ones, which
    chance has no part in, where there are any.
    """
    for kind in kinds:
        of_kind = {
            at: {_of(row, "prompt_index", "sample"): row for row in rows if row.get("kind") == kind}
            for at, rows in sorted(by_step.items())
        }
        steps = [at for at, rows in of_kind.items() if rows]
        last = (steps or [0])[-1] if step is None else step
        if len(steps) > 1 and last in steps[1:]:
            first, then = of_kind[steps[0]], of_kind[last]
            same = [key for key in then if key in first]
            same.sort(key=lambda key: _change(first[key], then[key]), reverse=True)
            if same:
                return [row for key in same[:num] for row in (first[key], then[key])]
    raise ValueError(f"{path}: no two steps have a sample of the same prompt ({' or '.join(kinds)})")


def _over_time(by_step: dict[int, list[Line]], num: int) -> list[Line]:
    """The first sample at `num` steps, the first and the last among them, evenly apart: held-out ones where there are
    any, else those of training, whose numbers of prompts are others.
    """
    kinds = [row.get("kind") for rows in by_step.values() for row in rows]
    kind = "eval" if "eval" in kinds else kinds[0]
    firsts = [next((row for row in rows if row.get("kind") == kind), None) for _, rows in sorted(by_step.items())]
    rows = [row for row in firsts if row is not None]
    return evenly(rows, num) or rows[-1:]


def _change(before: Line, after: Line) -> tuple[float, float]:
    difference = abs(_reward(after) - _reward(before))
    ours, theirs = (str(row.get("completion", "")) for row in (before, after))
    both = zip(ours, theirs, strict=False)
    same = next((i for i, (a, b) in enumerate(both) if a != b), min(len(ours), len(theirs)))
    return 0.0 if math.isnan(difference) else difference, 1.0 - same / max(1, len(ours), len(theirs))


def _reward(row: Line) -> float:
    return number(row.get("reward"))


def _of(row: Line, *keys: str) -> tuple[Any, ...]:
    """Values of a line, None where they are no key of anything."""
    return tuple(value if isinstance(value := row.get(key), int | str) else None for key in keys)


# ---- samples as text ----


def render(rows: list[Line], *, grey: Callable[[str], str]) -> str:
    """Sample after sample: what is known of it, the prompt, and its turns; `grey` is for what the policy only read."""
    return "\n\n".join(_sample(row, grey) for row in rows)


def _sample(row: Line, grey: Callable[[str], str]) -> str:
    parts = [_heading(row), "prompt", _indented(str(row.get("prompt", "")))]
    for speaker, text in messages_of(row):
        shown = _indented(text) if text else f"{INDENT}(nothing)"
        parts += [speaker, shown] if speaker == "policy" else [grey(speaker), grey(shown)]
    return "\n".join(parts)


def _heading(row: Line) -> str:
    place = f"prompt {_value(row.get('prompt_index'))}, sample {_value(row.get('sample'))}"
    said = [f"step {row['step']}", str(row.get("kind", "")), place, f"reward {_value(row.get('reward'))}"]
    each = row.get("rewards")
    if isinstance(each, dict) and len(each) > 1:
        said[-1] += f" ({', '.join(f'{name} {_value(score)}' for name, score in each.items())})"
    if row.get("advantage") is not None:
        said.append(f"advantage {_value(row['advantage'])}")
    return visible(" | ".join([*said, f"ended: {row.get('finish_reason', '')}"])).replace("\n", " ")


def _value(value: Any) -> str:
    found = number(value)
    return "-" if math.isnan(found) else str(int(found)) if found == int(found) else f"{found:.4g}"


def _indented(text: str) -> str:
    cut = excerpt(text, MOST_CHARACTERS, lines=MOST_LINES)
    parts = [cut.head, f"[{cut.omitted:,} characters left out]", cut.tail] if cut.omitted else [cut.head]
    return "\n".join(INDENT + line for line in visible("\n".join(parts)).split("\n"))


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
    def solved(self) -> int:
        return sum(solved for _, _, solved in self.tries)

    @property
    def standing(self) -> Standing:
        if self.solved in (0, self.tried):
            return "always" if self.solved else "never"
        return "sometimes" if self.tries[-1][2] else "forgotten"


def read_prompt_stats(path: Path, notes: list[str]) -> list[PromptRecord]:
    """The prompts of prompts.jsonl that had a completion with a reward, by number. What cannot be read is left out, and
    said in `notes`. Raises ValueError where there is nothing.
    """
    found: dict[str, PromptRecord] = {}
    odd = 0
    for line in json_lines(path, notes):
        entries: Any = line.get("prompts")
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
        notes.append(f"{path.name}: {odd} entr{'ies' if odd > 1 else 'y'} could not be read and are left out.")
    if not found:
        raise ValueError(f"{path}: no prompt was tried yet; runs of grpo and ppo keep this record")
    return sorted(found.values(), key=lambda record: record.index)


def hard_keys(prompt_stats: Iterable[PromptRecord]) -> set[str]:
    return {record.key for record in prompt_stats if record.standing in HARD}


def prompt_texts(path: Path, indices: set[int]) -> dict[int, str]:
    """The texts of training prompts, as far as samples.jsonl has them."""
    texts: dict[int, str] = {}
    for row in samples_of(path, [], kind="train"):
        index = row.get("prompt_index")
        if isinstance(index, int) and index in indices:
            texts.setdefault(index, str(row.get("prompt", "")))
    return texts


def render_prompt_stats(prompt_stats: list[PromptRecord], texts: dict[int, str], *, num: int) -> str:
    """How many prompts stand how, and the `num` hard ones of each kind that were tried most, with their last tries."""
    steps = [step for record in prompt_stats for step, _, _ in record.tries]
    lines = [f"training prompts tried: {len(prompt_stats):,}, in steps {min(steps):,} to {max(steps):,}", SOLVED]
    standing = {kind: [record for record in prompt_stats if record.standing == kind] for kind in MEANING}
    lines += [f"{len(standing[kind]):7,}  {meaning}" for kind, meaning in MEANING.items()]
    for kind in HARD:
        records = sorted(standing[kind], key=lambda record: (-record.tried, record.index))
        if records:
            more = f" ({num} of {len(records):,})" if len(records) > num else ""
            lines += ["", f"{MEANING[kind].partition(':')[0]}{more}"]
        for record in records[:num]:
            shown = "... " if len(record.tries) > MOST_TRIES else ""
            shown += " ".join(f"{solved}/{tried}" for _, tried, solved in record.tries[-MOST_TRIES:])
            text = one_line(texts.get(record.index, ""), PROMPT_CHARACTERS)
            lines.append(f"  prompt {record.index:<6} {shown}  {text}".rstrip())
    return "\n".join(lines)
