"""Experiment trackers (tensorboard, trackio, wandb, mlflow, ...) through accelerate's classes.

metrics.jsonl is the record; a tracker can never stop a run. The project is `tinyrl`, or that of WANDB_PROJECT
and the like. accelerate is imported when a tracker starts, so that names are checked before torch is loaded.
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

from tinyrl.config.refusal import Refusal
from tinyrl.runs.folders import write_atomic


def _arguments(name: str, run: Path, next_step: int) -> dict[str, Any]:
    """Return the arguments of accelerate's class of a tracker. next_step: the first one logged; 0 in a new run."""
    project = os.environ.get(f"{name.upper()}_PROJECT", "tinyrl")  # accelerate reads that of mlflow
    if name == "tensorboard":
        purge = {"purge_step": next_step} if next_step else {}  # else steps after the checkpoint would be there twice
        return {"run_name": name, "logging_dir": str(run), **purge}
    if name == "trackio":
        return {"run_name": project, "name": run.name, "resume": "allow" if next_step else "never"}
    if name == "wandb":  # a resume goes on in the same run; the screen is not copied: its last line is rewritten
        file = run / "wandb_id"
        if not file.exists():
            write_atomic(file, secrets.token_hex(8))
        one = {"id": file.read_text("utf-8").strip(), "resume": "allow", "name": run.name}
        one["dir"] = os.environ.get("WANDB_DIR", str(run))
        return {"run_name": project, **one, "settings": {"console": "off"}}
    return {"experiment_name": project, "run_name": run.name}  # mlflow


def _make_state() -> None:
    """Make accelerate's state of the process, without which some of its trackers raise. It is that of a CPU, so that it
    neither chooses nor opens a GPU, and it may set the number of threads, which is put back: numbers depend on it.
    """
    import torch
    from accelerate.state import PartialState

    threads = torch.get_num_threads()
    PartialState(cpu=True)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


COLUMNS = ("step", "kind", "prompt", "completion", "reward")  # of the table of completions


class Trackers:
    """The trackers of `run.trackers`; one that raises is reported once and switched off."""

    def __init__(self, names: Sequence[str], run: Path, *, config: dict[str, Any], note: Callable[[str], None]) -> None:
        self._run = run
        self._config = config
        self._note = note
        self._live: dict[str, Any] = dict.fromkeys(names)

    def _each(self, act: Callable[[str, Any], object]) -> None:
        for name, tracker in [*self._live.items()]:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # standard output is for a run's result
                    act(name, tracker)
            except Exception as error:  # noqa: BLE001  other people's network code: the run goes on
                del self._live[name]
                what = f"{type(error).__name__}: {str(error)[:200]}"
                self._note(f"warning: tracker {name} failed and is switched off: {what}")

    def start(self, next_step: int) -> None:
        """Open the trackers, before the line of `next_step` is logged."""

        def open_one(name: str, _: None) -> None:
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            _make_state()
            tracker: Any = LOGGER_TYPE_TO_CLASS[name](**_arguments(name, self._run, next_step))
            if hasattr(tracker, "start"):
                tracker.start()
            if name == "wandb":
                tracker.tracker.define_metric("*", step_metric="step")
            tracker.store_init_configuration(flat(self._config))
            self._live[name] = tracker

        self._each(open_one)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        def log_one(name: str, tracker: Any) -> None:
            values = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            if name == "mlflow":  # refuses names such as pass@1
                values = {re.sub(r"[^/\w.\- ]", "_", key): value for key, value in values.items()}
            if name == "wandb":  # its own steps never go back, and a resume goes back to that of a checkpoint
                tracker.log(values | {"step": step}, step=None)
            else:
                tracker.log(values, step=step)

        self._each(log_one)

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        """Upload samples of an evaluation, as samples.jsonl has them, as a table named completions."""

        def log_one(name: str, tracker: Any) -> None:
            if name not in ("wandb", "trackio"):  # which have tables
                return
            rows = [[step, *(sample.get(column) for column in COLUMNS[1:])] for sample in samples]
            table = importlib.import_module(name).Table(columns=[*COLUMNS], data=rows)
            if name == "wandb":  # by its own steps, as in `log`
                tracker.log({"completions": table, "step": step}, step=None)
            else:
                tracker.log({"completions": table}, step=step)

        if samples:
            self._each(log_one)

    def close(self) -> None:
        """Have every tracker write what it holds."""
        self._each(lambda name, tracker: tracker and tracker.finish())
        self._live.clear()


def flat(config: dict[str, Any], *, within: str = "") -> dict[str, bool | int | float | str]:
    """Flatten a nested configuration to section.key: value, with plain values only; lists are JSON."""
    out: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            out |= flat(value, within=f"{within}{key}.")
        else:
            out[f"{within}{key}"] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return out


def check_trackers(names: Sequence[str]) -> None:
    """Raise Refusal for a tracker that is not installed."""
    for name in names:
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise Refusal(("run.trackers",), f"run.trackers: {name} is not installed: pip install 'tinyrl[track]'")
