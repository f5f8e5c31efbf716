"""The reader of run folders: metrics, held-out samples and tokens of a run that goes on, was killed, or lacks files.

A record is JSON, a line a step or a completion. A last line without its line break is being written, so it is left out
when it does not parse; any other line that does not parse is counted and reported, and so are lines with LOST, which
take the place of lines that a resume did not find any more. Numbers that are null, NaN or infinite become NaN: a gap in
a chart, never a zero.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tinyrl.text import Excerpt, did_you_mean, excerpt, one_line

Points = list[tuple[int, float]]  # (step, value), by step
Item = TypeVar("Item")

LARGEST = 1e100
LOST = "lost_bytes"
MOST_OF_A_MARK = 1 << 20  # bytes
MOST_BYTES = 2_000_000  # of config.yaml and env.json

# Of samples and tokens, what a page shows. A record may hold thousands of steps: of those between the first and the
# last, some are kept, with the first prompts.
PROMPT_CHARACTERS = 500
CHARACTERS = {"policy": 900, "environment": 500}
MOST_MESSAGES = 16  # of an episode, an even number
MOST_STEPS = 64
MOST_PROMPTS = 16  # at a step that is neither the first nor the last
MOST_COMPLETIONS = 8  # token by token
MOST_TOKENS = 400  # of a completion; of longer ones, the start and the end
NUMBERS = ("advantage", "old", "new", "ref", "teacher", "value", "reward")


# ---- lines ----


def number(value: Any) -> float:
    """A JSON value as a float; NaN for what is not a finite number, or so large that an axis cannot hold it."""
    is_number = type(value) is float or (isinstance(value, (int, float)) and not isinstance(value, bool))
    return float(value) if is_number and abs(value) < LARGEST else math.nan


def known(value: Any, otherwise: float) -> float:
    """A JSON value as a number; `otherwise` where it is none."""
    found = number(value)
    return otherwise if math.isnan(found) else found


def json_lines(path: Path, notes: list[str], *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a record that hold a step; none where there is no such file. Others are left out and, but for a
    cut-off last one, noted at the end, as is what was lost.
    """
    if not path.is_file():
        return
    broken, lost, mark = 0, dict[int, int](), LOST.encode()
    with path.open("rb") as file:
        for line in file:
            if (containing not in line and mark not in line[:64]) or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
                broken += 1
            elif isinstance(row.get(LOST), int):
                lost[step] = lost.get(step, 0) + row[LOST]
            else:
                yield row
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' * (broken > 1)} could not be read and are left out.")
    for step, size in lost.items():
        notes.append(f"{path.name}: {size:,} bytes of up to step {step} were lost before a resume: a gap.")


def lost_lines(step: int, size: int) -> Iterator[bytes]:
    """Lines of `size` bytes together that say that as many, of up to `step`, are lost. Being as long as what they stand
    for, they leave the lengths true that checkpoints have of a record.
    """
    while size:
        now = size if size < 2 * MOST_OF_A_MARK else MOST_OF_A_MARK
        line = json.dumps({"step": step, LOST: now}).encode()
        yield (line if len(line) < now else b"").ljust(now - 1) + b"\n"
        size -= now


def read_steps(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for row in json_lines(path, notes):
        steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def samples_of(
    path: Path, notes: list[str], *, kind: str | None = None, step: int | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of samples.jsonl of a step and a kind (None: any): "train", "eval" (held out), "eval-greedy"."""
    rows = json_lines(path, notes, containing=f'"{kind}"'.encode() if kind else b"")
    return (row for row in rows if kind in (None, row.get("kind")) and step in (None, row["step"]))


def messages_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What a line of samples.jsonl holds after the prompt, by turns: "policy" or "environment", and the text. Without
    an environment that is the completion.
    """
    episode = row.get("episode")
    if not isinstance(episode, list):
        return [("policy", str(row.get("completion", "")))]
    found = [message for message in episode if isinstance(message, dict)]
    return [("policy" if m.get("role") == "assistant" else "environment", str(m.get("content", ""))) for m in found]


def evenly(items: list[Item], most: int) -> list[Item]:
    """At most so many of them: the first, the last, and evenly between; none where two are too many."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else []


def _without_middle(items: list[Item], most: int) -> tuple[list[Item], int]:
    """At most so many, an even number, from both ends, and how many are left out."""
    omitted = max(0, len(items) - most)
    return ([*items[: most // 2], *items[-most // 2 :]] if omitted else items), omitted


# ---- held-out samples ----


@dataclass(frozen=True)
class Sample:
    """One held-out completion, its texts cut to what the page shows. messages: as `messages_of` has them, `omitted` of
    them left out in the middle; length: characters that the policy wrote.
    """

    prompt_index: int
    sample: int
    prompt: Excerpt
    messages: tuple[tuple[str, Excerpt], ...]
    omitted: int
    reward: float
    finish_reason: str
    length: int


@dataclass(frozen=True)
class HeldOut:
    """by_step: step to prompt_index to its first sample, by step. last: every sample of the last step, as recorded."""

    by_step: dict[int, dict[int, Sample]] = field(default_factory=dict)
    last: tuple[Sample, ...] = ()

    @property
    def first_step(self) -> int:
        return min(self.by_step)

    @property
    def last_step(self) -> int:
        return max(self.by_step)


def read_held_out(path: Path, notes: list[str]) -> HeldOut:
    """The samples of kind "eval" in a samples.jsonl."""
    by_step: dict[int, dict[int, Sample]] = {}
    last: list[Sample] = []
    for row in samples_of(path, notes, kind="eval"):
        step, index = row["step"], row.get("prompt_index")
        if not isinstance(index, int):
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
    said = messages_of(row)
    shown, omitted = _without_middle(said, MOST_MESSAGES)
    return Sample(
        prompt_index=index,
        sample=which if isinstance(which := row.get("sample"), int) else 0,
        prompt=excerpt(str(row.get("prompt", "")), PROMPT_CHARACTERS),
        messages=tuple((who, excerpt(text, CHARACTERS[who])) for who, text in shown),
        omitted=omitted,
        reward=number(row.get("reward")),
        finish_reason=str(row.get("finish_reason", "")),
        length=sum(len(text) for who, text in said if who == "policy"),
    )


# ---- token by token ----


def read_last_tokens(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The completions of the last step in tokens.jsonl that has any, at most MOST_COMPLETIONS; of each token `piece`,
    whether the policy has `chosen` it, and the NUMBERS that are known. `omitted` tokens are left out in the middle.
    """
    step, kept = -1, list[dict[str, Any]]()
    for row in json_lines(path, notes):
        tokens = row.get("tokens")
        if not isinstance(tokens, list) or row["step"] < step:
            continue
        if row["step"] > step:
            step, kept = row["step"], []
        if len(kept) < MOST_COMPLETIONS:
            tokens, omitted = _without_middle([one for one in tokens if isinstance(one, dict)], MOST_TOKENS)
            kept.append({**row, "tokens": tokens, "omitted": omitted})
    return kept


# ---- a run ----


@dataclass(frozen=True)
class Run:
    """A run folder as data. steps: step to metrics; nonfinite: for each batch that was kept because it gave numbers
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
        return one_line(self.path.resolve().name, 80)

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def metric_names(self) -> list[str]:
        """Every metric that has at least one finite number, sorted."""
        return self._names

    @functools.cached_property
    def _names(self) -> list[str]:
        return sorted(filter(self.points, set[str]().union(*self.steps.values())))

    def points(self, key: str) -> Points:
        """The metric by step, NaN where its line says null; empty when it never has a finite number."""
        if key not in self._points:  # a run is asked for most metrics several times
            found = [(step, number(line[key])) for step, line in self.steps.items() if key in line]
            self._points[key] = found if any(math.isfinite(value) for _, value in found) else []
        return self._points[key]

    def finite(self, key: str) -> Points:
        """The metric by step, finite values only."""
        return [point for point in self.points(key) if math.isfinite(point[1])]

    @functools.cached_property
    def _points(self) -> dict[str, Points]:
        return {}

    def interval(self, key: str, step: int) -> tuple[float, float] | None:
        """A metric that is [low, high], at one step."""
        pair = self.steps.get(step, {}).get(key)
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        low, high = number(pair[0]), number(pair[1])
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def setting(self, dotted: str) -> Any:
        """config.yaml's value at `section.key`; None where there is none."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(run_dir: Path) -> Run:
    """Read a run folder. ValueError, with what to do instead, when it is not one or has no metrics yet."""
    from tinyrl.config.schema import without_secrets
    from tinyrl.config.yaml_reader import parse_plain  # with yaml, which not every reader of records needs

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
    config = _mapping(run_dir / "config.yaml", lambda text: parse_plain(text, str)[0], "settings", notes)
    env = _mapping(run_dir / "env.json", json.loads, "versions", notes)
    notes += _gaps(steps)
    return Run(run_dir, steps, without_secrets(config), env, held_out, tuple(folders), nonfinite, tuple(notes))


def _not_a_run(run_dir: Path) -> str:
    if runs := sorted(run_dir.glob("*/metrics.jsonl")):
        return f"{run_dir} is a folder of runs: name one of them, such as {runs[-1].parent}."
    if run_dir.is_dir():
        return f"{run_dir} has no metrics.jsonl, so there is nothing to report. A run's folder is runs/<name>."
    if run_dir.exists():
        return f"{run_dir} is a file. `tinyrl report` wants a run's folder, such as runs/<name>."
    siblings = [path.parent.name for path in run_dir.parent.glob("*/metrics.jsonl")]
    hint = did_you_mean(run_dir.name, siblings) or " A run's folder is runs/<name>."
    return f"There is no run at {run_dir}.{hint}"


def _mapping(path: Path, parse: Callable[[str], Any], what: str, notes: list[str]) -> dict[str, Any]:
    """A mapping from a file; empty where there is none, or something else."""
    try:
        with path.open("rb") as file:
            loaded = parse(file.read(MOST_BYTES).decode("utf-8", "replace"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} could not be read: {what} are missing from this report.")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _gaps(steps: dict[int, dict[str, Any]]) -> list[str]:
    """Metrics that are a number at some steps and null at others, so that a gap in a chart is not overlooked."""
    gaps: dict[str, list[int]] = {}
    measured: set[str] = set()
    for step, line in steps.items():
        for key, value in line.items():
            if math.isfinite(number(value)):
                measured.add(key)
            elif not isinstance(value, list):
                gaps.setdefault(key, []).append(step)
    notes = []
    for key in sorted(measured & gaps.keys())[:6]:
        some = ", ".join(str(step) for step in gaps[key][:5]) + (", …" if len(gaps[key]) > 5 else "")
        notes.append(f"{one_line(key, 60)} is not a finite number at step {some}: a gap in its chart.")
    return notes
