"""Trackers: steps after a resume, failures, and the check before a run starts."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
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


def logged(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Log as a run that is killed after step 4, and goes on from the checkpoint of step 2; return the calls by kind."""
    calls, notes = Calls(), list[str]()
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, partial(Tracker, calls=calls))
    for first, last in ((0, 4), (3, 5)):
        config = Config.model_validate({"method": "grpo"}).written()
        trackers = Trackers([name], run, config=config, note=notes.append)
        trackers.start(first)
        for step in range(first, last + 1):
            trackers.log({"reward/mean": 10.0 + step, "text": "left out", "absent": None}, step)
        trackers.close()
    assert notes == []
    return {kind: [value for of, value in calls if of == kind] for kind in ("open", "axis", "config", "log", "finish")}


def test_tensorboard_purges_the_steps_after_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = logged("tensorboard", tmp_path, monkeypatch)
    assert [one.get("purge_step") for one in calls["open"]] == [None, 3]
    assert calls["log"] == [({"reward/mean": 10.0 + step}, step) for step in (0, 1, 2, 3, 4, 3, 4, 5)]
    assert all(type(value) in (bool, int, float, str) for value in calls["config"][0].values())
    assert calls["config"][0]["grpo.group_size"] == 8


def test_wandb_goes_on_in_the_same_run_by_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / "run-1").mkdir()
    calls = logged("wandb", tmp_path / "run-1", monkeypatch)
    first, again = calls["open"]
    assert first == again
    assert (first["run_name"], first["name"], first["resume"]) == ("tinyrl", "run-1", "allow")
    assert calls["axis"] == ["step", "step"]
    assert {step for _, step in calls["log"]} == {None}
    numbers = [values for values, _ in calls["log"] if "reward/mean" in values]
    assert numbers == [{"reward/mean": 10.0 + step, "step": step} for step in (0, 1, 2, 3, 4, 3, 4, 5)]


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


class Tables:
    """In place of wandb or trackio: keeps what a table is made of."""

    @staticmethod
    def Table(**given: Any) -> dict[str, Any]:
        return given


SAMPLES = [
    {"kind": "eval", "prompt_index": 0, "prompt": "1+1?", "completion": "2", "reward": 1.0},
    {"kind": "eval-greedy", "prompt_index": 0, "prompt": "1+1?", "completion": "3", "reward": None},
]


def tables_of(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of log of a tracker that is given SAMPLES of step 5, and then none of step 6."""
    calls = Calls()
    notes = list[str]()
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, partial(Tracker, calls=calls))
    monkeypatch.setitem(sys.modules, name, Tables)
    trackers = Trackers([name], run, config={}, note=notes.append)
    trackers.start(0)
    trackers.log_completions(SAMPLES, 5)
    trackers.log_completions([], 6)
    trackers.close()
    assert notes == []
    return [value for kind, value in calls if kind == "log"]


TABLE = {
    "columns": ["step", "kind", "prompt", "completion", "reward"],
    "data": [[5, "eval", "1+1?", "2", 1.0], [5, "eval-greedy", "1+1?", "3", None]],
}


def test_wandb_gets_the_completions_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables_of("wandb", tmp_path, monkeypatch) == [({"completions": TABLE, "step": 5}, None)]


def test_trackio_gets_the_completions_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables_of("trackio", tmp_path, monkeypatch) == [({"completions": TABLE}, 5)]


def test_other_trackers_get_no_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables_of("tensorboard", tmp_path, monkeypatch) == []


def test_completions_are_uploaded_only_where_that_is_said() -> None:
    run = Config.model_validate({"method": "grpo"}).run
    assert run.log_completions is False
    with pytest.raises(ValueError, match=r"run\.log_completions"):
        build_config({"method": "grpo"}, ["run.log_completions=true"])
    given = build_config({"method": "grpo"}, ["run.log_completions=true", "run.trackers=[wandb]"])
    assert given.run.log_completions is True
