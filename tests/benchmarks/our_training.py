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
from tests.benchmarks import measuring
from tests.benchmarks.fixed_work import read_words_beside_qwen2
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
    """metrics.jsonl of the measured steps: without the evaluation before training and the first step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/update" in line][1:]


def main() -> None:
    imports = measuring.resident_mb()
    settings = measuring.job()
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    read_words_beside_qwen2()
    tinyrl.training.launch.write_report = lambda path: []  # drawing needs memory of its own  # pyright: ignore
    (folder / "recipe.yaml").write_text(json.dumps(settings["recipe"]))
    steps = watch_steps()
    command = ["train", settings["recipe"]["method"], str(folder / "recipe.yaml"), *settings["overrides"]]
    code = app([*command, "--output-dir", str(folder), "--name", "run", "--device", "cpu"], standalone_mode=False)
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    lines = lines_of(folder / "run")
    measuring.answer(
        settings,
        seconds=steps.seconds,
        phases=[{p: line[f"time/{p}"] for p in PHASES if f"time/{p}" in line} for line in lines],
        tokens=[int(line["completion/tokens"]) for line in lines],
        memory={key: value for key, value in lines[-1].items() if key.startswith("memory/")},
        imports_mb=imports,
        peak_mb=measuring.peak_mb(),
    )


if __name__ == "__main__":
    main()
