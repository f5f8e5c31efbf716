"""What is printed of a run: its checkpoints as a list (`tinyrl show RUN`), and the summary when it has ended."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.metrics import BEST, TABLE
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import number, one_line, visible


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
    """Verify every checkpoint of a run against its manifest, oldest first."""
    name, steps, listed = BEST, read_steps(run.metrics, []), list[Listed]()
    for folder in list_checkpoints(run.checkpoints):
        value = steps.get(step := checkpoint_step(folder), {}).get(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        metric = value if isinstance(value, int | float) else None
        listed.append(Listed(folder.name, step, size, metric, problem_with(folder)))
    return listed


def render(run: RunDir, listed: list[Listed]) -> str:
    """Return a table, and what to do with the newest that verifies."""
    path = one_line(shlex.quote(str(run.path)), 4096)
    if not listed:
        return f"{path} has no checkpoint yet"
    metric = BEST.removeprefix("eval/")
    best = max((one.metric for one in listed if one.metric is not None), default=None)
    rows = [f"{'checkpoint':14} {'step':>8} {'size':>10} {metric:>14}  verifies"]
    for one in listed:
        value = "-" if one.metric is None else number(one.metric, decimals=4)
        is_best = one.metric is not None and one.metric == best
        marks = f"no: {visible(one.problem)}" if one.problem else f"yes{', best' * is_best}"
        rows.append(f"{one.name:14} {one.step:>8} {one.size / 1e6:>7.1f} MB {value:>14}  {marks}")
    sound = [one.name for one in listed if one.problem is None]
    if not sound:
        return "\n".join([*rows, "", "none verifies: a resume begins from the start"])
    newest = one_line(shlex.quote(str(run.checkpoints / sound[-1])), 4096)
    return "\n".join([*rows, "", f"resume    tinyrl train --resume {path}", f"evaluate  tinyrl eval {newest}"])


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
                values = ["-" if line[metric.key] is None else number(line[metric.key]) for line in (first, last)]
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
