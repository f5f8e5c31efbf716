"""A lenient reader of a run's records: the run may still be going on, may have been killed, or may lack files.

Lines that cannot be read are counted and reported (lines.py). Numbers that are null, NaN or infinite become NaN: a gap
in a chart, never a zero.
"""

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.runs.lines import LARGEST, json_lines, messages_of, number
from tinyrl.text import Excerpt, did_you_mean, excerpt, hidden, one_line

# ---- Held-out samples ----
# A record may hold thousands of steps: of those between the first and the last, some are kept, with the first prompts.


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


# ---- A lenient reader of a run's records ----


__all__ = ["Points", "Run", "json_lines", "messages_of", "number", "read_run", "read_steps", "reliability_of"]

Points = list[tuple[int, float]]  # (step, value), by step

MOST_CONFIG_BYTES = 2_000_000


@dataclass(frozen=True)
class Run:
    """A run directory as data. steps: step to metrics; nonfinite: for each batch that was kept because it gave numbers
    that are not finite, how many steps were done.
    """

    path: Path
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    held_out: HeldOut = field(default_factory=HeldOut)
    checkpoints: tuple[str, ...] = ()
    nonfinite: tuple[int, ...] = ()
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
        return sorted(self._measured)

    @functools.cached_property
    def _measured(self) -> set[str]:
        found = set[str]()
        for line in self.steps.values():
            found.update(key for key in line.keys() - found if math.isfinite(number(line[key])))
        return found

    def points(self, key: str) -> Points:
        """The metric by step, NaN where its line says null; empty when it never has a finite number."""
        return self._read(key)[0]

    def finite(self, key: str) -> Points:
        """The metric by step, finite values only."""
        return self._read(key)[1]

    def _read(self, key: str) -> tuple[Points, Points]:
        """`points` and `finite` of a metric, read once: a run is asked for most of them several times."""
        if key not in self._points:
            found = [(step, number(line[key])) for step, line in self.steps.items() if key in line]
            finite = [point for point in found if math.isfinite(point[1])]
            self._points[key] = (found if finite else [], found if len(finite) == len(found) else finite)
        return self._points[key]

    @functools.cached_property
    def _points(self) -> dict[str, tuple[Points, Points]]:
        return {}

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
    held_out = read_held_out(run_dir / "samples.jsonl", notes)
    folders = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())
    kept = [path.stem.split("-")[1] for path in (run_dir / "nonfinite").glob("step-*-*.json")]
    nonfinite = tuple(sorted(int(step) for step in kept if step.isdecimal()))
    config, env = _read_config(run_dir / "config.yaml", notes), _read_env(run_dir / "env.json", notes)
    return Run(run_dir, steps, config, env, held_out, tuple(folders), nonfinite, (*notes, *_gaps(steps)))


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


def read_steps(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step. Unreadable ones are left out, and noted unless it is a cut-off last line."""
    steps: dict[int, dict[str, Any]] = {}
    for row in json_lines(path, notes):
        steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    from tinyrl.config.schema import without_secrets
    from tinyrl.config.yaml_reader import parse_plain  # with yaml, which not every reader of records needs

    try:
        with path.open("rb") as file:
            loaded, _ = parse_plain(file.read(MOST_CONFIG_BYTES).decode("utf-8", "replace"), lambda line: path.name)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} could not be read: settings are missing from this report.")
        return {}
    return without_secrets(loaded) if isinstance(loaded, dict) else {}


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
            if (type(value) is float and -LARGEST < value < LARGEST) or math.isfinite(number(value)):
                measured.add(key)
            elif not isinstance(value, list):
                gaps.setdefault(key, []).append(step)
    notes = []
    for key in sorted(measured & gaps.keys())[:6]:
        some = ", ".join(str(step) for step in gaps[key][:5]) + (", …" if len(gaps[key]) > 5 else "")
        notes.append(f"{one_line(key, 60)} is not a finite number at step {some}: a gap in its chart.")
    return notes
