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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.text import did_you_mean

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "tinyrl"
WANDB_ID = "wandb_id"  # file in the run's folder: a resume goes on with the same run there
TABLE_ROWS = 16
TABLE_COLUMNS = ("step", "prompt", "completion", "reward", "finish_reason")


@dataclass(frozen=True)
class Beginning:
    """What a tracker is started with. next_step: the first step it will be told; above 0 when a run is resumed."""

    run: Path
    next_step: int

    @property
    def resumed(self) -> bool:
        return self.next_step > 0


def _log_with_step(tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
    tracker.log(values, step=step)


@dataclass(frozen=True)
class Kind:
    """A tracker accelerate knows. packages: one of them must be installed; arguments: of its class there; begin: what
    it needs once it runs; table: makes one of columns and rows, where it has tables.
    """

    packages: tuple[str, ...]
    arguments: Callable[[Beginning], dict[str, Any]]
    begin: Callable[[Any], None] = lambda tracker: None
    log: Callable[[GeneralTracker, dict[str, Any], int], None] = _log_with_step
    table: Callable[[list[str], list[list[Any]]], Any] | None = None


def _tensorboard(start: Beginning) -> dict[str, Any]:
    """purge_step: what was written after the checkpoint is taken back, so that no step is there twice."""
    purge = {"purge_step": start.next_step} if start.resumed else {}
    return {"run_name": "tensorboard", "logging_dir": str(start.run), **purge}


def _wandb(start: Beginning) -> dict[str, Any]:
    """Files in the run's folder, unless WANDB_DIR says where; the screen is not copied, since a bar is drawn on it."""
    file = start.run / WANDB_ID
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    where = {} if "WANDB_DIR" in os.environ else {"dir": str(start.run)}
    one = {"id": file.read_text("utf-8").strip(), "resume": "allow", "name": start.run.name}
    return {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), **one, **where, "settings": {"console": "off"}}


def _steps_of_our_own(tracker: Any) -> None:
    """wandb drops what has a lower step than its last, and a resume goes back to that of a checkpoint."""
    tracker.tracker.define_metric("*", step_metric="step")


def _log_step_as_metric(tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
    tracker.log(values | {"step": step}, step=None)


def _log_plain_names(tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
    """mlflow refuses names such as pass@1."""
    tracker.log({re.sub(r"[^/\w.\- ]", "_", key): value for key, value in values.items()}, step=step)


def _wandb_table(columns: list[str], rows: list[list[Any]]) -> Any:
    return importlib.import_module("wandb").Table(columns=columns, data=rows)


def _trackio_table(columns: list[str], rows: list[list[Any]]) -> Any:
    return importlib.import_module("trackio").Table(columns=columns, data=rows)


def _trackio(start: Beginning) -> dict[str, Any]:
    project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if start.resumed else "never"
    return {"run_name": project, "name": start.run.name, "resume": resume}


TRACKERS = {  # in mlflow and clearml the variable for the project is read by accelerate
    "tensorboard": Kind(("tensorboard", "tensorboardX"), _tensorboard),
    "trackio": Kind(("trackio",), _trackio, table=_trackio_table),
    "wandb": Kind(("wandb",), _wandb, _steps_of_our_own, _log_step_as_metric, _wandb_table),
    "mlflow": Kind(
        ("mlflow",),
        lambda start: {"experiment_name": PROJECT, "run_name": start.run.name},
        log=_log_plain_names,
    ),
    "comet_ml": Kind(("comet_ml",), lambda start: {"run_name": os.environ.get("COMET_PROJECT_NAME", PROJECT)}),
    "aim": Kind(("aim",), lambda start: {"run_name": start.run.name, "logging_dir": ".", "experiment": PROJECT}),
    "clearml": Kind(("clearml",), lambda start: {"run_name": PROJECT, "task_name": start.run.name}),
    "dvclive": Kind(("dvclive",), lambda start: {"dir": str(start.run / "dvclive")}),
    "swanlab": Kind(("swanlab",), lambda start: {"run_name": PROJECT, "experiment_name": start.run.name}),
}


class Trackers:
    """The trackers of `run.trackers`; one that raises is named once and switched off."""

    def __init__(self, names: list[str], run: Path, *, config: dict[str, Any], note: Callable[[str], None]) -> None:
        self._names, self._run, self._config, self._note = names, run, config, note
        self._live: dict[str, GeneralTracker] = {}

    def start(self, next_step: int) -> None:
        """Open the trackers, before the line of `next_step` is logged."""
        for name in self._names:
            self._guarded(name, lambda name=name: self._start(name, Beginning(self._run, next_step)))

    def _start(self, name: str, start: Beginning) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker = LOGGER_TYPE_TO_CLASS[name](**TRACKERS[name].arguments(start))
        if hasattr(tracker, "start"):
            tracker.start()  # pyright: ignore[reportAttributeAccessIssue]
        TRACKERS[name].begin(tracker)
        tracker.store_init_configuration(flat(self._config))
        self._live[name] = tracker

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Send the numbers of a step to every tracker that still works."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        for name in [*self._live]:
            self._guarded(name, lambda name=name: TRACKERS[name].log(self._live[name], numbers, step))

    def log_completions(self, lines: Sequence[dict[str, Any]], step: int) -> None:
        """A table of held-out completions (lines of samples.jsonl), in trackers that have tables."""
        rows = [
            [(line | {"step": step})[column] for column in TABLE_COLUMNS] for line in lines if line["kind"] == "eval"
        ]
        for name in [*self._live] if rows else []:
            self._guarded(name, lambda name=name: self._log_table(name, rows[:TABLE_ROWS], step))

    def _log_table(self, name: str, rows: list[list[Any]], step: int) -> None:
        kind = TRACKERS[name]
        if kind.table is not None:
            kind.log(self._live[name], {"completions": kind.table([*TABLE_COLUMNS], rows)}, step)

    def close(self) -> None:
        """Have every tracker write what it holds."""
        for name in [*self._live]:
            self._guarded(name, self._live[name].finish)
        self._live.clear()

    def _guarded(self, name: str, call: Callable[[], Any]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # trackers talk; standard output is for a run's result
                call()
        except Exception as error:  # noqa: BLE001  other people's network code: whatever it raises, the run goes on without it
            self._live.pop(name, None)
            self._note(
                f"warning: tracker {name} failed and is switched off: {type(error).__name__}: {str(error)[:200]}"
            )


def flat(config: dict[str, Any], *, within: str = "") -> dict[str, bool | int | float | str]:
    """A nested configuration as section.key: value, with plain values only, which is what every tracker takes."""
    out: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{within}{key}"
        if isinstance(value, dict) and value:
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
        packages = TRACKERS[name].packages
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ValueError(f"run.trackers: {name} is not installed: pip install {packages[0]}")
