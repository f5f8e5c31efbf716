"""A lenient reader of a run's records: the run may still be going on, may have been killed, or may lack files.

A last line without its line break is being written, so it is left out when it does not parse; any other line that does
not parse is counted and reported. Numbers that are null, NaN or infinite become NaN: a gap in a chart, never a zero.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.text import Excerpt, did_you_mean, excerpt, hidden, one_line

Points = list[tuple[int, float]]  # (step, value), by step

PROMPT_CHARACTERS = 500
CHARACTERS = {"policy": 900, "environment": 500}
MOST_MESSAGES = 16  # of an episode, an even number
SPEAKERS = {"assistant": "policy"}  # all else that an episode holds was read
LARGEST = 1e100
MOST_CONFIG_BYTES = 2_000_000


@dataclass(frozen=True)
class Sample:
    """One held-out completion, with its texts already cut to what the page shows.

    messages: who said what, "policy" or "environment", by turns; `omitted` of them are left out in the middle.
    """

    prompt: Excerpt
    messages: tuple[tuple[str, Excerpt], ...]
    omitted: int
    reward: float
    finish_reason: str
    sample: int


@dataclass(frozen=True)
class Run:
    """A run directory as data. `steps`: step to metrics; `before` and `after`: prompt_index to held-out sample."""

    path: Path
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    before: dict[int, Sample] = field(default_factory=dict)
    after: dict[int, Sample] = field(default_factory=dict)
    sample_steps: tuple[int, int] | None = None
    checkpoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return one_line(self.path.resolve().name, 80)

    @property
    def last_step(self) -> int:
        """The last step with a line in metrics.jsonl."""
        return max(self.steps)

    def metric_names(self) -> list[str]:
        """Every metric that has at least one finite number, sorted."""
        return sorted({key for line in self.steps.values() for key in line if math.isfinite(number(line[key]))})

    def points(self, key: str) -> Points:
        """The metric by step, NaN where its line says null; empty when it never has a finite number."""
        found = [(step, number(line[key])) for step, line in self.steps.items() if key in line]
        return found if any(math.isfinite(value) for _, value in found) else []

    def finite(self, key: str) -> Points:
        """The metric by step, finite values only."""
        return [(step, value) for step, value in self.points(key) if math.isfinite(value)]

    def interval(self, key: str, step: int) -> tuple[float, float] | None:
        """A metric that is [low, high], at one step."""
        pair = self.steps.get(step, {}).get(key)
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        low, high = number(pair[0]), number(pair[1])
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def setting(self, dotted: str) -> Any:
        """config.yaml's value at `section.key`, None where there is none."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def number(value: Any) -> float:
    """A JSON value as a float; NaN for what is not a finite number, or so large that an axis cannot hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        result = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    return result if abs(result) < LARGEST else math.nan


def reliability_of(line: dict[str, Any]) -> list[tuple[float, float, int]]:
    """A reward model's (mean prediction, mean of what turned out, rows) by tenths of held-out rows, as one line of
    metrics.jsonl has them; empty where it has none, or something else.
    """
    rows = line.get("eval/reliability")
    bins = [one for one in rows if isinstance(one, list) and len(one) == 3] if isinstance(rows, list) else []
    found = [[number(value) for value in one] for one in bins]
    return [(a, b, int(n)) for a, b, n in found if all(map(math.isfinite, (a, b, n)))]


def read_run(run_dir: Path) -> Run:
    """Read a run directory. ValueError, with what to do instead, when it is not one or has no metrics yet."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(_not_a_run(run_dir))
    notes: list[str] = []
    steps = read_steps(metrics, notes)
    if not steps:
        raise ValueError(f"{metrics} holds no complete line yet. A report needs at least one step; try again after it.")
    before, after, sample_steps = _read_samples(run_dir / "samples.jsonl", notes)
    folders = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())
    config, env = _read_config(run_dir / "config.yaml", notes), _read_env(run_dir / "env.json", notes)
    return Run(run_dir, steps, config, env, before, after, sample_steps, tuple(folders), (*notes, *_gaps(steps)))


def _not_a_run(run_dir: Path) -> str:
    if run_dir.is_dir():
        runs = sorted(path.parent.name for path in run_dir.glob("*/metrics.jsonl"))
        if runs:
            return f"{run_dir} is a folder of runs: name one of them, such as {run_dir / runs[-1]}."
        return f"{run_dir} has no metrics.jsonl, so there is nothing to report. A run's folder is runs/<name>."
    if run_dir.exists():
        return f"{run_dir} is a file. `tinyrl report` wants a run's folder, such as runs/<name>."
    siblings = [path.parent.name for path in run_dir.parent.glob("*/metrics.jsonl")]
    hint = did_you_mean(run_dir.name, siblings) or " A run's folder is runs/<name>."
    return f"There is no run at {run_dir}.{hint}"


def json_lines(path: Path, notes: list[str], *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a record that hold a step. Others are left out and, but for a cut-off last one, noted at the end."""
    broken = 0
    with path.open("rb") as file:
        for line in file:
            if containing not in line or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
                yield row
            else:
                broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' * (broken > 1)} could not be read and are left out.")


def read_steps(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step. Unreadable ones are left out, and noted unless it is a cut-off last line."""
    steps: dict[int, dict[str, Any]] = {}
    for row in json_lines(path, notes):
        steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def _read_samples(path: Path, notes: list[str]) -> tuple[dict[int, Sample], dict[int, Sample], tuple[int, int] | None]:
    """The held-out samples of the first and of the last step that has any, one for each prompt."""
    by_step: dict[int, dict[int, Sample]] = {}
    rows = json_lines(path, notes, containing=b'"eval"') if path.is_file() else iter(())
    for row in rows:
        step, index = row["step"], row.get("prompt_index")
        if row.get("kind") != "eval" or not isinstance(index, int):
            continue
        if step not in by_step and len(by_step) == 2:  # only the first and the last are shown: keep no more
            first, last = min(by_step), max(by_step)
            if first < step < last:
                continue
            del by_step[last if step > last else first]
        sample = _sample(row)
        kept = by_step.setdefault(step, {}).get(index)
        if kept is None or sample.sample < kept.sample:
            by_step[step][index] = sample
    if not by_step:
        return {}, {}, None
    first, last = min(by_step), max(by_step)
    return by_step[first], by_step[last], (first, last)


def _sample(row: dict[str, Any]) -> Sample:
    sample, said = row.get("sample"), messages_of(row)
    omitted = max(0, len(said) - MOST_MESSAGES)
    if omitted:
        said = [*said[: MOST_MESSAGES // 2], *said[-MOST_MESSAGES // 2 :]]
    return Sample(
        prompt=excerpt(str(row.get("prompt", "")), PROMPT_CHARACTERS),
        messages=tuple((who, excerpt(text, CHARACTERS[who])) for who, text in said),
        omitted=omitted,
        reward=number(row.get("reward")),
        finish_reason=str(row.get("finish_reason", "")),
        sample=sample if isinstance(sample, int) else 0,
    )


def messages_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What a line of samples.jsonl holds after the prompt, by turns: who said it, and the text. Without an environment
    that is the completion.
    """
    episode = row.get("episode")
    if not isinstance(episode, list):
        return [("policy", str(row.get("completion", "")))]
    found = [message for message in episode if isinstance(message, dict)]
    return [(SPEAKERS.get(str(m.get("role")), "environment"), str(m.get("content", ""))) for m in found]


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    from tinyrl.config.yaml_reader import parse_plain  # with yaml, which not every reader of records needs

    try:
        with path.open("rb") as file:
            loaded, _ = parse_plain(file.read(MOST_CONFIG_BYTES).decode("utf-8", "replace"), lambda line: path.name)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} could not be read: settings are missing from this report.")
        return {}
    return hidden(loaded) if isinstance(loaded, dict) else {}


def _read_env(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text("utf-8", "replace")) if path.is_file() else {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} could not be read: versions are missing from this report.")
        return {}
    return hidden(loaded) if isinstance(loaded, dict) else {}


def _gaps(steps: dict[int, dict[str, Any]]) -> list[str]:
    """Metrics that are a number at some steps and null at others, so that a gap in a chart is not overlooked."""
    gaps: dict[str, list[int]] = {}
    measured: set[str] = set()
    for step, line in steps.items():
        for key, value in line.items():
            if isinstance(value, list):
                continue
            if math.isfinite(number(value)):
                measured.add(key)
            else:
                gaps.setdefault(key, []).append(step)
    notes = []
    for key in sorted(measured & gaps.keys())[:6]:
        some = ", ".join(str(step) for step in gaps[key][:5]) + (", …" if len(gaps[key]) > 5 else "")
        notes.append(f"{one_line(key, 60)} is not a finite number at step {some}: a gap in its chart.")
    return notes
