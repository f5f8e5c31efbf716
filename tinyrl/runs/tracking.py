"""Experiment trackers (tensorboard, wandb, mlflow, ...) through accelerate.

metrics.jsonl is the record; a tracker can never stop a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from tinyrl.text import did_you_mean


class Trackers:
    """The trackers of `run.trackers`; one that raises is named once and switched off."""

    def __init__(self, names: list[str], run: Path, *, config: dict[str, Any], note: Callable[[str], None]) -> None:
        self._note = note
        self._live: dict[str, GeneralTracker] = {}
        for name in names:
            self._guarded(name, lambda name=name: self._start(name, run, config))

    def _start(self, name: str, run: Path, config: dict[str, Any]) -> None:
        kind = LOGGER_TYPE_TO_CLASS[name]
        tracker = kind(run.name, logging_dir=str(run)) if kind.requires_logging_directory else kind(run.name)
        if hasattr(tracker, "start"):
            tracker.start()  # pyright: ignore[reportAttributeAccessIssue]
        tracker.store_init_configuration(config)
        self._live[name] = tracker

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Send the numbers of a step to every tracker that still works."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        for name, tracker in list(self._live.items()):
            self._guarded(name, lambda tracker=tracker: tracker.log(numbers, step=step))

    def close(self) -> None:
        for name, tracker in list(self._live.items()):
            self._guarded(name, tracker.finish)

    def _guarded(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  other people's network code: whatever it raises, the run goes on without it
            self._live.pop(name, None)
            self._note(
                f"warning: tracker {name} failed and is switched off: {type(error).__name__}: {str(error)[:200]}"
            )


def check_trackers(names: list[str]) -> None:
    """Raises ValueError for a tracker accelerate does not know."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = [str(k) for k in LOGGER_TYPE_TO_CLASS]
            raise ValueError(
                f"run.trackers: there is no tracker {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
            )
