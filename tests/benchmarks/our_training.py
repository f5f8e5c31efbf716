"""tinyrl's side of a training benchmark: `tinyrl train` in this process, with its steps timed and its memory read.

Phases come from metrics.jsonl. A step lasts from the end of the step before to its own end, as on the peer's side.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

import tinyrl.training.launch
from tests.benchmarks import measuring, our_recipe
from tinyrl.cli.commands import app
from tinyrl.training.session import Session

PHASES = ("rollout", "reference", "values", "update")


def watch_steps() -> measuring.Steps:
    steps, end_step = measuring.Steps(), Session.end_step

    def end(self: Session, **metrics: float) -> None:
        steps.end()
        end_step(self, **metrics)

    Session.end_step = end  # pyright: ignore[reportAttributeAccessIssue]
    return steps


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of the steps: without the evaluation before training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/update" in line]


def main() -> None:
    imports = measuring.resident_mb()
    settings = measuring.job()
    tinyrl.training.launch.write_report = lambda path: []  # drawing needs memory of its own  # pyright: ignore
    steps, run = watch_steps(), Path(settings["folder"]) / "run"
    command = ["train", settings["recipe"]["method"], str(our_recipe.write(settings)), *settings["overrides"]]
    where = ["--output-dir", str(run.parent), "--name", run.name, "--device", "cpu"]
    code = app([*command, *where], standalone_mode=False)
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    lines = lines_of(run)
    measured = lines[1:]  # the first step is warm-up
    measuring.answer(
        settings,
        seconds=steps.seconds,
        phases=[{p: line[f"time/{p}"] for p in PHASES if f"time/{p}" in line} for line in measured],
        tokens=[int(line["completion/tokens"]) for line in measured],
        memory={key: value for key, value in lines[-1].items() if key.startswith("memory/")},
        rewards=[line["reward/mean"] for line in lines],
        adapter=str(max((run / "checkpoints").iterdir())),
        imports_mb=imports,
        peak_mb=measuring.peak_mb(),
    )


if __name__ == "__main__":
    main()
