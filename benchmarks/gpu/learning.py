"""What bfloat16 and its correction do to learning: the embedded tasks trained in both dtypes, seed by seed.

sort: `tinyrl train grpo`, its held-out pass@1. reviews: `tinyrl train ppo`, the gain of the held-out reward in standard
deviations of the start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.our_training import watched_steps
from tinyrl.cli.commands import app

METHODS = {"sort": "grpo", "reviews": "ppo"}


def outcome(task: str, first: dict[str, Any], last: dict[str, Any]) -> float:
    """By the evaluations before and after training."""
    if task == "sort":
        return last["eval/pass@1"]
    return (last["eval/reward_mean"] - first["eval/reward_mean"]) / first["eval/reward_std"]


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """task: sort or reviews; the device and overrides of the arm."""
    folder, task = Path(settings["folder"]), settings["task"]
    words = [f"run.seed={settings['seed']}", f"model.dtype={settings['dtype']}", *settings["overrides"]]
    where = ["--output-dir", str(folder), "--name", "run", "--overwrite", "--device", settings["device"]]
    with watched_steps():
        code = app(["train", METHODS[task], *words, *where], standalone_mode=False)
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["policy/sampling_gap"] for line in lines if "policy/sampling_gap" in line]
    judged = [line for line in lines if "eval/reward_mean" in line]
    return {"outcome": outcome(task, judged[0], judged[-1]), "gap": sum(gaps) / len(gaps) if gaps else 0.0}
