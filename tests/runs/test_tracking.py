"""Trackers: failures, and the check before a run starts; what real ones write: test_real_trackers.py."""

import importlib.util
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tinyrl.runs.resolve import config_of
from tinyrl.runs.tracking import Trackers, check_trackers

Calls = list[tuple[str, Any]]


class Tracker:
    """In place of accelerate's: notes its calls, and fails when it is `start`ed or when it `log`s, or never."""

    def __init__(self, run_name: str, *, calls: Calls, fails: str = "", **arguments: Any) -> None:
        self.calls, self.fails = calls, fails
        self.calls.append(("open", {"run_name": run_name, **arguments}))
        if fails == "start":
            raise OSError("no such server")
        self.tracker = SimpleNamespace(define_metric=lambda name, step_metric: calls.append(("axis", step_metric)))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.calls.append(("log", (values, step)))
        if self.fails:
            raise ConnectionError("network down")

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_a_failing_tracker_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Calls] = {"mlflow": [], "trackio": [], "tensorboard": []}
    for name, fails in {"mlflow": "log", "trackio": "", "tensorboard": "start"}.items():
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, partial(Tracker, calls=calls[name], fails=fails))
    notes: list[str] = []
    trackers = Trackers([*calls], tmp_path, config={}, note=notes.append)
    trackers.start(0)
    for step in range(3):
        trackers.log({"loss": 1.0, "text": "left out", "list": [1]}, step)
    trackers.close()
    assert [("tensorboard" in note, "no such server" in note) for note in notes] == [(True, True), (False, False)]
    assert "mlflow" in notes[1]
    assert [value for kind, value in calls["mlflow"] if kind == "log"] == [({"loss": 1.0}, 0)]
    assert [value for kind, value in calls["trackio"] if kind == "log"] == [({"loss": 1.0}, step) for step in range(3)]


def test_a_tracker_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run\.trackers.*wandb"):
        check_trackers(["wandb"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboardX" or None)
    check_trackers(["tensorboard"])


def test_completions_are_uploaded_only_where_that_is_said() -> None:
    run = config_of({"method": "grpo"}).run
    assert run.log_completions is False
    with pytest.raises(ValueError, match=r"run\.log_completions"):
        config_of({"method": "grpo"}, ["run.log_completions=true"])
    given = config_of({"method": "grpo"}, ["run.log_completions=true", "run.trackers=[wandb]"])
    assert given.run.log_completions is True
