"""What is printed of a run: its checkpoints as a list (`tinyrl show RUN`), and the summary when it has ended."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.metrics import BEST, METRICS
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import number, one_line, visible

MOST_PATH = 4096  # characters that are shown


@dataclass(frozen=True)
class Listed:
    """One checkpoint: its step, bytes on disk, its held-out reward (None: not evaluated there), and what
    is wrong with it (None: it verifies).
    """

    name: str
    step: int
    size: int
    metric: float | None
    problem: str | None


def list_verified(run: RunDir) -> list[Listed]:
    """Every checkpoint of a run, oldest first, each verified against its manifest."""
    name, steps, listed = BEST, read_steps(run.metrics, []), list[Listed]()
    for folder in list_checkpoints(run.checkpoints):
        step = checkpoint_step(folder)
        value = steps.get(step, {}).get(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        metric = value if isinstance(value, int | float) else None
        listed.append(Listed(folder.name, step, size, metric, problem_with(folder)))
    return listed


def render(run: RunDir, listed: list[Listed]) -> str:
    """A table, and what to do with the newest that verifies. Everything in it may be shown."""
    path = one_line(shlex.quote(str(run.path)), MOST_PATH)
    if not listed:
        return f"{path} has no checkpoint yet"
    metric = BEST.removeprefix("eval/")
    sound = [one for one in listed if one.problem is None]
    known = [one.metric for one in listed if one.metric is not None]
    rows = [f"{'checkpoint':14} {'step':>8} {'size':>10} {metric:>14}  verifies"]
    for one in listed:
        value = "-" if one.metric is None else number(one.metric, decimals=4)
        marks = "yes" if one.problem is None else f"no: {visible(one.problem)}"
        marks += ", best" if one.problem is None and known and one.metric == max(known) else ""
        rows.append(f"{one.name:14} {one.step:>8} {one.size / 1e6:>7.1f} MB {value:>14}  {marks}")
    if not sound:
        return "\n".join([*rows, "", "none verifies: a resume begins from the start"])
    newest = one_line(shlex.quote(str(run.checkpoints / sound[-1].name)), MOST_PATH)
    return "\n".join([*rows, "", f"resume    tinyrl train --resume {path}", f"evaluate  tinyrl eval {newest}"])


def summary(run: RunDir, *, prompts: bool = True) -> str:
    """Before and after on held-out prompts, where the files are, and what to type next. `prompts`: whether the rows
    of the run hold prompts that another method can learn on.
    """
    lines = read_steps(run.metrics, []).values()
    evaluated = [line for line in lines if any(key.startswith("eval/") for key in line)]
    text = []
    if len(evaluated) >= 2:
        first, last = evaluated[0], evaluated[-1]
        text.append(f"{'step ' + str(first['step']) + ' -> ' + str(last['step']):28}")
        for key, metric in METRICS.items():
            if metric.row and key in first and key in last:
                before, after = ("-" if line[key] is None else number(line[key]) for line in (first, last))
                text.append(f"  {metric.row:26} {before} -> {after}")
    newest = list_checkpoints(run.checkpoints)
    text += ["", f"files    {run.path}/  (report.html, report.png, metrics.jsonl, samples.jsonl)"]
    config = run.read_config()
    if newest:
        text += [f"{'adapter' if config.lora.enabled else 'model':8} {newest[-1]}/"]
    command = next_command(run.path, config, prompts=prompts)
    return "\n".join([*text, f"next     {command}"] if command else text)


def next_command(path: Path, config: Config, *, prompts: bool = True) -> str | None:
    """The command that uses what a run has made: judge a policy, or train one with a reward model, on the prompts of
    its rows where they have such. None for a text model, whose next prompts and reward only its owner knows.
    """
    if config.samples:
        return shlex.join(["tinyrl", "eval", str(path), "--vs", "base"])
    if config.trains.policy:
        return None
    where, model = config.task, config.model
    settings = {
        "model.path": "MODEL" if model.random_init else model.path,
        "model.quantization": model.quantization,
        "task.data": where.data if prompts else "PROMPTS",
        "task.eval_data": where.eval_data if prompts else None,
        "task.columns": (prompts and where.columns) or None,
        "task.system_prompt": where.system_prompt,
        "task.chat_template": where.chat_template or None,
        "task.chat": None if where.chat == "auto" else where.chat,
        "reward.model": str(path),
    }
    overrides = [as_override(key, value) for key, value in settings.items() if value is not None]
    return shlex.join(["tinyrl", "train", "ppo", *overrides])
