"""The summary that is printed when a run has ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import as_override
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.records import read_steps, reliability_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import number


def summary(run: RunDir, *, prompts: bool = True) -> str:
    """Before and after on held-out prompts, where the files are, and what to type next. `prompts`: whether the rows
    of the run hold prompts that another method can learn on.
    """
    lines = list(read_steps(run.metrics, []).values())
    evaluated = [line for line in lines if any(key.startswith("eval/") for key in line)]
    text = []
    if len(evaluated) >= 2:
        first, last = evaluated[0], evaluated[-1]
        rows = [
            ("held-out reward, mean", "eval/reward_mean"),
            ("held-out reward, median", "eval/reward_median"),
            ("pass@1, sampled", "eval/pass@1"),
            ("pass@1, greedy", "eval/greedy/pass@1"),
            ("KL to the reference, nats", "eval/kl"),
            ("loss, held-out", "eval/loss"),
            ("perplexity, held-out", "eval/perplexity"),
            ("accuracy, held-out", "eval/accuracy"),
            ("calibration error, held-out", "eval/ece"),
        ]
        shown = [(label, first[key], last[key]) for label, key in rows if key in first and key in last]
        text += [
            f"{'step ' + str(first['step']) + ' -> ' + str(last['step']):28}",
            *(f"  {label:26} {_number(a)} -> {_number(b)}" for label, a, b in shown),
            *_reliability(last),
        ]
    newest = list_checkpoints(run.checkpoints)
    text += ["", f"files    {run.path}/  (report.html, report.png, metrics.jsonl, samples.jsonl)"]
    config = run.read_config()
    if newest:
        text += [f"{'adapter' if config.lora.enabled else 'model':8} {newest[-1]}/"]
    command = next_command(run.path, config, prompts=prompts)
    return "\n".join([*text, f"next     {command}"] if command else text)


def _reliability(line: dict[str, Any]) -> list[str]:
    """What a reward model predicted for held-out rows and what turned out, by tenths of the rows."""
    bins = reliability_of(line)
    said = {
        "predicted": [number(predicted, decimals=2) for predicted, _, _ in bins],
        "turned out": [number(observed, decimals=2) for _, observed, _ in bins],
        "rows": [f"{rows:,}" for *_, rows in bins],
    }
    width = max((len(value) for values in said.values() for value in values), default=0)
    lines = [f"    {name:11}" + "".join(f" {value:>{width}}" for value in values) for name, values in said.items()]
    return ["  by tenths, held-out", *lines] if bins else []


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
        "task.split_seed": (prompts and where.split_seed) or None,
        "task.system_prompt": where.system_prompt,
        "task.chat_template": where.chat_template or None,
        "task.chat": None if where.chat == "auto" else where.chat,
        "reward.model": str(path),
    }
    overrides = [as_override(key, value) for key, value in settings.items() if value is not None]
    return shlex.join(["tinyrl", "train", "ppo", *overrides])


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)
