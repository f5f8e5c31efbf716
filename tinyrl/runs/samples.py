"""Samples and training prompts of a run for a terminal: which are shown, and as text, by role and by what became of
them (`tinyrl samples`, `tinyrl prompts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.runs.records import json_lines, messages_of, number, samples_of
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


def read_samples(
    path: Path, *, kind: Kind | None, step: int | None, num: int | None, notes: list[str], prompt: int | None = None
) -> list[Line]:
    """The first `num` lines (None: all) of samples.jsonl of a kind (None: any), a step (None: the last that has such
    lines) and a prompt (None: any).

    Lines that cannot be read are left out, and said in `notes`. Raises ValueError where there is none of that kind,
    step and prompt, with the steps that there are.
    """
    wanted, steps, kept = step, set[int](), list[Line]()
    for row in samples_of(path, notes, kind=kind):
        if prompt not in (None, row.get("prompt_index")):
            continue
        steps.add(row["step"])
        if step is None and (wanted is None or row["step"] > wanted):
            wanted, kept = row["step"], []
        if row["step"] == wanted:
            kept.append(row)
    if not kept:
        which = f" of kind {kind}" if kind else ""
        which += "" if prompt is None else f" of prompt {prompt}"
        which += "" if step is None else f" at step {step}"
        there = f"there are some of step {listed(map(str, sorted(steps)))}" if steps else "there are none"
        raise ValueError(f"{path}: no samples{which}; {there}")
    return kept[:num]


def worst_samples(path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str]) -> list[Line]:
    """Those of a step with the lowest rewards, the lowest first; what has none comes last."""
    rows = read_samples(path, kind=kind, step=step, num=None, notes=notes)
    return sorted(rows, key=lambda row: (math.isnan(_reward(row)), _reward(row)))[:num]


def unsolved_samples(
    path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str], solved_reward: float
) -> list[Line]:
    """Those of a step to prompts with no sample in it whose reward is `solved_reward` or more."""
    rows = read_samples(path, kind=kind, step=step, num=None, notes=notes)
    solved = {_of(row, "kind", "prompt_index") for row in rows if _reward(row) >= solved_reward}
    return [row for row in rows if _of(row, "kind", "prompt_index") not in solved][:num]


def most_changed_samples(path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str]) -> list[Line]:
    """Pairs, one behind the other: a sample of the first step that has any and the same sample at `step` (None: the
    last). `num` pairs, those first whose rewards differ most, and of these whose texts agree least from their start.

    Without a kind: greedy held-out ones, which chance has no part in, where there are any. Raises ValueError where two
    steps have no sample in common.
    """
    kinds: tuple[Kind, ...] = (kind,) if kind else ("eval-greedy", "eval")
    for each in kinds:
        first, last = _ends(path, kind=each, step=step, notes=notes)
        same = [key for key in last if key in first]
        if same:
            same.sort(key=lambda key: _change(first[key], last[key]), reverse=True)
            return [row for key in same[:num] for row in (first[key], last[key])]
        notes.clear()  # the next kind reads the same lines
    raise ValueError(f"{path}: no two steps have a sample of the same prompt ({' or '.join(kinds)})")


def samples_over_time(path: Path, *, kind: Kind | None, prompt: int, num: int, notes: list[str]) -> list[Line]:
    """The first sample to a prompt at `num` steps, the first and the last among them, evenly apart. Without a kind:
    held-out ones where there are any, else those of training, whose numbers of prompts are others.
    """
    by_kind: dict[str, dict[int, Line]] = {}
    for row in samples_of(path, notes, kind=kind):
        if row.get("prompt_index") == prompt:
            by_kind.setdefault(str(row.get("kind")), {}).setdefault(row["step"], row)
    if not by_kind:
        raise ValueError(f"{path}: no samples{f' of kind {kind}' if kind else ''} of prompt {prompt}")
    steps = by_kind.get("eval") or next(iter(by_kind.values()))
    rows = [steps[step] for step in sorted(steps)]
    apart = (len(rows) - 1) / max(1, num - 1)
    return rows if len(rows) <= num else [rows[round(i * apart)] for i in range(num)] if num > 1 else rows[-1:]


def _ends(path: Path, *, kind: Kind, step: int | None, notes: list[str]) -> tuple[dict[Any, Line], dict[Any, Line]]:
    """The samples of the first step and of `step` (None: the last), by prompt and number; nothing where it is one."""
    kept: dict[int, dict[Any, Line]] = {}
    for row in samples_of(path, notes, kind=kind):
        at = row["step"]
        if step is not None and at > step:
            continue
        if at not in kept and len(kept) == 2:
            low, high = min(kept), max(kept)
            if low < at < high:
                continue
            del kept[low if at < low else high]
        kept.setdefault(at, {})[_of(row, "kind", "prompt_index", "sample")] = row
    if len(kept) < 2 or (step is not None and step not in kept):
        return {}, {}
    return kept[min(kept)], kept[max(kept)]


def _change(before: Line, after: Line) -> tuple[float, float]:
    difference = abs(_reward(after) - _reward(before))
    ours, theirs = (str(row.get("completion", "")) for row in (before, after))
    shorter = min(len(ours), len(theirs))
    same = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
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
