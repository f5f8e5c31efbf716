"""Experiment trackers (tensorboard, trackio, wandb, mlflow, ...) through accelerate's classes.

metrics.jsonl is the record; a tracker can never stop a run. The project is `tinyrl`, or that of the tracker's own
environment variable. accelerate is imported when a tracker starts, so that names are checked before torch is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinyrl.text import did_you_mean

COLUMNS = ("step", "prompt", "completion", "reward", "finish_reason")  # of a table of completions
TABLE_ROWS = 16
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab")
PROJECTS = {"wandb": "WANDB_PROJECT", "trackio": "TRACKIO_PROJECT", "comet_ml": "COMET_PROJECT_NAME"}


def _arguments(name: str, run: Path, next_step: int) -> dict[str, Any]:
    """Return the arguments of accelerate's class of a tracker. next_step: the first one logged; 0 in a new run."""
    project = os.environ.get(PROJECTS.get(name, ""), "tinyrl")  # accelerate reads those of mlflow and clearml
    if name == "tensorboard":
        purge = {"purge_step": next_step} if next_step else {}  # else steps after the checkpoint would be there twice
        return {"run_name": name, "logging_dir": str(run), **purge}
    if name == "trackio":
        return {"run_name": project, "name": run.name, "resume": "allow" if next_step else "never"}
    if name == "wandb":  # a resume goes on in the same run; the screen is not copied, since a bar is drawn on it
        file = run / "wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(8), encoding="utf-8")
        where = {} if "WANDB_DIR" in os.environ else {"dir": str(run)}
        one = {"id": file.read_text("utf-8").strip(), "resume": "allow", "name": run.name}
        return {"run_name": project, **one, **where, "settings": {"console": "off"}}
    return {"experiment_name": project, "run_name": run.name} if name == "mlflow" else {"run_name": project}


class Trackers:
    """The trackers of `run.trackers`; one that raises is reported once and switched off."""

    def __init__(self, names: list[str], run: Path, *, config: dict[str, Any], note: Callable[[str], None]) -> None:
        self._names, self._run, self._config, self._note = names, run, config, note
        self._live: dict[str, Any] = {}

    def _each(self, names: Sequence[str], act: Callable[[str], object]) -> None:
        for name in names:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # standard output is for a run's result
                    act(name)
            except Exception as error:  # noqa: BLE001  other people's network code: the run goes on
                self._live.pop(name, None)
                what = f"{type(error).__name__}: {str(error)[:200]}"
                self._note(f"warning: tracker {name} failed and is switched off: {what}")

    def start(self, next_step: int) -> None:
        """Open the trackers, before the line of `next_step` is logged."""

        def open_one(name: str) -> None:
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            tracker: Any = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, self._run, next_step))
            if hasattr(tracker, "start"):
                tracker.start()
            if name == "wandb":
                tracker.tracker.define_metric("*", step_metric="step")
            tracker.store_init_configuration(flat(self._config))
            self._live[name] = tracker

        self._each(self._names, open_one)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        self._each([*self._live], lambda name: self._log(name, numbers, step))

    def log_completions(self, lines: Sequence[dict[str, Any]], step: int) -> None:
        """Log a table of held-out completions (lines of samples.jsonl) in trackers that have tables."""
        held_out = [line | {"step": step} for line in lines if line["kind"] == "eval"]
        rows = [[line[column] for column in COLUMNS] for line in held_out[:TABLE_ROWS]]

        def log_table(name: str) -> None:
            table = importlib.import_module(name).Table(columns=[*COLUMNS], data=rows)
            self._log(name, {"completions": table}, step)

        self._each([name for name in ("trackio", "wandb") if rows and name in self._live], log_table)

    def _log(self, name: str, values: dict[str, Any], step: int) -> None:
        if name == "wandb":  # its own steps never go back, and a resume goes back to that of a checkpoint
            self._live[name].log(values | {"step": step}, step=None)
            return
        if name == "mlflow":  # refuses names such as pass@1
            values = {re.sub(r"[^/\w.\- ]", "_", key): value for key, value in values.items()}
        self._live[name].log(values, step=step)

    def close(self) -> None:
        """Have every tracker write what it holds."""
        self._each([*self._live], lambda name: self._live[name].finish())
        self._live.clear()


def flat(config: dict[str, Any], *, within: str = "") -> dict[str, bool | int | float | str]:
    """Flatten a nested configuration to section.key: value, with plain values only; deeper ones and lists are JSON."""
    out: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{within}{key}"
        if isinstance(value, dict) and value and within.count(".") < 6:
            out |= flat(value, within=f"{name}.")
        else:
            out[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return out


def check_trackers(names: list[str]) -> None:
    """Raise ValueError for an unknown tracker, or one that is not installed."""
    for name in names:
        if name not in TRACKERS:
            known = f"Known: {', '.join(TRACKERS)}"
            raise ValueError(f"run.trackers: there is no tracker {name!r}.{did_you_mean(name, [*TRACKERS])} {known}")
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ValueError(f"run.trackers: {name} is not installed: pip install {packages[0]}")
