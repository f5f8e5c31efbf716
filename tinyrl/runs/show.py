"""Print a run: its checkpoints, samples and training prompts (`tinyrl show RUN`), and the summary when it has ended."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.metrics import BEST, TABLE
from tinyrl.runs.records import evenly, json_lines, messages_of, number, read_steps, samples_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import excerpt, listed, one_line, visible
from tinyrl.text import number as shown

Line = dict[str, Any]
MOST_CHARACTERS, MOST_LINES = 20_000, 1000  # of a text; what is in the middle of a longer one is left out
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


def show_checkpoints(run: RunDir, *, as_json: bool = False) -> str:
    """Verify every checkpoint, oldest first; return a table with what to do with the newest sound one, or JSON."""
    steps, found = read_steps(run.metrics, []), list[dict[str, Any]]()
    for folder in list_checkpoints(run.checkpoints):
        metric = number(steps.get(step := checkpoint_step(folder), {}).get(BEST))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        metric, problem = None if math.isnan(metric) else metric, problem_with(folder)
        found.append({"name": folder.name, "step": step, "size": size, "metric": metric, "problem": problem})
    if as_json:
        return json.dumps(found)
    path = _quoted(run.path)
    if not found:
        return f"{path} has no checkpoint yet"
    best = max((one["metric"] for one in found if one["metric"] is not None), default=None)
    rows = [f"{'checkpoint':14} {'step':>8} {'size':>10} {BEST.removeprefix('eval/'):>14}  verifies"]
    for one in found:
        metric = "-" if one["metric"] is None else shown(one["metric"], decimals=4)
        good = "yes, best" if one["metric"] is not None and one["metric"] == best else "yes"
        marks = f"no: {visible(one['problem'])}" if one["problem"] else good
        rows.append(f"{one['name']:14} {one['step']:>8} {one['size'] / 1e6:>7.1f} MB {metric:>14}  {marks}")
    sound = [one["name"] for one in found if one["problem"] is None]
    if not sound:
        return "\n".join([*rows, "", "none verifies: a resume begins from the start"])
    newest = _quoted(run.checkpoints / sound[-1])
    return "\n".join([*rows, "", f"resume    tinyrl train --resume {path}", f"evaluate  tinyrl eval {newest}"])


def _quoted(path: Path) -> str:
    return one_line(shlex.quote(str(path)), 4096)


def summary(run: RunDir, *, prompts: bool = True) -> str:
    """Return held-out metrics before and after, where the files are, and what to type next. `prompts`: whether the rows
    of the run hold prompts that another method can learn on.
    """
    lines = read_steps(run.metrics, []).values()
    evaluated = [line for line in lines if any(key.startswith("eval/") for key in line)]
    text, config = list[str](), run.read_config()
    if len(evaluated) >= 2:
        first, last = evaluated[0], evaluated[-1]
        text.append(f"step {first['step']} -> {last['step']}")
        for metric in TABLE:
            if metric.row and metric.key in first and metric.key in last:
                values = ["-" if line[metric.key] is None else shown(line[metric.key]) for line in (first, last)]
                text.append(f"  {metric.row:26} {' -> '.join(values)}")
    text += ["", f"files    {run.path}/  (report.html, report.png, metrics.jsonl, samples.jsonl)"]
    if newest := list_checkpoints(run.checkpoints):
        text += [f"{'adapter' if config.lora.enabled else 'model':8} {newest[-1]}/"]
    command = next_command(run.path, config, prompts=prompts)
    return "\n".join([*text, f"next     {command}"] if command else text)


def next_command(path: Path, config: Config, *, prompts: bool = True) -> str | None:
    """Return the command that uses what a run has made: judge a policy, or train one with a reward model, on the
    prompts of its rows where they have such. None for a text model, whose next prompts and reward only its owner knows.
    """
    if config.samples:
        return shlex.join(["tinyrl", "eval", str(path), "--vs", "base"])
    if config.trains.policy:
        return None
    task, model = config.task, config.model
    settings = {
        "model.path": "MODEL" if model.random_init else model.path,
        "model.quantization": model.quantization,
        "task.data": task.data if prompts else "PROMPTS",
        "task.eval_data": task.eval_data if prompts else None,
        "task.columns": (prompts and task.columns) or None,
        "task.system_prompt": task.system_prompt,
        "task.chat_template": task.chat_template or None,
        "task.chat": None if task.chat == "auto" else task.chat,
        "reward.model": str(path),
    }
    overrides = [as_override(key, value) for key, value in settings.items() if value is not None]
    return shlex.join(["tinyrl", "train", "ppo", *overrides])


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
    if prompt is not None and step is None:  # held-out ones where there are any: training numbers prompts otherwise
        kinds = [row.get("kind") for rows in by_step.values() for row in rows]
        one = "eval" if "eval" in kinds else kinds[0]
        firsts = {at: row for at, rows in sorted(by_step.items()) for row in rows[::-1] if row.get("kind") == one}
        rows = [*firsts.values()]
        return evenly(rows, num or len(rows)) or rows[-1:]
    rows = by_step[max(by_step) if step is None else step]
    if worst:
        rows = sorted(rows, key=lambda row: (math.isnan(reward := number(row.get("reward"))), reward))
    if unsolved is not None:
        solved = {_prompt(row) for row in rows if number(row.get("reward")) >= unsolved}
        rows = [row for row in rows if _prompt(row) not in solved]
    return rows[:num]


def _prompt(row: Line) -> tuple[str, str]:
    return str(row.get("kind")), str(row.get("prompt_index"))


def render_samples(rows: list[Line], *, grey: Callable[[str], str]) -> str:
    """Return sample after sample: its facts, prompt and turns; `grey` is for what the environment wrote."""
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
            pieces = [cut.head, f"[{cut.omitted:,} characters left out]", cut.tail] if cut.omitted else [cut.head]
            lines = [speaker, "\n".join(f"  {line}" for line in visible("\n".join(pieces)).split("\n"))]
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
    def outcome(self) -> str:
        """Return the key of MEANING that holds."""
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
            tries = "... " if len(record.tries) > MOST_TRIES else ""
            tries += " ".join(f"{solved}/{tried}" for _, tried, solved in record.tries[-MOST_TRIES:])
            text = one_line(texts.get(record.index, ""), PROMPT_CHARACTERS)
            lines.append(f"  prompt {record.index:<6} {tries}  {text}".rstrip())
    return "\n".join(lines)
