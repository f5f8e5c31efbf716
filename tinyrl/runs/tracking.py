"""Experiment trackers (tensorboard, trackio, wandb, mlflow, ...) through accelerate.

metrics.jsonl is the record; a tracker can never stop a run. The project is `tinyrl`, or what the tracker's own
environment variable says; the run has its folder's name. accelerate is imported when a tracker starts, so that names
are checked before torch is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.text import did_you_mean

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "tinyrl"
WANDB_ID = "wandb_id"  # file in the run's folder: a resume goes on with the same run there
TABLE_ROWS = 16
TABLE_COLUMNS = ("step", "prompt", "completion", "reward", "finish_reason")
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab")
WITH_TABLES = ("trackio", "wandb")


def _arguments(name: str, run: Path, next_step: int) -> dict[str, Any]:
    """What accelerate's class of a tracker is made with. next_step: the first step it will be told; above 0 when a run
    is resumed. In mlflow and clearml the variable for the project is read by accelerate.
    """
    if name == "wandb":  # files in the run's folder, unless told; the screen is not copied, since a bar is drawn on it
        file = run / WANDB_ID
        if not file.exists():
            file.write_text(secrets.token_hex(8), encoding="utf-8")
        where = {} if "WANDB_DIR" in os.environ else {"dir": str(run)}
        one = {"id": file.read_text("utf-8").strip(), "resume": "allow", "name": run.name}
        return {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), **one, **where, "settings": {"console": "off"}}
    project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if next_step else "never"
    purge = {"purge_step": next_step} if next_step else {}  # else what came after the checkpoint would be there twice
    return {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(run), **purge},
        "trackio": {"run_name": project, "name": run.name, "resume": resume},
        "mlflow": {"experiment_name": PROJECT, "run_name": run.name},
        "comet_ml": {"run_name": os.environ.get("COMET_PROJECT_NAME", PROJECT)},
        "aim": {"run_name": run.name, "logging_dir": ".", "experiment": PROJECT},
        "clearml": {"run_name": PROJECT, "task_name": run.name},
        "dvclive": {"dir": str(run / "dvclive")},
        "swanlab": {"run_name": PROJECT, "experiment_name": run.name},
    }[name]


def _log(name: str, tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
    if name == "wandb":  # its own steps never go back, and a resume goes back to that of a checkpoint
        tracker.log(values | {"step": step}, step=None)
        return
    if name == "mlflow":  # refuses names such as pass@1
        values = {re.sub(r"[^/\w.\- ]", "_", key): value for key, value in values.items()}
    tracker.log(values, step=step)


class Trackers:
    """The trackers of `run.trackers`; one that raises is named once and switched off."""

    def __init__(self, names: list[str], run: Path, *, config: dict[str, Any], note: Callable[[str], None]) -> None:
        self._names, self._run, self._config, self._note = names, run, config, note
        self._live: dict[str, GeneralTracker] = {}

    def start(self, next_step: int) -> None:
        """Open the trackers, before the line of `next_step` is logged."""
        for name in self._names:
            self._guarded(name, self._start, name, next_step)

    def _start(self, name: str, next_step: int) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, self._run, next_step))
        if hasattr(tracker, "start"):
            tracker.start()  # pyright: ignore[reportAttributeAccessIssue]
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric="step")
        tracker.store_init_configuration(flat(self._config))
        self._live[name] = tracker

    def log(self, metrics: dict[str, Any], step: int) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        for name in [*self._live]:
            self._guarded(name, _log, name, self._live[name], numbers, step)

    def log_completions(self, lines: Sequence[dict[str, Any]], step: int) -> None:
        """A table of held-out completions (lines of samples.jsonl), in trackers that have tables."""
        held_out = [line | {"step": step} for line in lines if line["kind"] == "eval"]
        rows = [[line[column] for column in TABLE_COLUMNS] for line in held_out[:TABLE_ROWS]]
        for name in [name for name in self._live if rows and name in WITH_TABLES]:
            self._guarded(name, self._log_table, name, rows, step)

    def _log_table(self, name: str, rows: list[list[Any]], step: int) -> None:
        table = importlib.import_module(name).Table(columns=[*TABLE_COLUMNS], data=rows)
        _log(name, self._live[name], {"completions": table}, step)

    def close(self) -> None:
        """Have every tracker write what it holds."""
        for name in [*self._live]:
            self._guarded(name, self._live[name].finish)
        self._live.clear()

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # trackers talk; standard output is for a run's result
                call(*arguments)
        except Exception as error:  # noqa: BLE001  other people's network code: whatever it raises, the run goes on without it
            self._live.pop(name, None)
            what = f"{type(error).__name__}: {str(error)[:200]}"
            self._note(f"warning: tracker {name} failed and is switched off: {what}")


def flat(config: dict[str, Any], *, within: str = "") -> dict[str, bool | int | float | str]:
    """A nested configuration as section.key: value, with plain values only; what is too deep, and a list, is JSON."""
    out: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{within}{key}"
        if isinstance(value, dict) and value and within.count(".") < 6:
            out |= flat(value, within=f"{name}.")
        else:
            out[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return out


def check_trackers(names: list[str]) -> None:
    """Raises ValueError for a tracker there is not, or that is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"run.trackers: there is no tracker {name!r}.{did_you_mean(name, [*TRACKERS])} "
                f"Known: {', '.join(TRACKERS)}"
            )
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ValueError(f"run.trackers: {name} is not installed: pip install {packages[0]}")
