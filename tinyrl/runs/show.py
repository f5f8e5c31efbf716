"""Print a run: its checkpoints, samples and training prompts (`tinyrl show RUN`), and the summary when it has ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.config.schema import Config
from tinyrl.formatting import format_bytes, format_number, format_short
from tinyrl.runs.best import REWARD, Score, best_first, ended_early, missed_score, score_of
from tinyrl.runs.checkpoint import checkpoint_name, checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.metrics import TABLE
from tinyrl.runs.places import AT_BEST
from tinyrl.runs.provenance import ImageTokens
from tinyrl.runs.records import (
    Origin,
    json_lines,
    origin_of,
    read_steps,
    reward_change_note,
    samples_of,
    since_start,
    subsample,
    to_float,
    turns_of,
)
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import escape_control, join_truncated, one_line

Line = dict[str, Any]
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"  # of a terminal
MOST_TRIES = 8  # shown of a prompt
PROMPT_CHARACTERS = 60
MEANING = {
    "never": "never solved: every completion was wrong",
    "forgotten": "forgotten: solved once, and not at the last try",
    "sometimes": "in between",
    "always": "always solved: every completion was right",
}
HARD = ("never", "forgotten")


# ---- checkpoints and the end of a run ----


def checkpoint_lines(run: RunDir, notes: list[str], *, step: int | None = None) -> list[Line]:
    """Verify the checkpoints of a run (step: only that one) and return a line of facts for each, oldest first. Lines of
    metrics.jsonl that cannot be read are counted in `notes`.
    """
    steps = read_steps(run.metrics, notes)
    found = list[Line]()
    for folder in list_checkpoints(run.checkpoints):
        at = checkpoint_step(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        score = score_of(steps.get(at, {}), step=at)
        metric = None if score is None else score.value
        found.append({"name": folder.name, "step": at, "size": size, "problem": problem_with(folder)})
        found[-1] |= {"metric": metric, "best": False}
    best = _best_sound(run, found)
    for one in found:
        one["best"] = best is not None and one["step"] == best.step
    return [one for one in found if step in (None, one["step"])]


def _best_sound(run: RunDir, lines: list[Line]) -> Score | None:
    """Return the best score among the checkpoints that verify; None where there is none."""
    sound = {one["name"] for one in lines if one["problem"] is None}
    scored = [one for one in best_first(run) if one.folder is not None and one.folder.name in sound]
    return scored[0].score if scored else None


def render_checkpoints(run: RunDir, notes: list[str], *, step: int | None = None) -> str:
    """Return the checkpoints as a table, with the best one, and why the run ended early, if it did; step, notes: as
    `checkpoint_lines` has them.
    """
    found = checkpoint_lines(run, notes, step=step)
    if not found:
        return f"{one_line(str(run.path), 4096)} has no checkpoint yet"
    scored = best_first(run)
    metric_name = scored[0].score.metric if scored else REWARD
    lines = [f"{'checkpoint':14} {'step':>8} {'size':>10} {metric_name.removeprefix('eval/'):>14}  verifies"]
    for one in found:
        metric = format_number(one["metric"], decimals=4)
        verifies = "yes, best" if one["best"] else "yes"
        if one["problem"]:
            verifies = f"no: {escape_control(one['problem'])}"
        lines.append(f"{one['name']:14} {one['step']:>8} {format_bytes(one['size']):>10} {metric:>14}  {verifies}")
    if step is not None:
        return "\n".join(lines)
    if best := _best_sound(run, found):
        lines += ["", f"{_best_place(run)} is that of step {best.step}: {best}"]
    if early := ended_early(run, read_steps(run.metrics, [])):
        lines.append(f"{early}\nto go on: {go_on_without_patience(run)}")
    return "\n".join(lines)


def image_lines(environment: dict[str, Any]) -> list[str]:
    """Return a line about the images of a run and the packages that read them, by its env.json; [] where its model
    reads none, and of a run of an earlier commit.
    """
    tokens = ImageTokens.read(environment.get("images"))
    if tokens is None:
        return []
    found = environment.get("versions")
    versions = found if isinstance(found, dict) else {}
    packages = [f"{name} {versions[name]}" if name in versions else f"no {name}" for name in ("pillow", "torchvision")]
    needed = "" if "torchvision" in versions else ", which few models' images need"
    return [escape_control(f"images: {tokens.words} (model.with_images=true; {', '.join(packages)}{needed})")]


def _best_place(run: RunDir) -> str:
    """Return how commands name the best checkpoint of a run."""
    return one_line(f"{run.path}@{AT_BEST}", 4096)


def go_on_without_patience(run: RunDir) -> str:
    """Return the command that goes on with a run that ended early."""
    return shlex.join(["tinyrl", "train", "--resume", str(run.path), "run.patience=null"])


def _next_command(run: RunDir, config: Config, evaluations: list[Line], origin: Origin | None) -> list[str]:
    """Return what to type when a run has ended: compare it with its base (a fork: with the checkpoint that it began
    with, while it has that), talk to it, or train with it as the reward.
    """
    path = str(run.path)
    if config.samples:
        lacks_reward = [REWARD in line and math.isnan(to_float(line[REWARD])) for line in evaluations]
        if lacks_reward and all(lacks_reward):  # there is nothing to compare by
            return ["tinyrl", "show", path, "--samples"]
        has_start = origin is not None and (run.checkpoints / checkpoint_name(origin.step)).is_dir()
        return ["tinyrl", "eval", path, "--vs", f"{path}@{origin.step}" if origin is not None and has_start else "base"]
    if config.trains.policy:
        return ["tinyrl", "chat", path]
    base = "MODEL" if config.model.random_init else config.model.path
    return ["tinyrl", "train", "ppo", f"model.path={base}", "task.data=PROMPTS", f"reward.model={path}"]


def summary(run: RunDir) -> str:
    """Return held-out metrics before and after, the files, and the next command."""
    config = run.read_config()
    text = list[str]()
    steps = read_steps(run.metrics, [])
    if early := ended_early(run, steps):
        text += [early, f"to go on: {go_on_without_patience(run)}", ""]
    environment = run.read_environment()
    origin = origin_of(environment)
    evaluated_at = [step for step, line in steps.items() if any(key.startswith("eval/") for key in line)]
    lines = [steps[step] for step in since_start(evaluated_at, environment)]
    if len(lines) >= 2:
        forked = "" if origin is None else one_line(f", forked from {origin}", 4096)
        text.append(f"step {lines[0]['step']} -> {lines[-1]['step']}{forked}")
        for metric in TABLE:
            first = to_float(lines[0].get(metric.key))
            last = to_float(lines[-1].get(metric.key))
            if metric.row and not (math.isnan(first) and math.isnan(last)):
                text.append(f"  {metric.row:26} {format_number(first)} -> {format_number(last)}")
        if note := reward_change_note(environment):
            text.append(note)
    there = [
        name for name in ("report.html", "report.png", "metrics.jsonl", "samples.jsonl") if (run.path / name).exists()
    ]
    text += ["", f"files    {run.path}/  ({', '.join(there)})"]
    if newest := list_checkpoints(run.checkpoints)[-1:]:
        text.append(f"{'adapter' if config.lora.enabled else 'model':8} {newest[0]}/")
    evaluated = best_first(run)
    if kept := [one for one in evaluated if one.folder is not None]:
        missed = missed_score(evaluated)
        note = "" if missed is None else f"; step {missed.step} had {format_number(missed.value)}, and no checkpoint"
        text.append(f"best     {_best_place(run)}  (step {kept[0].score.step}: {kept[0].score}{note})")
    text.append(f"next     {shlex.join(_next_command(run, config, lines, origin))}")
    return "\n".join(text)


# ---- samples ----


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

    worst: lowest rewards first; unsolved: only of prompts without a sample at that step of at least this score (the
    reward before length penalties). Raises ValueError where there is none, with the steps that there are.
    """
    by_step: dict[int, list[Line]] = {}
    for row in samples_of(path, notes, kind=kind):
        if prompt in (None, row.get("prompt_index")):
            by_step.setdefault(row["step"], []).append(row)
    if not path.is_file():
        raise ValueError(f"{path}: no completion was recorded yet; runs of grpo, ppo and distill keep it")
    if not by_step or step not in (None, *by_step):
        there = f"some of step {join_truncated(map(str, sorted(by_step)))}" if by_step else "none"
        raise ValueError(f"{path}: no such samples; there are {there}")
    if prompt is not None and step is None:  # held-out ones where there are any: training numbers prompts otherwise
        kinds = [row.get("kind") for rows in by_step.values() for row in rows]
        one = "eval" if "eval" in kinds else kinds[0]
        firsts = {at: row for at, rows in sorted(by_step.items()) for row in rows[::-1] if row.get("kind") == one}
        rows = [*firsts.values()]
        return subsample(rows, num or len(rows)) or rows[-1:]
    rows = by_step[max(by_step) if step is None else step]
    if worst:
        rows = sorted(rows, key=lambda row: (math.isnan(reward := to_float(row.get("reward"))), reward))
    if unsolved is not None:
        places = [(str(row.get("kind")), str(row.get("prompt_index"))) for row in rows]
        scores = [to_float(row.get("score", row.get("reward"))) for row in rows]
        solved = {place for place, score in zip(places, scores, strict=True) if score >= unsolved}
        rows = [row for place, row in zip(places, rows, strict=True) if place not in solved]
    return rows[:num]


def render_samples(rows: list[Line]) -> str:
    """Return sample after sample: facts, prompt and turns, those that the policy has not written dimmed."""
    blocks = []
    for row in rows:
        rewards = row.get("rewards") or {}
        each = ""
        if len(rewards) > 1:
            each = ", ".join(f"{name} {format_short(to_float(score))}" for name, score in rewards.items())
        facts = [
            f"step {row['step']}",
            str(row.get("kind", "")),
            f"prompt {_index(row.get('prompt_index'))}, sample {_index(row.get('sample'))}",
            f"reward {format_short(to_float(row.get('reward')))}{f' ({each})' if each else ''}",
            *([f"advantage {format_short(to_float(row['advantage']))}"] if row.get("advantage") is not None else []),
            f"ended: {row.get('finish_reason', '')}",
        ]
        parts = [escape_control(" | ".join(facts)).replace("\n", " ")]
        parts.append(_indented("prompt", str(row.get("prompt", ""))))
        images = row.get("images")
        if images and isinstance(images, list):
            parts.append(_indented("images", "\n".join(map(_image_line, images))))
        conversation = 0
        for turn in turns_of(row):
            if turn.conversation not in (0, conversation):
                conversation = turn.conversation
                parts.append(f"conversation {conversation}")
            numbers = {"reward": turn.reward, "advantage": turn.advantage}
            credit = [f"{name} {format_short(number)}" for name, number in numbers.items() if number is not None]
            part = _indented(turn.speaker, turn.text, credit)
            parts.append(part if turn.speaker == "policy" else f"{DIM}{part}{PLAIN}")
        blocks.append("\n".join(parts))
    return "\n\n".join(blocks)


def _indented(speaker: str, text: str, facts: Sequence[str] = ()) -> str:
    """Return a text below its speaker and facts about it, for a terminal."""
    lines = escape_control(text or "(nothing)").split("\n")
    return "\n".join([" | ".join([one_line(speaker, 40), *facts]), *(f"  {line}" for line in lines)])


def _image_line(entry: Any) -> str:
    """Return the file of an image and its size in pixels."""
    if not isinstance(entry, dict) or not isinstance(entry.get("size"), list):  # of a damaged record
        return str(entry)
    return f"{entry.get('path')} ({' x '.join(map(str, entry['size']))})"


def _index(value: Any) -> str:
    return str(value) if isinstance(value, int) else "-"


# ---- training prompts ----


@dataclass
class PromptRecord:
    """A training prompt: number and key of its row, and its tries: (step, completions with a reward, solved ones)."""

    index: int
    key: str
    tries: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(tried for _, tried, _ in self.tries)

    @property
    def outcome(self) -> str:
        """Return the key of MEANING that holds."""
        solved = sum(solved for _, _, solved in self.tries)
        if solved in (0, self.tried):
            return "always" if solved else "never"
        return "sometimes" if self.tries[-1][2] else "forgotten"


def read_prompt_stats(path: Path, notes: list[str], *, until: int | None = None) -> list[PromptRecord]:
    """Read the prompts of prompts.jsonl that had a completion with a reward, by number; until: the last step that
    counts. Raises ValueError if there is none.
    """
    found: dict[str, PromptRecord] = {}
    for line in json_lines(path, notes):
        if until is not None and line["step"] > until:
            continue
        for index, key, tried, solved in line.get("prompts", ()):
            if tried:
                record = found.setdefault(key, PromptRecord(index, key))
                record.index = index
                record.tries.append((line["step"], tried, solved))
    if not found:
        raise ValueError(f"{path}: no prompt was tried yet; runs of grpo and ppo keep this record")
    return sorted(found.values(), key=lambda record: record.index)


def render_prompt_stats(prompt_stats: list[PromptRecord], texts: dict[int, str], *, num: int) -> str:
    """Count the prompts by outcome; list the `num` hard ones of each kind that were tried most, with their tries."""
    steps = [step for record in prompt_stats for step, _, _ in record.tries]
    of = {kind: [record for record in prompt_stats if record.outcome == kind] for kind in MEANING}
    lines = [
        f"training prompts tried: {len(prompt_stats):,}, in steps {min(steps):,} to {max(steps):,}",
        "right, or solved: a completion whose reward is task.solved_reward or more",
        *(f"{len(of[kind]):7,}  {meaning}" for kind, meaning in MEANING.items()),
    ]
    for kind in filter(of.get, HARD):
        more = f" ({num} of {len(of[kind]):,})" if len(of[kind]) > num else ""
        lines += ["", f"{MEANING[kind].partition(':')[0]}{more}"]
        for record in sorted(of[kind], key=lambda record: (-record.tried, record.index))[:num]:
            tries = "... " if len(record.tries) > MOST_TRIES else ""
            tries += " ".join(f"{solved}/{tried}" for _, tried, solved in record.tries[-MOST_TRIES:])
            text = one_line(texts.get(record.index, ""), PROMPT_CHARACTERS)
            lines.append(f"  prompt {record.index:<6} {tries}  {text}".rstrip())
    return "\n".join(lines)
