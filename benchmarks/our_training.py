"""tinyrl's side of a training benchmark: `tinyrl train` in this process, with its steps timed and its memory read.

Phases come from metrics.jsonl. A step lasts from the end of the step before to its own end, as on the peer's side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

from benchmarks import measuring, our_recipe
from tinyrl.cli.commands import app
from tinyrl.training.launch import Launch
from tinyrl.training.session import Session

PHASES = ("rollout", "reference", "values", "teacher", "update")


@contextmanager
def watched_steps() -> Iterator[measuring.Steps]:
    """Each step's end is noted, and no report is drawn: drawing needs memory of its own."""
    steps, end_step, go = measuring.Steps(), Session.end_step, Launch.go

    def end(self: Session, **metrics: float) -> None:
        steps.end()
        end_step(self, **metrics)

    def silent(self: Launch, *, report: Callable[[Path], object], until: int | None = None) -> int:
        return go(self, report=lambda _: None, until=until)

    Session.end_step, Launch.go = end, silent
    try:
        yield steps
    finally:
        Session.end_step, Launch.go = end_step, go


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of the steps: without the evaluation before training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/update" in line]


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """A run of settings["recipe"] on settings["device"] (the CPU): what each step after the first took."""
    imports, run = measuring.resident_mb(), Path(settings["folder"]) / "run"
    command = ["train", settings["recipe"]["method"], str(our_recipe.write(settings)), *settings["overrides"]]
    where = ["--output-dir", str(run.parent), "--name", run.name, "--device", settings.get("device", "cpu")]
    with watched_steps() as steps:
        code = app([*command, *where], standalone_mode=False)
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    lines = lines_of(run)
    measured = lines[1:]  # the first step is warm-up
    return {
        "seconds": steps.seconds,
        "cpu": steps.cpu,
        "phases": [{p: line[f"time/{p}"] for p in PHASES if f"time/{p}" in line} for line in measured],
        "tokens": [int(line.get("completion/tokens", 0)) for line in measured],
        "memory": {key: value for key, value in lines[-1].items() if key.startswith("memory/")},
        "rewards": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "held_out": {key.removeprefix("eval/"): value for key, value in lines[-1].items() if key.startswith("eval/")},
        "adapter": str(max((run / "checkpoints").iterdir())),
        "imports_mb": imports,
        "peak_mb": measuring.peak_mb(),
        "lines": lines,
    }


def main() -> None:
    settings = measuring.job()
    result = measure(settings)
    del result["lines"]
    measuring.answer(settings, **result)


if __name__ == "__main__":
    main()
