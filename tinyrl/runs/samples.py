"""The samples of a run: which are shown, and as text for a terminal: prompts, what was written and read, by role."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from tinyrl.runs.records import json_lines, messages_of, number
from tinyrl.text import excerpt, listed, visible

Kind = Literal["train", "eval", "eval-greedy"]
Line = dict[str, Any]
INDENT = "  "
MOST_CHARACTERS, MOST_LINES = 20_000, 1000  # of a text; what is in the middle of a longer one is left out


def read_samples(
    path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str], prompt: int | None = None
) -> list[Line]:
    """The first `num` lines of samples.jsonl of a kind (None: any), a step (None: the last that has such lines) and a
    prompt (None: any).

    Lines that cannot be read are left out, and said in `notes`. Raises ValueError where there is none of that kind,
    step and prompt, with the steps that there are.
    """
    return _of_step(path, kind=kind, step=step, prompt=prompt, notes=notes)[:num]


def worst_samples(path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str]) -> list[Line]:
    """Those of a step with the lowest rewards, the lowest first; what has none comes last."""
    rows = _of_step(path, kind=kind, step=step, notes=notes)
    return sorted(rows, key=lambda row: _last_if_nan(_reward(row)))[:num]


def unsolved_samples(
    path: Path, *, kind: Kind | None, step: int | None, num: int, notes: list[str], solved_reward: float
) -> list[Line]:
    """Those of a step to prompts with no sample in it whose reward is `solved_reward` or more."""
    rows = _of_step(path, kind=kind, step=step, notes=notes)
    solved = {_prompt_of(row) for row in rows if _reward(row) >= solved_reward}
    return [row for row in rows if _prompt_of(row) not in solved][:num]


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
    for row in _lines(path, kind, notes):
        if row.get("prompt_index") == prompt:
            by_kind.setdefault(str(row.get("kind")), {}).setdefault(row["step"], row)
    if not by_kind:
        raise ValueError(f"{path}: no samples{f' of kind {kind}' if kind else ''} of prompt {prompt}")
    steps = by_kind.get("eval") or next(iter(by_kind.values()))
    rows = [steps[step] for step in sorted(steps)]
    apart = (len(rows) - 1) / max(1, num - 1)
    return rows if len(rows) <= num else [rows[round(i * apart)] for i in range(num)] if num > 1 else rows[-1:]


def _lines(path: Path, kind: Kind | None, notes: list[str]) -> Iterator[Line]:
    rows = json_lines(path, notes) if path.is_file() else iter(())
    return (row for row in rows if kind in (None, row.get("kind")))


def _of_step(
    path: Path, *, kind: Kind | None, step: int | None, notes: list[str], prompt: int | None = None
) -> list[Line]:
    wanted, steps, kept = step, set[int](), list[Line]()
    for row in _lines(path, kind, notes):
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
    return kept


def _ends(path: Path, *, kind: Kind, step: int | None, notes: list[str]) -> tuple[dict[Any, Line], dict[Any, Line]]:
    """The samples of the first step and of `step` (None: the last), by prompt and number; nothing where it is one."""
    kept: dict[int, dict[Any, Line]] = {}
    for row in _lines(path, kind, notes):
        at = row["step"]
        if step is not None and at > step:
            continue
        if at not in kept and len(kept) == 2:
            low, high = min(kept), max(kept)
            if low < at < high:
                continue
            del kept[low if at < low else high]
        kept.setdefault(at, {})[(_prompt_of(row), _hashable(row.get("sample")))] = row
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


def _last_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _prompt_of(row: Line) -> tuple[Any, Any]:
    return _hashable(row.get("kind")), _hashable(row.get("prompt_index"))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str) else None


# ---- as text ----


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
    said = [f"step {row['step']}", str(row.get("kind", ""))]
    said.append(f"prompt {_value(row.get('prompt_index'))}, sample {_value(row.get('sample'))}")
    said.append(f"reward {_value(row.get('reward'))}")
    each = row.get("rewards")
    if isinstance(each, dict) and len(each) > 1:
        said[-1] += f" ({', '.join(f'{name} {_value(score)}' for name, score in each.items())})"
    said += [f"advantage {_value(row['advantage'])}"] if row.get("advantage") is not None else []
    return visible(" | ".join([*said, f"ended: {row.get('finish_reason', '')}"])).replace("\n", " ")


def _value(value: Any) -> str:
    found = number(value)
    return "-" if math.isnan(found) else str(int(found)) if found == int(found) else f"{found:.4g}"


def _indented(text: str) -> str:
    cut = excerpt(text, MOST_CHARACTERS, lines=MOST_LINES)
    parts = [cut.head, f"[{cut.omitted:,} characters left out]", cut.tail] if cut.omitted else [cut.head]
    return "\n".join(INDENT + line for line in visible("\n".join(parts)).split("\n"))
