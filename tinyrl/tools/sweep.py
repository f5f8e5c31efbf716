"""`tinyrl sweep`: one recipe under several settings and seeds, each a run of its own, several at a time.

A run of a sweep is `tinyrl train` with its settings, in a process of its own, so it equals the single run to the bit,
and whatever is true of runs (resume, doctor, report, verify) is true of it. On a CPU each has one thread, and about
as many go on at a time as there are cores: runs side by side use cores better than threads inside one. The base is
mapped from its files, so runs on one machine share it in memory where it has the dtype of the files.

Successive halving (Jamieson and Talwalkar, 1502.07943), where it is asked for: at a half, a quarter, ... of the steps
the worse half of the settings is left, as far as held-out results tell them from the best. What is decided is a
function of the runs' records, so a sweep that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import load_config, split_settings
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted
from tinyrl.evaluation.statistics import interval, mean
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints
from tinyrl.runs.records import known, number, read_steps, samples_of
from tinyrl.runs.signals import check_stop
from tinyrl.text import number as shown
from tinyrl.tools.report import write_overlay
from tinyrl.tools.report.overlay import MOST_RUNS

SEED = "run.seed"
SWEEP = "sweep.json"
LOOK_EVERY_S = 0.1
MOST = 256  # runs of a sweep
LONGEST_VALUE = 16  # characters, in a folder's name


@dataclass(frozen=True)
class Sweep:
    """What a sweep is: `words` of a recipe and settings that all runs have, axes: what they differ in."""

    method: str
    words: list[str]
    axes: dict[str, list[str]]
    halve: bool
    at_once: int
    options: list[str] = field(default_factory=list)  # of each `tinyrl train`

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Raises ValueError where the folder is not that of a sweep."""
        try:
            return cls(**json.loads((folder / SWEEP).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise ValueError(f"{folder} is no sweep: it has no {SWEEP} that can be read") from None

    def write(self, folder: Path) -> None:
        (folder / SWEEP).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Member:
    """One run of a sweep. setting: what it differs in besides its seed."""

    path: Path
    words: tuple[str, ...]
    setting: str
    seed: str
    config: Config

    @property
    def step(self) -> int:
        """The last step that it can go on from."""
        found = list_checkpoints(self.path / "checkpoints")
        return checkpoint_step(found[-1]) if found else 0

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        return read_steps(self.path / "metrics.jsonl", [])

    def score(self, step: int) -> float:
        return number(self.metrics.get(step, {}).get(self.config.run.best_metric))

    def by_prompt(self, step: int) -> dict[tuple[Any, str], float]:
        """The held-out reward of each prompt at a step, as far as samples.jsonl has them."""
        found: dict[tuple[Any, str], list[float]] = {}
        for row in samples_of(self.path / "samples.jsonl", [], kind="eval", step=step):
            key = (row.get("prompt_index"), str(row.get("prompt")))
            found.setdefault(key, []).append(number(row.get("reward")))
        return {key: mean(values) for key, values in found.items()}


def axes_of(method: str, words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(what all runs have, axes) of the words behind a method: a setting that does not take its value as it stands, but
    takes each of the parts between commas, is an axis. Raises ValueError where there is none, or a value is wrong.
    """
    shared, axes = list[str](), dict[str, list[str]]()
    for word in words:
        key, equals, text = word.partition("=")
        values = _parts(text)
        if not equals or len(values) < 2 or _is_taken(method, [*words[:1], word] if "=" not in words[0] else [word]):
            shared.append(word)
        elif len(set(values)) < len(values):
            raise ValueError(f"{word}: a value stands there twice")
        else:
            axes[key] = values
    if not axes:
        raise ValueError(
            "what is to be swept? Give a setting several values: run.seed=1,2,3 optim.learning_rate=1e-5,3e-5"
        )
    if (count := math.prod(map(len, axes.values()))) > MOST:
        raise ValueError(f"these are {count:,} runs; a sweep has at most {MOST}")
    return shared, axes


def _is_taken(method: str, words: list[str]) -> bool:
    recipe, overrides = split_settings(words)
    try:
        load_config(method, recipe, overrides=overrides)
    except ValueError:
        return False
    return True


def _parts(text: str) -> list[str]:
    """What stands between commas outside of brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def members(sweep: Sweep, folder: Path, *, config_of: Callable[[str, list[str]], Config]) -> list[Member]:
    """Its runs, by setting and seed. Raises ValueError for settings that a run would refuse."""
    found = []
    for values in itertools.product(*sweep.axes.values()):
        changes = dict(zip(sweep.axes, values, strict=True))
        words = (*sweep.words, *(f"{key}={value}" for key, value in changes.items()))
        config = config_of(sweep.method, list(words))
        name = "-".join(_named(key, value, sweep.axes[key]) for key, value in changes.items())
        others = ", ".join(f"{key}={value}" for key, value in changes.items() if key != SEED)
        found.append(
            Member(folder / name, words, others or "as given", changes.get(SEED, str(config.run.seed)), config)
        )
    return found


def _named(key: str, value: str, values: list[str]) -> str:
    """A setting and its value as part of a folder's name; long values, and what would read alike, by their number."""
    plain = [re.sub(r"[^A-Za-z0-9.-]", "_", each) for each in values]
    short = max(map(len, plain)) <= LONGEST_VALUE and len(set(plain)) == len(values)
    return key.rpartition(".")[2] + (plain[values.index(value)] if short else str(values.index(value) + 1))


def rungs(num_settings: int, config: Config) -> list[tuple[int, int]]:
    """(step, how many settings go on from there) of successive halving, before the last step."""
    every, num_steps = config.run.eval_every, config.run.num_steps
    if not every or not config.run.eval_prompts:
        raise ValueError("--halve goes by held-out results on the way: set run.eval_every (and run.eval_prompts)")
    halvings = math.ceil(math.log2(num_settings)) if num_settings > 1 else 0
    found = []
    for i in range(halvings):
        step = math.ceil(num_steps * 2**i / 2**halvings / every) * every
        if step < num_steps and step > (found[-1][0] if found else 0):
            found.append((step, math.ceil(num_settings / 2 ** (i + 1))))
    return found


# ---- running ----


def side_by_side(num_runs: int, cores: int) -> int:
    """How many runs of about the same length go on at a time, so that no core waits for the last ones; fewer than two
    for each core, since each takes memory.
    """

    def waves(at_once: int) -> float:
        sizes = [min(at_once, num_runs - start) for start in range(0, num_runs, at_once)]
        return sum(max(1.0, size / cores) for size in sizes)

    return min(range(cores, 2 * cores), key=lambda at_once: (waves(at_once), at_once))


def run(sweep: Sweep, folder: Path, runs: list[Member], *, tell: Callable[[str], None]) -> int:
    """Train all of them, or with --halve those that are worth it; the highest exit code. Raises Interrupted."""
    settings, failed = dict.fromkeys(member.setting for member in runs), set[Path]()
    ladder = rungs(len(settings), runs[0].config) if sweep.halve else []
    going, code = runs, 0
    for step, keep in [*ladder, (max(member.config.run.num_steps for member in runs), len(settings))]:
        codes = _train(sweep, [m for m in going if m.step < min(step, m.config.run.num_steps)], step, tell=tell)
        failed |= {path for path, ended in codes.items() if ended}
        code = max(code, *codes.values(), 0)
        going = [member for member in going if member.path not in failed]
        if (step, keep) in ladder and going:
            left = set(halved(going, step, keep=keep, tell=tell))
            going = [member for member in going if member.setting in left]
    if done := [member for member in runs if member.metrics]:
        with contextlib.suppress(ValueError):
            write_overlay([member.path for member in _shown(done)], folder)
    return code


def _shown(done: list[Member]) -> list[Member]:
    """Of the best settings, as many as a report can tell apart."""
    best = [row.setting for row in ranking(done)[:MOST_RUNS]]
    return [member for setting in best for member in done if member.setting == setting]


def _train(sweep: Sweep, todo: list[Member], until: int, *, tell: Callable[[str], None]) -> dict[Path, int]:
    """Bring runs up to a step, some at a time; their exit codes."""
    waiting, going, codes = list(todo), dict[subprocess.Popen[bytes], Member](), dict[Path, int]()
    try:
        while waiting or going:
            while waiting and len(going) < sweep.at_once:
                member = waiting.pop(0)
                going[_started(sweep, member, until)] = member
            for process in [process for process in going if process.poll() is not None]:
                member, code = going.pop(process), process.returncode
                if code == Interrupted.exit_code:
                    raise Interrupted("a run of the sweep was stopped")
                codes[member.path] = code if code >= 0 else 128 - code
                score = shown(member.score(member.step)) if code == 0 else f"exit {code}, see {_log(member)}"
                tell(f"{member.path.name}: step {member.step}, held-out {score}")
            check_stop()
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in going:
            process.terminate()  # each saves where it stands
        for process in going:
            process.wait()
    return codes


def _started(sweep: Sweep, member: Member, until: int) -> subprocess.Popen[bytes]:
    words = ["--resume", str(member.path)]
    if not (member.path / "config.yaml").is_file():
        words = [sweep.method, *member.words, "--name", member.path.name, "--output-dir", str(member.path.parent)]
    command = [sys.executable, "-m", "tinyrl", "train", *words, *sweep.options, "--until", str(until)]
    with _log(member).open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ})


def _log(member: Member) -> Path:
    return member.path.with_name(f"{member.path.name}.log")


# ---- judging ----


@dataclass(frozen=True)
class Row:
    """A setting's place. scores: of its seeds at `step`; difference: to the best setting at that step, with the ends of
    its interval (NaN: unknown).
    """

    setting: str
    scores: list[float]
    step: int
    difference: float
    ends: tuple[float, float]

    @property
    def is_worse(self) -> bool:
        """Whether it can be told from the best."""
        return self.ends[1] < 0


def ranking(runs: list[Member], step: int | None = None) -> list[Row]:
    """The settings, best first, each at `step`, or at the last one that all its seeds have been held out at."""
    settings = {m.setting: [other for other in runs if other.setting == m.setting] for m in runs}
    at = {name: _last_measured(group) if step is None else step for name, group in settings.items()}
    scores = {name: [m.score(at[name]) for m in group] for name, group in settings.items()}
    order = sorted(settings, key=lambda name: -known(mean(scores[name]), -math.inf))
    rows = []
    for name in order:
        best = order[0]
        beside = [member.score(at[name]) for member in settings[best]]
        low, high = interval([] if name == best else _pairs(settings[name], settings[best], at[name]))
        rows.append(Row(name, scores[name], at[name], mean(scores[name]) - mean(beside), (low, high)))
    return rows


def _last_measured(group: list[Member]) -> int:
    steps = [{s for s, line in m.metrics.items() if m.config.run.best_metric in line} for m in group]
    return max(set.intersection(*steps), default=0)


def _pairs(ours: list[Member], best: list[Member], step: int) -> list[float]:
    """Differences whose mean tells two settings apart: by seed where both have several, else by held-out prompt."""
    theirs = {member.seed: member for member in best}
    shared = [(member, theirs[member.seed]) for member in ours if member.seed in theirs]
    if len(shared) > 1:
        return [a.score(step) - b.score(step) for a, b in shared]
    if not shared:
        return []
    mine, other = shared[0][0].by_prompt(step), shared[0][1].by_prompt(step)
    return [mine[prompt] - other[prompt] for prompt in mine if prompt in other]


def halved(going: list[Member], step: int, *, keep: int, tell: Callable[[str], None]) -> Iterator[str]:
    """The settings that go on from a rung: the best `keep`, and others that cannot be told from the best."""
    for place, row in enumerate(ranking(going, step)):
        unknown = math.isnan(row.ends[1])  # without samples of both: by the score alone
        if place < keep or (not row.is_worse and not unknown):
            yield row.setting
        else:
            tell(f"step {step}: left, {shown(row.difference)} beside the best: {row.setting}")


def render(runs: list[Member]) -> str:
    """A table of the settings, best first."""
    rows = ranking([member for member in runs if member.metrics])
    if not rows:
        return "no run has come to a step"
    metric = runs[0].config.run.best_metric.removeprefix("eval/")
    wide = max(7, *(len(row.setting) for row in rows))
    lines = [f"{'setting':{wide}} {'seeds':>6} {'step':>6} {metric:>12} {'lowest':>8} {'highest':>8}  beside the best"]
    for place, row in enumerate(rows):
        scores = [score for score in row.scores if not math.isnan(score)]
        ends = [shown(min(scores)), shown(max(scores))] if scores else ["-", "-"]
        low, high = row.ends
        beside = "best" if place == 0 else f"{row.difference:+.3f}"
        if not math.isnan(low):
            verdict = "" if row.is_worse else ": not distinguishable"
            beside += f" (95 % interval {low:+.3f} to {high:+.3f}, by {_by(runs, row, rows[0])}){verdict}"
        score = shown(mean(row.scores)) if scores else "-"
        lines.append(
            f"{row.setting:{wide}} {len(row.scores):>6} {row.step:>6} {score:>12} {ends[0]:>8} {ends[1]:>8}  {beside}"
        )
    return "\n".join(lines)


def _by(runs: list[Member], row: Row, best: Row) -> str:
    seeds = [{member.seed for member in runs if member.setting == each.setting} for each in (row, best)]
    return "seed" if len(seeds[0] & seeds[1]) > 1 else "prompt, of one seed"


def to_json(runs: list[Member]) -> list[dict[str, Any]]:
    rows = ranking([member for member in runs if member.metrics])
    return [{**asdict(row), "distinguishable": row.is_worse} for row in rows]
